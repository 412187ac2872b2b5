"""When it stands still: which rank everybody waits for, and what is left of one that died.

How it flows, a module a step (``lookout.py`` above puts them together for a session):

* what a rank says of itself: ``roll`` (types), ``doing`` (its frames), ``positions`` (to the very call);
* kept where it outlives the process: ``last_words`` in a ``state_file`` at its ``places``, by a ``keeper``;
* noticed: ``watch``; asked: ``standstill``, which keeps what it ``told``, of the ``mates`` on this host and, through
  the job's store, of other hosts: ``roll_call`` with ``ear``, ``asking``, ``answer``, ``connection``, ``sockets``;
* decided: ``verdict`` from ``waits``, ``mismatch``, ``graph``; in words and facts: ``telling``;
* afterwards: ``recovery`` of dead ranks' last words; the ``inquest`` over run logs, by ``history`` of each rank, and
  its ``agreement`` with torch's own dumps.

Pure, and tested as tables: ``roll``, ``doing``, ``positions``, ``watch``, ``verdict``, ``waits``, ``mismatch``,
``graph``, ``telling``, ``last_words``, ``answer``, ``inquest``, ``history``, ``agreement``.
"""
