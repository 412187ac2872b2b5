"""When a collective that is under way is a stall."""

from __future__ import annotations

import pytest

from ddtrace_pytorch.stalls.watch import SECOND, Outcome, Over, Pending, Stalled, Watch, limit, outcome


@pytest.mark.parametrize(
    ("seconds", "p99", "timeout", "expected"),
    [
        (10, 0, None, 10),
        (10, 1, 1800, 10),
        (10, 2, 1800, 16),
        (10, 0, 8, 4),
        (10, 0, 1, 1),
        (10, 300, 1800, 900),
        (0.5, 0, 1800, 0.5),
    ],
)
def test_how_long_an_operation_may_take(seconds: float, p99: float, timeout: float | None, expected: float) -> None:
    assert limit(seconds, round(p99 * SECOND), None if timeout is None else timeout * SECOND) == expected * SECOND


def pending(key: int = 7, since: float = 100, group: str = "0") -> Pending:
    return Pending(group, "dp", "all_reduce", key, round(since * SECOND), 10 * SECOND)


@pytest.mark.parametrize(
    ("unseen", "raised", "ends", "step", "how"),
    [
        (False, False, False, 11, Outcome.WENT_ON),
        (False, True, True, 11, Outcome.RAISED),
        (False, False, True, 11, Outcome.UNKNOWN),
        (True, False, False, 11, Outcome.UNKNOWN),
        (True, False, False, None, Outcome.UNKNOWN),
        (True, False, False, 12, Outcome.WENT_ON),
        (True, False, True, 12, Outcome.UNKNOWN),
    ],
)
def test_what_nobody_saw_end_well_is_not_said_to_have_gone_on(
    unseen: bool, raised: bool, ends: bool, step: int | None, how: Outcome
) -> None:
    one = pending()._replace(unseen=unseen, step=11 if step is not None else None)
    assert outcome(one, raised, ends, step) is how


def play(watch: Watch, looks: dict[float, list[Pending]]) -> dict[float, tuple[list[Stalled], list[Over]]]:
    said = {}
    for at, there in looks.items():
        stalled, over = watch.look(there, round(at * SECOND))
        if stalled or over:
            said[at] = stalled, over
    return said


def test_it_is_said_at_the_limit_again_when_it_has_doubled_and_when_it_is_over() -> None:
    one = pending()
    said = play(Watch(), {100.0 + second: [one] for second in range(60)} | {161.0: []})
    assert said == {
        110.0: ([Stalled(one, 10 * SECOND, 1)], []),
        120.0: ([Stalled(one, 20 * SECOND, 2)], []),
        140.0: ([Stalled(one, 40 * SECOND, 3)], []),
        161.0: ([], [Over(one, 61 * SECOND)]),
    }


def test_what_ends_in_time_is_not_spoken_of() -> None:
    assert play(Watch(), {101.0: [pending()], 109.9: [pending()], 110.5: []}) == {}


def test_the_next_call_is_another_one() -> None:
    first, second = pending(7, 100), pending(8, 111)
    said = play(Watch(), {111.0: [first], 112.0: [second], 122.0: [second]})
    assert said[112.0] == ([], [Over(first, 12 * SECOND)])
    assert said[122.0] == ([Stalled(second, 11 * SECOND, 1)], [])


def test_what_becomes_known_of_a_call_does_not_make_it_another_one() -> None:
    """Its number, as torch's own calls are counted, and its limit, as other threads' calls come to their end."""
    first, later = pending(7), pending(9)._replace(limit=16 * SECOND)
    said = play(Watch(), {111.0: [first], 112.0: [later], 122.0: [later], 123.0: []})
    assert said == {
        111.0: ([Stalled(first, 11 * SECOND, 1)], []),
        122.0: ([Stalled(later, 22 * SECOND, 2)], []),
        123.0: ([], [Over(later, 23 * SECOND)]),
    }


def test_a_process_that_was_stopped_says_it_once_when_it_goes_on() -> None:
    one = pending()
    assert [len(stalled) for stalled, _ in play(Watch(), {500.0: [one], 501.0: [one], 502.0: [one]}).values()] == [1]


def test_the_longest_comes_first() -> None:
    stalled, _ = Watch().look([pending(7, 105), pending(8, 100, "1")], 120 * SECOND)
    assert [one.pending.key for one in stalled] == [8, 7]
