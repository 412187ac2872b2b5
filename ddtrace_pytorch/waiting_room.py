"""Who is there, where `init_process_group` waits for a rank that doesn't come: before that nobody knows of anybody.

Only of this host's ranks: the others are known to nobody here but the store, which is the user's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence

from ddtrace_pytorch.border import safely, warn_first
from ddtrace_pytorch.first_here import is_of_a_job, is_present, present
from ddtrace_pytorch.identity.place import local_rank_hint, local_world_size_hint
from ddtrace_pytorch.threads import leave_signals_to_others

# Of a larger world nobody is looked for.
MOST_RANKS = 1 << 16


@safely("watch who waits in init_process_group")
def watch(rank: int, world_size: int, seconds: float, over: threading.Event) -> None:
    """`rank` waits for the others until `over` is set; where that takes longer than `seconds`, one rank of this host
    says which of them do."""
    if 1 < world_size <= MOST_RANKS and is_of_a_job():
        threading.Thread(
            target=_wait, args=(rank, world_size, seconds, over), name="ddtrace_pytorch.waiting_room", daemon=True
        ).start()


@safely("say who waits in init_process_group")
def _wait(rank: int, world_size: int, seconds: float, over: threading.Event) -> None:
    leave_signals_to_others()
    with present(_place(rank)):
        if over.wait(seconds):
            return
        here = [one for one in range(world_size) if is_present(_place(one))]
        if rank not in here:
            return  # no names are to be had here, or torch will refuse the number
        words = message(here, ranks_of_host(rank, world_size, os.environ), world_size, socket.gethostname(), seconds)
        warn_first(words, about="init_process_group waits")
        over.wait()


def _place(rank: int) -> str:
    return f"rank {rank} in init_process_group"


def ranks_of_host(rank: int, world_size: int, environ: Mapping[str, str]) -> range | None:
    """The ranks that the launcher started on this host, in a row; None where it doesn't say."""
    (local, _), (many, _) = local_rank_hint(environ), local_world_size_hint(environ)
    if local is None or many is None or not 0 <= rank - local <= world_size - many:
        return None
    return range(rank - local, rank - local + many)


def message(here: Sequence[int], expected: Sequence[int] | None, world_size: int, host: str, seconds: float) -> str:
    """What a person is told; `expected` are the ranks of this host, where that is known."""
    from ddtrace_pytorch.stalls.telling import in_words

    told = f"init_process_group has waited {seconds:.0f} s: here ({host}) with {in_words(here)}"
    missing = sorted({*(expected or ())} - {*here})
    if missing:
        return f"{told}, without {in_words(missing)}, as far as they are traced"
    if expected is None or len(expected) == world_size:
        return f"{told} of {world_size}"
    return f"{told}, all of this host; of the other {world_size - len(expected)} nothing is known here"
