"""Bytes of a message that is more than one tensor, and whom it is for; called from the generated wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from ddtrace_pytorch.ledger import Group
from ddtrace_pytorch.tensors import nbytes

__all__ = ["for_others", "gathered_from_others", "grand_total", "nbytes", "peer", "split_for_others", "total"]

_nbytes = attrgetter("nbytes")


def total(tensors: Sequence[Any]) -> int:
    try:
        return sum(map(_nbytes, tensors))
    except AttributeError:
        return sum(map(nbytes, tensors))


def grand_total(lists: Iterable[Sequence[Any]]) -> int:
    return sum(map(total, lists))


def for_others(tensors: Sequence[Any] | None, here: Group) -> int:
    """All but the slice that stays on this rank; 0 where only the root has a list and this is not the root."""
    return total(tensors) - nbytes(tensors[here.rank]) if tensors else 0


def gathered_from_others(whole: Any, own: Any, root: int | None, group_root: int | None, here: Group) -> int:
    """What the root gets of the others; 0 on a rank that is not the root, which may pass a `whole` nobody fills."""
    at_root = here.rank == group_root if group_root is not None else here.ranks[here.rank] == (root or 0)
    return int(whole.nbytes - own.nbytes) if at_root and whole is not None else 0


def split_for_others(tensor: Any, splits: Sequence[int] | None, here: Group) -> int:
    """All of `tensor` but the rows that stay on this rank; without `splits`, each rank gets as many."""
    size = nbytes(tensor)
    if not splits:
        return size - size // here.size
    rows = tensor.shape[0]
    return int(size // rows * (rows - splits[here.rank])) if rows else 0


def peer(root: int | None, group_root: int | None, here: Group) -> int | None:
    """The global rank that a transfer is with, from the two ways of saying it; None: with anybody."""
    return root if root is not None or group_root is None else here.ranks[group_root]
