"""Ends and circles, against what a slow and plain search finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.stalls.graph import dead_ends, on_every_circle

Graph = dict[int, set[int]]

graphs = st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 7), max_size=3), max_size=8)


def reached(graph: Graph, start: int) -> set[int]:
    """What can be reached in one step or more."""
    seen: set[int] = set()
    ahead = [*graph.get(start, ())]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead.extend(graph.get(node, ()))
    return seen


def has_circle(graph: Graph, nodes: set[int]) -> bool:
    inside = {node: graph.get(node, set()) & nodes for node in nodes}
    return any(node in reached(inside, node) for node in nodes)


@given(graphs, st.sets(st.integers(0, 7)))
def test_ends_are_what_leads_nowhere_else(graph: Graph, starts: set[int]) -> None:
    nodes = starts.union(*(reached(graph, start) for start in starts))
    ends = {
        frozenset({node} | reached(graph, node))
        for node in nodes
        if all(node in reached(graph, one) for one in reached(graph, node))
    }
    assert set(dead_ends(graph, starts)) == ends


@given(graphs)
def test_nodes_on_every_circle(graph: Graph) -> None:
    nodes = set(graph).union(*graph.values())
    if has_circle(graph, nodes):
        assert on_every_circle(graph, nodes) == {node for node in nodes if not has_circle(graph, nodes - {node})}


def test_a_long_way_is_no_recursion() -> None:
    length = 100_000
    assert dead_ends({node: {node + 1} for node in range(length)}, [0]) == [frozenset({length})]
    assert on_every_circle({node: {(node + 1) % length} for node in range(length)}, range(length)) == set(range(length))
