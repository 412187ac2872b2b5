"""Whether a rank has got over what a collective raised: that was caught, or the rank is in a later call. Pure.

What torch refuses is heard by no other rank and is not counted, so the rank's next call has the same number. Once it is
caught nothing is left of it. What was raised because another rank broke the call tells for a while longer who that was,
though it was caught.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ddtrace_pytorch.stalls.roll import Life, Raised, RankState

# ns. An exception as old as this, on a rank that lives, has been dealt with.
DEALT_WITH = 60 * 10**9
# ns. Some hear seconds after the others that a rank is gone, and ask then.
ECHOES = 10 * 10**9

# What a collective says when another rank broke it.
_ECHO = re.compile(
    r"clos|reset|broken pipe|time.?out|timed out|abort|remote|refused|unreachable|heartbeat", re.IGNORECASE
)


def is_echo(error: str) -> bool:
    """Whether it is what a rank raises because another one is gone, or doesn't come."""
    return _ECHO.search(error) is not None


def without(state: RankState, now: int) -> RankState:
    """`state` without what the rank raised, if it has got over that."""
    raised, at = state.raised, state.as_of or now
    if raised is None:
        return state
    over = is_over(raised, state, at) or (state.life is Life.ALIVE and is_old(raised, at))
    return replace(state, raised=None) if over else state


def is_over(raised: Raised, state: RankState, at: int) -> bool:
    """Whether it tells nothing any more at that time of the rank's own clock."""
    # In a handler too one may try again, or something else.
    calls = (here.current for here in state.groups.values())
    if raised.at and any(call is not None and call.since >= raised.at for call in calls):
        return True
    return bool(raised.caught) and (not is_echo(raised.error) or at - raised.at > ECHOES)


def is_old(raised: Raised, at: int) -> bool:
    return raised.at > 0 and at - raised.at > DEALT_WITH
