"""What a training is parallelised with, and by which library: the words, and what is known of one training. Pure.

Three tags, because three questions:

* ``framework`` keeps one value, as with ddtrace's built-in integration: the strongest of what was put to use. The words
  which that one knows (``ddp``, ``fsdp``, ``deepspeed``) are stronger than those that it doesn't, so that a job says
  what it said there; a new word only says more than ``none``.
* ``pytorch.parallelism`` has every kind that spans more than one rank, in a fixed order: ``fsdp+tp+pp``.
* ``pytorch.trainer`` has the libraries that run the loop, the outermost first: ``transformers+accelerate``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddtrace_pytorch.identity.mesh import Coordinates, Place
from ddtrace_pytorch.spans import Fact

# The weakest first. DeepSpeed wraps in DDP, FSDP can sit beside it; Megatron-LM's own classes are neither.
FRAMEWORKS = ("none", "tp", "pp", "zero", "megatron", "ddp", "fsdp", "deepspeed")
KINDS = ("ddp", "fsdp", "zero", "tp", "cp", "ep", "pp")
TRAINERS = ("torchtitan", "megatron", "transformers", "lightning", "fabric", "accelerate", "torchft")


@dataclass(frozen=True)
class Use:
    """What is learnt where something is put to use."""

    framework: str = "none"
    kinds: tuple[str, ...] = ()
    trainer: str | None = None
    places: tuple[Place, ...] = ()


class Makeup:
    """What is known of one life of a process group. It only ever grows, so that no tag is lost or goes back."""

    def __init__(self) -> None:
        self._frameworks: set[str] = set()
        self._kinds: set[str] = set()
        self._trainers: set[str] = set()
        self._coordinates = Coordinates()

    def add(self, use: Use) -> bool:
        """Whether `use` is news."""
        trainers = () if use.trainer is None else (use.trainer,)
        news = [
            _add(self._frameworks, (use.framework,)),
            _add(self._kinds, use.kinds),
            _add(self._trainers, trainers),
            self._coordinates.add(use.places),
        ]
        return any(news)

    def facts(self) -> dict[str, Fact]:
        """Tags of the rank span; only those that there is something to say in."""
        facts = self._coordinates.facts()
        for tag, words in (
            ("framework", [word for word in FRAMEWORKS if word in self._frameworks][-1:]),
            ("pytorch.parallelism", [word for word in KINDS if word in self._kinds]),
            ("pytorch.trainer", [word for word in TRAINERS if word in self._trainers]),
        ):
            if words:
                facts[tag] = "+".join(words)
        return facts


def _add(known: set[str], words: Iterable[str]) -> bool:
    fresh = set(words) - known
    known |= fresh
    return bool(fresh)
