"""Two questions to a directed graph. Pure: nodes are anything hashable, a node without successors may be left out."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def dead_ends(graph: Mapping[Node, Collection[Node]], starts: Iterable[Node]) -> list[frozenset[Node]]:
    """Where every way from `starts` ends: the strongly connected components that nothing leads out of. One of a single
    node ends there; one of several is a circle. Tarjan's algorithm, without recursion."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    open_nodes: list[Node] = []
    component: dict[Node, int] = {}
    components: list[frozenset[Node]] = []

    def enter(node: Node) -> tuple[Node, Iterator[Node]]:
        order[node] = low[node] = len(order)
        open_nodes.append(node)
        return node, iter(graph.get(node, ()))

    def close(node: Node) -> None:
        at = len(open_nodes) - 1
        while open_nodes[at] != node:
            at -= 1
        members = frozenset(open_nodes[at:])
        del open_nodes[at:]
        component.update(dict.fromkeys(members, len(components)))
        components.append(members)

    for start in starts:
        way = [] if start in order else [enter(start)]
        while way:
            node, successors = way[-1]
            for successor in successors:
                if successor not in order:
                    way.append(enter(successor))
                    break
                if successor not in component:
                    low[node] = min(low[node], order[successor])
            else:
                way.pop()
                if way:
                    low[way[-1][0]] = min(low[way[-1][0]], low[node])
                if low[node] == order[node]:
                    close(node)
    return [
        members
        for number, members in enumerate(components)
        if all(component[successor] == number for node in members for successor in graph.get(node, ()))
    ]


def on_every_circle(graph: Mapping[Node, Collection[Node]], members: Collection[Node]) -> set[Node]:
    """Those of `members` without which there is no circle among them: each alone would explain all.

    Any circle runs along a first one, but for detours around some of its nodes. What no detour avoids is on all.
    """
    first = _circle(graph, set(members))
    rest = set(members).difference(first)
    if _circle(graph, set(rest)):
        return set()
    at = {node: number for number, node in enumerate(first)}
    avoided: set[Node] = set()
    for start, node in enumerate(first):
        longest = max(
            ((at[end] - start - 1) % len(first) for end in _detours(graph, node, at.keys(), rest)),
            default=0,
        )
        avoided.update(first[(start + step) % len(first)] for step in range(1, longest + 1))
    return set(first) - avoided


def _detours(
    graph: Mapping[Node, Collection[Node]], start: Node, ends: Collection[Node], over: Collection[Node]
) -> Iterator[Node]:
    """Which `ends` can be reached from `start`, directly or over other nodes."""
    ahead, seen = [*graph.get(start, ())], set()
    while ahead:
        node = ahead.pop()
        if node in ends:
            yield node
        elif node in over and node not in seen:
            seen.add(node)
            ahead.extend(graph.get(node, ()))


def _circle(graph: Mapping[Node, Collection[Node]], members: set[Node]) -> list[Node]:
    """The nodes of some circle among `members`, in order; empty if there is none. Changes `members`."""
    before: dict[Node, list[Node]] = {node: [] for node in members}
    left: dict[Node, int] = {}
    for node in members:
        inside = [successor for successor in graph.get(node, ()) if successor in members]
        left[node] = len(inside)
        for successor in inside:
            before[successor].append(node)
    ends = [node for node in members if not left[node]]
    while ends:
        node = ends.pop()
        members.discard(node)
        for one in before[node]:
            left[one] -= 1
            if not left[one]:
                ends.append(one)
    # Whoever is left leads to one that is left.
    way: dict[Node, int] = {}
    at = next(iter(members), None)
    while at is not None and at not in way:
        way[at] = len(way)
        at = next(one for one in graph[at] if one in members)
    return [] if at is None else list(way)[way[at] :]
