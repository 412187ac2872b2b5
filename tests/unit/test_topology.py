"""Which rank is on which node, with stores of every make."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddtrace_pytorch.identity import topology
from ddtrace_pytorch.identity.meeting import Meeting
from ddtrace_pytorch.identity.topology import Nodes, find_nodes, from_one_agent, this_node


class Counted:
    """A store that keeps count of the questions it is asked, and has no more methods than `names`."""

    def __init__(self, store: Any, *names: str) -> None:
        self.asked: Counter[str] = Counter()
        for name in names:
            setattr(self, name, self._counting(name, getattr(store, name)))

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            self.asked[name] += 1
            return method(*arguments)

        return counting


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


NEW = ("set", "get", "check", "has_extended_api", "multi_get")
OLD = ("set", "get", "check")
OLDER = ("set", "get", "add")


def ask_all(stores: list[Any], hosts: list[str]) -> list[Nodes | None]:
    found: list[Nodes | None] = [None] * len(hosts)

    def ask(rank: int) -> None:
        found[rank] = find_nodes(Meeting(stores[rank], 0, "0"), rank, len(hosts), hosts[rank], {})

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("methods", [NEW, OLD, OLDER], ids=["new", "old", "older"])
def test_every_rank_hears_where_every_rank_is(server: dist.TCPStore, methods: tuple[str, ...]) -> None:
    prefixed = dist.PrefixStore("-".join(methods), server)
    stores = [Counted(prefixed, *methods) for _ in range(5)]
    hosts = ["a", "a", "b", "b", "a"]
    for nodes in ask_all(stores, hosts):
        assert nodes is not None
        assert nodes.names == tuple(hosts)
    for store in stores[1:]:
        assert (store.asked["set"], store.asked["get"]) == (1, 1)
    if methods is NEW:
        assert (stores[0].asked["multi_get"], stores[0].asked["get"], stores[0].asked["set"]) == (1, 0, 1)


def test_one_who_says_nothing_leaves_unknown_only_what_depends_on_it(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "PATIENCE_SECONDS", 0.3)
    store = dist.PrefixStore("silent", server)
    heard: list[Nodes | None] = []

    def ask(rank: int, host: str) -> None:
        heard.append(find_nodes(Meeting(store, 0, "0"), rank, 4, host, {}))

    ranks = [threading.Thread(target=ask, args=asks) for asks in ((0, "a"), (1, "a"), (3, "b"))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(10)
    assert len(heard) == 3
    for nodes in heard:
        assert nodes is not None
        assert nodes.names[2] is None


def test_a_hurry_ends_it_for_those_who_listen_and_for_rank_0(server: dist.TCPStore) -> None:
    for rank in (0, 1):
        meeting = Meeting(dist.PrefixStore(f"hurry-{rank}", server), 0, "0")
        found: list[Nodes | None] = []
        thread = threading.Thread(target=lambda: found.append(find_nodes(meeting, rank, 2, "a", {})))  # noqa: B023
        thread.start()
        meeting.hurry()
        thread.join(0.5)
        assert not thread.is_alive()
        (nodes,) = found
        assert nodes is None or nodes.names == ("a", None)


def test_a_store_that_raises_leaves_it_unknown() -> None:
    assert find_nodes(Meeting(object(), 0, "0"), 1, 2, "a", {}) is None
    assert find_nodes(Meeting(None, 0, "0"), 0, 2, "a", {}) is None


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("changed", "one"),
    [
        ({}, True),
        ({"LOCAL_WORLD_SIZE": "1"}, False),  # the other rank is on another node
        ({"TORCHELASTIC_RUN_ID": None}, False),  # nobody whose words are known to mean that
        ({"RANK": "0"}, False),  # the process group's ranks are not torchrun's
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": None}, False),
    ],
)
def test_one_torchrun_says_that_all_ranks_are_here(changed: dict[str, str | None], one: bool) -> None:
    environ = {name: value for name, value in (TORCHRUN | changed).items() if value is not None}
    assert from_one_agent(environ, 1, 2) is one
    if one:  # and nothing is asked of the store
        nodes = find_nodes(Meeting(object(), 0, "0"), 1, 2, "a", environ)
        assert nodes is not None
        assert nodes.crosses([0, 1]) is False


def test_a_rank_by_itself_crosses_nothing() -> None:
    nodes = find_nodes(Meeting(None, 0, "0"), 0, 1, "a", {})
    assert nodes is not None
    assert nodes.crosses([0]) is False


@pytest.mark.parametrize(
    ("ranks", "crosses"),
    [([0], False), ([0, 1], False), ([0, 2], True), ([1, 3], None), ([0, 2, 3], True), ([0, 9], None), ([3], None)],
)
def test_what_a_group_crosses(ranks: list[int], crosses: bool | None) -> None:
    assert Nodes(["a", "a", "b", None]).crosses(ranks) is crosses


def test_the_word_that_rank_0_says_is_short() -> None:
    names = [f"node-{number // 8:04}" for number in range(8192)]
    word = Nodes(names).encode()
    assert Nodes.decode(word).names == tuple(names)
    assert len(word) < 24 * 1024
    assert Nodes.decode(Nodes([None, "a", None]).encode()).names == (None, "a", None)


def test_one_host_name_on_two_kernels_is_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = set()
    for boot in ("one", "other"):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(topology, "_BOOT_ID", tmp_path / boot)
        assert this_node("h") == this_node("h")
        nodes.add(this_node("h"))
    assert len(nodes) == 2
    monkeypatch.setattr(topology, "_BOOT_ID", tmp_path / "none")
    assert this_node("h") == "h"
