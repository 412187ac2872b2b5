"""Opens a session: what torch and the environment say of this rank's place, and the session made of it.

:mod:`ddtrace_pytorch.lifecycle` imports this module when a session opens, and with it the rooms that a session needs:
`patch()` is paid for by every process, also by one that never trains.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from ddtrace.trace import tracer

from ddtrace_pytorch.border import speak_for, warn_once
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.identity import place
from ddtrace_pytorch.identity.describe import Member
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.records.recorder import Recorder
from ddtrace_pytorch.runlog.left_behind import LeftBehind
from ddtrace_pytorch.session import Session
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.settings import load as load_settings
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.termination import Handler
from ddtrace_pytorch.training.steps import Steps


def member_of_group(distributed: Any, ordinal: int, generated_id: str | None) -> Member:
    """This process' place in the default group, which is up."""
    return Member(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        backend=str(distributed.get_backend()),
        store=distributed.distributed_c10d._get_default_store(),
        ordinal=ordinal,
        generated_id=generated_id,
        device_index=_chosen_device(),
    )


def member_of_failed_group(arguments: Mapping[str, Any], ordinal: int, generated_id: str | None) -> Member:
    """As much of this process' place as is known where `init_process_group(**arguments)` raised."""
    rank, world_size = place_hint(arguments)
    return Member(
        rank=rank or 0,
        world_size=world_size or 1,
        backend=_text(arguments.get("backend")),
        ordinal=ordinal,
        generated_id=generated_id,
        place_known=rank is not None and world_size is not None,
    )


def place_hint(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The rank of this process and the world's size, as `init_process_group(**arguments)` will probably have them."""
    rank = _known(arguments.get("rank"), place.rank_hint(os.environ)[0])
    return rank, _known(arguments.get("world_size"), place.world_size_hint(os.environ)[0])


def member_by_environment(ordinal: int, generated_id: str | None) -> Member:
    """As much of this process' place as its launcher says."""
    return member_of_failed_group({}, ordinal, generated_id)


def rendezvous_facts(arguments: Mapping[str, Any]) -> dict[str, Fact]:
    """Where the ranks were to meet, by an `init_method` other than the environment."""
    init_method = _text(arguments.get("init_method"))
    if init_method is None or init_method.startswith("env://"):
        return {}
    facts: dict[str, Fact] = {"pytorch.init_method": init_method}
    found = re.match(r"tcp://(\[[^]]+\]|[^:/?]+):(\d{1,5})", init_method)
    return facts | ({"pytorch.master_addr": found[1], "pytorch.master_port": int(found[2])} if found else {})


def wanted_settings() -> Settings | None:
    """The settings of a session that opens now; None where they want none."""
    settings = load_settings()
    return settings if _ask_for_one(settings) and tracer.enabled else None


def _ask_for_one(settings: Settings) -> bool:
    return settings.trace_enabled and settings.export != "none"


def say_if_ddtrace_is_off() -> None:
    """Where a session would be wanted but for ddtrace, which had a tracer when the one before was opened."""
    if _ask_for_one(load_settings()) and not tracer.enabled:
        warn_once(
            "ddtrace's tracer is off, so nothing is told of this process group, nor written to its run log. ddtrace "
            "shuts it down at a SIGTERM, also where a handler of yours has the process go on"
        )


def open_session(
    member: Member | None,
    instrument: str,
    handler: Handler,
    lives: GroupLives,
    steps: Steps,
    profilers: Profilers,
    recorder: Recorder | None,
    left_behind: LeftBehind,
) -> Session | None:
    """A session, open; None where the settings want none. Without `member`, of a single process that trains."""
    settings = wanted_settings()
    if settings is None:
        return None
    if member is not None and member.place_known:
        speak_for(member.rank)
    place = member or Member(rank=0, world_size=1)
    session = Session(place, settings, instrument, handler, lives, steps, profilers, recorder, left_behind)
    session.open()
    return session


def _chosen_device() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return None


def _known(argument: Any, hint: int | None) -> int | None:
    return argument if isinstance(argument, int) and argument >= 0 else hint


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
