"""Words that the user puts on the step under way."""

from __future__ import annotations

from contextvars import ContextVar

from ddtrace_pytorch.records.attributes import NAME_LIMIT, short_name
from ddtrace_pytorch.records.here import running_loop, task_number
from ddtrace_pytorch.training.progress import Progress, Step

# A task has its own, and gives them to those it starts; they are of one step, and are nothing in the next.
_of_task: ContextVar[tuple[Step | None, tuple[str, ...]]] = ContextVar("ddtrace_pytorch.tags", default=(None, ()))

# No more of them on one step than that.
MOST = 64

# Whether any task has had some. Few programs have: whoever records looks here first.
in_tasks = False
NONE: tuple[str, ...] = ()


def tag(progress: Progress, word: str) -> None:
    """Put `word` on the step under way: for this asyncio task and those it starts, or, outside of tasks, for all."""
    if type(word) is not str or len(word) > NAME_LIMIT:
        word = short_name(word)
    step = progress.step
    if running_loop() is None or task_number() is None:
        if len(step.tags) < MOST:
            progress.tag(word)
        return
    of, words = _of_task.get()
    mine = words if of is step else ()
    global in_tasks
    if word not in mine and len(mine) < MOST:
        in_tasks = True
        _of_task.set((step, (*mine, word)))


def tags_of(step: Step) -> tuple[str, ...]:
    """The words on `step`, as they are seen from here."""
    of, mine = _of_task.get()
    words = step.tags
    if of is not step:
        return tuple(words) if words else ()
    return (*words, *[word for word in mine if word not in words])
