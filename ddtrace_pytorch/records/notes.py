"""An event or a scalar, recorded where it happens."""

from __future__ import annotations

from time import monotonic_ns
from types import CodeType
from typing import Any

from ddtrace_pytorch.records import tags
from ddtrace_pytorch.records.here import arrive, local, running_loop, task_number
from ddtrace_pytorch.records.recorder import Recorder
from ddtrace_pytorch.records.tags import NONE
from ddtrace_pytorch.records.user_span import current, surrounding


def row(
    recorder: Recorder,
    kind: str,
    name: str,
    values: dict[str, Any],
    code: CodeType | str,
    instruction: int,
    types: dict[str, Any] | None = None,
    of_step: tuple[int | None, int | None] | None = None,
) -> tuple[Any, ...] | None:
    """What :meth:`Recorder.add` takes of something that happens now; None on a thread of ours."""
    try:
        thread = local.here
    except AttributeError:
        thread = arrive()
    if thread.deaf:
        return None
    outer = current.get()
    if outer is not None or thread.foreign:
        outer = surrounding(outer, thread)
    step = recorder.progress.step
    return (
        kind,
        next(recorder.numbers),
        monotonic_ns(),
        name,
        values,
        step,
        tags.tags_of(step) if step.tags or tags.in_tasks else NONE,
        code,
        instruction,
        thread.name,
        task_number() if running_loop() is not None else None,
        outer,
        types,
        of_step,
        0,
        0,
        None,
        True,
        None,
    )
