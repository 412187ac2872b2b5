"""What a tensor says of itself, where releases of torch differ."""

from __future__ import annotations

from typing import Any


def nbytes(tensor: Any) -> int:
    """``tensor.nbytes``, which came with torch 2.1; sparse tensors have none."""
    try:
        return int(tensor.nbytes)
    except AttributeError:
        if tensor.is_sparse:
            raise
        return int(tensor.numel() * tensor.element_size())
