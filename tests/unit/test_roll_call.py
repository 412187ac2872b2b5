"""The roll call over real stores: who hears, who answers, what is left behind, and what a frozen store host costs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.many_ranks import many_ranks, state
from harness.waiting import until
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from ddtrace_pytorch.stalls import sockets
from ddtrace_pytorch.stalls.answer import LIMIT_BYTES, pack, unpack
from ddtrace_pytorch.stalls.connection import Board, Connection
from ddtrace_pytorch.stalls.roll import RankState
from ddtrace_pytorch.stalls.roll_call import Roll, RollCall, affordable_ears

NODE_OF = (0, 0, 0, 1, 1, 2)
SERVER = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def client(port: int, store: type = TCPStore) -> Any:
    return store("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a TCPStore, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def states_of(node: int | None) -> Callable[[], dict[int, RankState]]:
    return lambda: {rank: RankState(rank, node=node) for rank, on in enumerate(NODE_OF) if on == node}


@contextlib.contextmanager
def ranks(stores: Callable[[], Any], node_of: Sequence[int | None] = NODE_OF) -> Iterator[list[RollCall]]:
    calls = [
        RollCall(PrefixStore("default_pg", stores()), "0/0", rank, node_of, states_of(node))
        for rank, node in enumerate(node_of)
    ]
    for call in calls:
        call.open()
    try:
        yield calls
    finally:
        for call in calls:
            call.leave()


def listening(store: Any, ears: int) -> bool:
    return bool(Board(store, "0/0").add("ears", 0) == ears)


def our_keys(store: Any) -> set[str]:
    names = {key.rpartition("ddtrace_pytorch/roll/0/0/") for key in store.list_keys()}
    return {name for _, ours, name in names if ours}


def our_threads() -> list[str]:
    names = ("ddtrace_pytorch.ear", "ddtrace_pytorch.roll_call", "ddtrace_pytorch.goodbye")
    return [one.name for one in threading.enumerate() if one.name in names]


@pytest.fixture(params=["tcp", "file", "hash"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Gives every rank its own object of the same store, where the store has that."""
    if request.param == "tcp":
        _, port = request.getfixturevalue("server")
        yield lambda: client(port)
    elif request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), len(NODE_OF))
    else:
        store = HashStore()
        yield lambda: store


def test_every_rank_is_heard_and_no_key_is_left(stores: Callable[[], Any]) -> None:
    user = stores()
    with ranks(stores) as calls:
        until(lambda: listening(user, 5), 20, "two ranks of each node listen, where there are two")
        roll = calls[3].call()
        assert roll == Roll({rank: RankState(rank, node=node) for rank, node in enumerate(NODE_OF)})
        # Second listeners may still be on their way to ring and answer.
        until(lambda: not any(key.startswith("ear/") for key in our_keys(user)), 10, "all rings are taken")
    assert {key for key in our_keys(user) if not key.startswith("answer/")} == set()
    assert our_threads() == []


def test_of_all_ranks_that_stall_at_once_one_calls(stores: Callable[[], Any]) -> None:
    user = stores()
    with ranks(stores) as calls, ThreadPoolExecutor(3) as pool:
        until(lambda: listening(user, 5), 20, "all listen")
        rolls = list(pool.map(RollCall.call, [calls[0], calls[3], calls[5]]))
        assert [len(roll.states) for roll in rolls if roll is not None] == [6]
        # Who stalls a bit later than the others, too.
        assert calls[4].call() is None


def test_later_rolls_leave_no_more_keys_than_the_first(
    server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtrace_pytorch.stalls.asking.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("ddtrace_pytorch.stalls.roll_call.AGAIN_SECONDS", 0.0)
    user = client(server[1])
    with ranks(lambda: client(server[1])) as calls:
        until(lambda: listening(user, 5), 20, "all listen")
        for _ in range(5):
            roll = calls[0].call()
            assert roll is not None
            assert len(roll.states) == 6
        late = {"answer/5/1", "answer/5/2"}  # by the second listener of a node, of the last roll alone
        until(lambda: our_keys(user) - late == {"ears", "called"}, 10, f"only those, not {our_keys(user)}")


def test_a_node_that_does_not_answer_is_silent_and_one_listener_of_two_is_enough(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    with ranks(lambda: client(server[1])) as calls:
        user = client(server[1])
        until(lambda: listening(user, 5), 20, "all listen")
        calls[3].leave()  # the first of node 1
        calls[5].leave()  # the only one of node 2
        began = time.monotonic()
        roll = calls[0].call()
        assert roll is not None
        assert (sorted(roll.states), roll.silent_nodes, roll.store_answers) == ([0, 1, 2, 3, 4], {2}, True)
        assert time.monotonic() - began < 5


def test_a_job_on_one_node_asks_no_store() -> None:
    call = RollCall(None, "0/0", 1, (0, 0, 0), states_of(0))
    call.open()
    assert call.call() == Roll(states_of(0)())
    call.leave()


def test_ranks_whose_node_is_not_known_are_left_out(server: tuple[subprocess.Popen[str], int]) -> None:
    user = client(server[1])
    with ranks(lambda: client(server[1]), (0, None, 1)) as calls:
        until(lambda: listening(user, 2), 20, "both listen")
        roll = calls[2].call()
        assert roll is not None
        assert roll.silent_nodes == frozenset()
        assert calls[1].call() is None  # just called, and it hears of it from the store


def test_a_frozen_store_host_is_told_within_its_time_and_leaves_no_thread(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    user = client(port)
    with ranks(lambda: client(port)) as calls:
        until(lambda: listening(user, 5), 20, "all listen")
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert calls[3].call() == Roll(states_of(1)(), store_answers=False)
        assert time.monotonic() - began < 4
        for call in calls:
            began = time.monotonic()
            call.leave()
            assert time.monotonic() - began < 1.5
        until(lambda: not our_threads(), 5, "all threads are gone")


def test_a_store_that_is_gone_is_told_and_leaves_no_thread(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    user = client(port)
    with ranks(lambda: client(port)) as calls:
        until(lambda: listening(user, 5), 20, "all listen")
        process.kill()
        process.wait()
        assert calls[3].call() == Roll(states_of(1)(), store_answers=False)
    assert our_threads() == []


def test_the_users_own_connection_is_free_while_we_wait(server: tuple[subprocess.Popen[str], int]) -> None:
    users = [client(server[1]) for _ in NODE_OF]
    pool = iter(users)
    with ranks(lambda: next(pool)):
        until(lambda: listening(users[0], 5), 20, "all listen")
        before = threading.active_count()
        for user in users:
            user.set("mine", "1")
            assert user.get("mine") == b"1"
        assert threading.active_count() == before


def test_what_waits_can_be_severed_and_other_connections_live(server: tuple[subprocess.Popen[str], int]) -> None:
    user = client(server[1])
    connection = Connection(user, "0/0")
    connection.open()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            connection.board.wait("never")
        except RuntimeError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    connection.sever()
    waiter.join(5)
    assert len(raised) == 1
    user.set("still", "there")
    assert user.get("still") == b"there"


def test_a_forked_child_forgets_and_the_parent_still_hears(server: tuple[subprocess.Popen[str], int]) -> None:
    user = client(server[1])
    with ranks(lambda: client(server[1])) as calls:
        until(lambda: listening(user, 5), 20, "all listen")
        child = os.fork()
        if child == 0:
            for call in calls:
                call.abandon()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        roll = calls[0].call()
        assert roll is not None
        assert len(roll.states) == 6


def test_looking_at_sockets_finds_the_server() -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    assert sockets.listens_on(store.port)
    assert len(sockets.connected_to(store.port, set())) == 1
    assert not sockets.listens_on(1)


class Old:
    """A store as torch 2.0 has it: no `check`, nothing for several keys, no clone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name not in ("set", "get", "add", "wait", "delete_key", "compare_set"):
            raise AttributeError(name)
        return getattr(self._store, name)


def test_stores_of_old_releases_say_what_is_there() -> None:
    store = HashStore()
    board = Board(Old(store), "0/0")
    assert not board.there(["a", "b"])
    board.put({"a": b"1", "b": "2"})
    assert board.there(["a", "b"])
    assert board.get(["a", "b"]) == [b"1", b"2"]
    assert board.take("a") == "1"
    board.remove(["b"])
    assert not board.there(["a"])


@pytest.mark.parametrize(
    ("nodes", "world_size", "limit", "ears"),
    [(128, 1024, 65536, 2), (128, 1024, 1024, 0), (64, 512, 1024, 2), (128, 512, 1024, 1), (9, 9, float("inf"), 2)],
)
def test_listeners_leave_the_stores_host_descriptors(nodes: int, world_size: int, limit: float, ears: int) -> None:
    assert affordable_ears(nodes, world_size, limit) == ears


def test_an_answer_says_all_where_it_can_and_less_where_it_must() -> None:
    states = {rank: state(rank, 1024) for rank in range(8)}
    assert unpack(pack(states)) == states
    assert len(pack(states)) <= LIMIT_BYTES
    sizes = []
    for limit in (2000, 1500, 1000, 300):
        sizes.append(len(pack(states, limit)))
        assert set(unpack(pack(states, limit))) == set(states)
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ValueError, match="no answer"):
        unpack(b"something else")


def test_a_job_of_128_ranks_is_quiet_and_answers_in_time() -> None:
    with many_ranks(128) as job:
        assert sum(job.operations_in(2).values()) == 0
        rolls, seconds = job.all_stall()
        (roll,) = rolls
        assert (len(roll.states), roll.silent_nodes) == (128, frozenset())
        assert seconds < 5
