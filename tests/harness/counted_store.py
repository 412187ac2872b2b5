"""A TCPStore server in a process of its own, behind a relay that counts the operations that reach it.

What the relay reads is the store's wire format (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): one byte that says
which operation, then numbers of fixed size, and texts and byte strings with their length before them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

# The arguments of each operation: a number of so many bytes, a "s"tring, or "*" before what comes as often as a count
# says. In the order of the wire's numbers.
OPERATIONS = {
    "validate": "4", "set": "ss", "compare_set": "sss", "get": "s", "add": "s8", "check": "*s", "wait": "*s",
    "num_keys": "", "delete_key": "s", "append": "ss", "multi_get": "*s", "multi_set": "*ss", "cancel_wait": "",
    "ping": "4",
}  # fmt: skip
# torch asks the resolver for the name of both ends of every connection, and a name server that loses some of the
# questions keeps it for five seconds and more each time.
IMPATIENT_RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
Read = Callable[[int], Awaitable[bytes]]


async def _operation(read: Read) -> str:
    """Read one operation, whole; its name."""

    async def number() -> int:
        return int.from_bytes(await read(8), "little")

    async def arguments(kinds: str) -> None:
        for kind in kinds:
            await read(await number() if kind == "s" else int(kind))

    name = list(OPERATIONS)[(await read(1))[0]]
    kinds = OPERATIONS[name]
    for _ in range(await number() if kinds.startswith("*") else 1):
        await arguments(kinds.lstrip("*"))
    return name


class Relay:
    def __init__(self, port: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._port = port
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store, to_store = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.create_task(self._copy(from_store, writer))
        self._tasks |= {back, asyncio.current_task()}

        whole = bytearray()

        async def read(size: int) -> bytes:
            some = await reader.readexactly(size)
            whole.extend(some)
            return some

        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.counts[await _operation(read)] += 1
                # In one piece: the store hangs up on who validates in two.
                to_store.write(bytes(whole))
                whole.clear()
        to_store.close()
        with contextlib.suppress(ConnectionError):
            await back

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                writer.write(some)
                await writer.drain()
        writer.close()


async def _serve(store_port: int) -> None:
    relay = Relay(store_port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0, backlog=4096, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(relay.counts), flush=True)


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class CountedStore:
    """`port` is the relay's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.port = int(process.stdout.readline())

    def counts(self) -> collections.Counter[str]:
        """How many operations of each kind have arrived so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return collections.Counter(json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def counted_store() -> Iterator[CountedStore]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | IMPATIENT_RESOLVER,
    )
    try:
        yield CountedStore(process)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    from torch.distributed import TCPStore

    raise_descriptor_limit()
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    asyncio.run(_serve(store.port))
