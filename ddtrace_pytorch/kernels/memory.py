"""What the GPU's allocator did in a window, as torch's own viewer of memory has it (pytorch.org/memory_viz)."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch.border import safely

# Allocations that are remembered, the last ones.
MOST = 100_000


class MemoryHistory:
    """From :meth:`begin` to :meth:`end`; the user's own history, if one is kept, goes on as it was."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._is_ours = False

    @safely("keep a history of the GPU's memory")
    def begin(self) -> None:
        """Remember what is taken and given back, and where in the code, from here on."""
        is_kept = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        # Older releases don't say, and one of the user's must not end with ours.
        if is_kept is not None and not is_kept():
            self._torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST)
            self._is_ours = True

    @safely("take a snapshot of the GPU's memory")
    def end(self) -> Any:
        """Remember no more; gives what the viewer reads once it is pickled."""
        try:
            return self._torch.cuda.memory._snapshot()
        finally:
            self.leave()

    @safely("leave the history of the GPU's memory")
    def leave(self) -> None:
        """Remember no more."""
        if self._is_ours:
            self._is_ours = False
            self._torch.cuda.memory._record_memory_history(None)
