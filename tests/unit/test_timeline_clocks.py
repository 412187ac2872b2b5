"""Clocks of hosts, from the ends of the collectives they share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.timeline.clocks import Aligned, Ends, align

MS = 1_000_000
T0 = 1_790_000_000 * 1000 * MS


def aligned(hosts: dict[str, list[tuple[str, int, int]]]) -> dict[str, Aligned]:
    """Each host one rank, with calls as (group, number, end)."""
    ends = Ends()
    for host, calls in hosts.items():
        ends.add(host, [((group, number), end) for group, number, end in calls])
    return {one.host: one for one in align(ends.of_host)}


def test_two_hosts_are_aligned_on_the_ends_of_the_calls_they_share() -> None:
    here = [("0", number, T0 + number * MS) for number in range(9)]
    there = [("0", number, T0 + number * MS + 5 * MS + number % 3) for number in range(1, 9)]
    found = aligned({"a": here, "b": there})
    assert found["a"] == Aligned("a", 0, None, 0, 0)
    assert found["b"] == Aligned("b", -5 * MS - 1, "a", 1, 8)


def test_calls_are_matched_by_group_and_number_and_not_by_position() -> None:
    here = [("0", number, T0 + number * MS) for number in range(9)]
    # The same calls, of which the first are lost, among others of another group.
    there = [("1", number, T0 + number * 7 * MS) for number in range(9)] + [(g, n, end + 40) for g, n, end in here[5:]]
    assert aligned({"a": here, "b": there})["b"] == Aligned("b", -40, "a", 0, 4)


def test_hosts_without_a_shared_call_stay_as_they_are() -> None:
    found = aligned({"a": [("0", 1, T0)], "b": [("0", 2, T0)], "c": [("0", 2, T0 + 7)], "d": []})
    assert [(one.by, one.offset) for one in found.values()] == [(None, 0), (None, 0), ("b", -7), (None, 0)]


def test_a_number_that_comes_twice_says_nothing() -> None:
    ends = Ends()
    ends.add("a", [(("0", 1), T0), (("0", 2), T0), (("0", 1), T0 + 99)])
    assert ends.of_host == {"a": {("0", 2): T0}}


def test_of_the_ranks_of_a_host_the_first_that_came_back_counts() -> None:
    ends = Ends()
    for late in (3, 0, 9):
        ends.add("a", [(("0", 1), T0 + late)])
    assert ends.of_host == {"a": {("0", 1): T0}}


@given(hosts=st.integers(2, 5), ranks=st.integers(1, 3), calls=st.integers(200, 500), most=st.integers(10, 200))
def test_no_more_ends_are_kept_than_said_and_hosts_still_match(hosts: int, ranks: int, calls: int, most: int) -> None:
    ends = Ends(most)
    for host in range(hosts):
        for _ in range(ranks):
            ends.add(f"h{host}", ((("0", number), T0 + number * MS + host) for number in range(calls)))
            assert sum(map(len, ends.of_host.values())) <= most
    assert [one.offset for one in align(ends.of_host)] == [-host for host in range(hosts)]


offsets = st.lists(st.integers(-(10**12), 10**12), min_size=2, max_size=6)


@given(
    offsets=offsets,
    jitter=st.integers(0, 5 * MS),
    noise=st.randoms(use_true_random=False),
    missing=st.floats(0, 0.6),
)
def test_offsets_are_found_within_the_jitter(offsets: list[int], jitter: int, noise, missing: float) -> None:  # type: ignore[no-untyped-def]
    """Hosts of two ranks in one group; each lacks some calls, the first host's are all there."""
    ends = Ends()
    for host, offset in enumerate(offsets):
        for _ in range(2):
            ends.add(
                f"h{host}",
                [
                    (("world", number), T0 + number * 50 * MS + offset + noise.randint(0, jitter))
                    for number in range(60)
                    if not host or noise.random() >= missing or number < 20
                ],
            )
    for one, offset in zip(align(ends.of_host), offsets, strict=True):
        assert abs(one.offset - (offsets[0] - offset)) <= jitter
        assert one.residual <= 2 * jitter
        assert (one.by is None) is (one.host == "h0")


@given(offsets=offsets, jitter=st.integers(0, 5 * MS), noise=st.randoms(use_true_random=False))
def test_hosts_in_a_chain_are_aligned_by_way_of_each_other(offsets: list[int], jitter: int, noise) -> None:  # type: ignore[no-untyped-def]
    """Only neighbours share a group, as stages of a pipeline do: each link may add its jitter."""
    hosts = {}
    for host, offset in enumerate(offsets):
        hosts[f"h{host}"] = [
            (group, number, T0 + number * 50 * MS + offset + noise.randint(0, jitter))
            for group in (f"{host - 1}-{host}", f"{host}-{host + 1}")
            for number in range(30)
        ]
    order = list(hosts)
    noise.shuffle(order)
    found = aligned({name: hosts[name] for name in order})
    first = order[0]
    for name, one in found.items():
        links = abs(int(name[1:]) - int(first[1:]))
        apart = offsets[int(first[1:])] - offsets[int(name[1:])]
        assert abs(one.offset - apart) <= links * jitter
