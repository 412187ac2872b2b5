"""Collectives of one session: the ledger, the instrumented functions, and what is told of them and when.

The training threads only add to the ledger. What is here runs on the Pulse and while the session opens and closes
(also on the thread that destroys a group, which is the last that can ask it anything).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import c_wrappers, telling
from ddtrace_pytorch.collectives.callbacks import Callbacks
from ddtrace_pytorch.collectives.flight_recorder import FlightRecorder
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.groups import TorchGroups
from ddtrace_pytorch.collectives.instrument import Instrument
from ddtrace_pytorch.collectives.markers import markers
from ddtrace_pytorch.collectives.outlet import Outlet
from ddtrace_pytorch.collectives.readings import LOOK_SECONDS, Readings
from ddtrace_pytorch.collectives.summaries import Summaries
from ddtrace_pytorch.collectives.unfinished import Unfinished
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity.topology import Nodes
from ddtrace_pytorch.ledger import Group, Ledger
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import Settings

MILLISECOND = 1_000_000
# At the end of a session: for what the flight recorder has to say.
LAST_DUMP_SECONDS = 0.8
# The same, between a SIGTERM and its being raised again.
FAREWELL_SECONDS = 0.3


class Collectives:
    """What this rank says to the others, from :meth:`open` to :meth:`close`."""

    def __init__(
        self,
        torch: Any,
        settings: Settings,
        clock: Clock,
        span: RankSpan,
        exporter: Exporter,
        lives: GroupLives,
        wraps: bool,
    ) -> None:
        self._one_by_one = settings.collectives != "summary"
        self._groups = TorchGroups(torch.distributed)
        slow = round(settings.slow_ms * MILLISECOND)
        self.ledger = Ledger(self._groups, slow, _each(settings.collectives), c_wrappers.times)
        self.instrument = Instrument(torch, self.ledger, self._groups, lives, settings.instrument, wraps)
        self._markers = safely("mark collectives")(markers)(settings, torch, self._node_of)
        placeholder = getattr(torch.distributed.distributed_c10d, "_IllegalWork", ())
        self._callbacks = Callbacks(self.instrument, clock, placeholder)
        self._outlet = Outlet(clock, span, exporter)
        self.readings = Readings(self.ledger, self._groups, self.instrument.in_flight)
        recorder = FlightRecorder(torch._C._distributed_c10d)
        self.unfinished = Unfinished(recorder)
        self._summaries = Summaries(self.ledger, self.readings, recorder, clock, self._outlet)
        # Torch's own counts are read while the groups are still there, and totals told.
        self.look = self.readings.look
        self.summarise = self._summaries.tell

    def open(self) -> None:
        self.instrument.install()
        if self._markers is not None:
            self.instrument.listen(self._markers)
        safely("call the hooks of collectives")(self._callbacks.open)()

    @property
    def watched_in_part(self) -> bool:
        """Whether torch has launched collectives and its recorder told of none: if one of its own doesn't end, nobody
        sees it."""
        return self.unfinished.blind and self.readings.any_launched

    def calls(self) -> int:
        """Collectives that were seen so far, over all groups."""
        return self.ledger.calls()

    def know(self, nodes: Nodes) -> None:
        """Which rank is on which node, of the default group's."""
        self._groups.nodes = nodes
        self._place_groups()

    def _place_groups(self) -> None:
        for here in tuple(self.ledger.groups):
            if here.crosses_nodes is not None:
                continue
            alive = here.process_group and here.process_group()
            if alive is not None:
                here.crosses_nodes = self._groups.crosses_nodes(alive)
                # In the mode that asks for them, its calls are told of from now on.
                for cell in tuple(here.cells.values()):
                    cell.find_slow()

    def beat(self, patience: float = LOOK_SECONDS) -> None:
        """Once a second: tell of the calls that are told of one by one."""
        # Again, for a group that was met in the very moment in which the nodes became known.
        self._place_groups()
        self.look(patience)
        self._summaries.tell_of_gone()
        self.ledger.beat()
        for sample in self.ledger.take_samples():
            self._outlet.sample(sample)
        notes, lost = self.ledger.take_notes()
        if self._one_by_one:
            for note in notes:
                self._outlet.call(note)
        else:
            for note, many in telling.slowest_of_each(notes):
                self._outlet.call(note, slow_calls=many)
        if lost:
            self._outlet.calls_lost(lost)

    @safely("tell of the collectives before the end")
    def farewell(self) -> None:
        """The process may be about to die: tell what there is. Nobody is asked anything that may take long."""
        self.beat()
        self.summarise(last=Deadline(FAREWELL_SECONDS))

    def close(self, deadline: Deadline) -> None:
        """Give torch its functions back and tell what is left."""
        self._callbacks.close(deadline.left())
        self.instrument.remove()
        self.ledger.close()
        self.beat(deadline.left(LOOK_SECONDS))
        self.summarise(last=Deadline(deadline.left(LAST_DUMP_SECONDS)))

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is counted here."""
        self._callbacks.abandon()
        self.instrument.remove()
        self.ledger.close()

    def _node_of(self, rank: int) -> str | None:
        nodes = self._groups.nodes
        return None if nodes is None else nodes.of(rank)


def _each(mode: str) -> Callable[[Group], bool]:
    """Which groups' calls are told of one by one in a mode of ``DD_PYTORCH_COLLECTIVES``."""
    if mode == "all":
        return lambda here: True
    return lambda here: mode == "crossnode" and bool(here.crosses_nodes)
