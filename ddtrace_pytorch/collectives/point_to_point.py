"""`batch_isend_irecv` where `isend` and `irecv` are proxies.

torch tells by ``is`` which of the two a P2POp holds. One made with a name that was bound before us holds the function
itself, and would be taken for the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch import in_place


def allow_proxies(distributed: Any) -> list[Callable[[], None]]:
    """Have each P2POp of a batch hold what torch's module holds, for as long as the call lasts."""
    c10d = distributed.distributed_c10d

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            held = []
            if isinstance(p2p_op_list, list):
                held = [(one, one.op) for one in p2p_op_list if isinstance(one, c10d.P2POp)]
            try:
                for one, function in held:
                    one.op = next((there for there in (c10d.isend, c10d.irecv) if there == function), function)
                return original(p2p_op_list)
            finally:
                for one, function in held:
                    one.op = function

        return batch_isend_irecv

    return in_place.place(distributed, "batch_isend_irecv", around)[0]
