"""Two hosts on one machine, for what passes as a toy on one.

Each host has a hostname, processes (so the same pids) and an empty ``/tmp`` of its own, through Linux namespaces; they
share the loopback network and the test's directory, as real hosts share a network and a file system. Hosts that are
`apart` have a loopback network each, and between them only the cables that are laid.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.job import BIN, Job, Jobs
from harness.waiting import until

NAMES = ("host-a", "host-b")
ROOT = Path(__file__).parents[2]

_AS_ROOT = ()
_AS_ANYBODY = ("--user", "--map-root-user")

# PID 1 of a host: $1 is the interpreter, $2 the name, $3 a directory to build /tmp in, the rest what /tmp keeps
# showing. It lives until its standard input closes, which also happens when the test run is killed; the kernel then
# kills everything on the host.
_INIT = """
set -e
"$1" -IS -c 'import socket, sys; socket.sethostname(sys.argv[1])' "$2"
stage=$3
shift 3
mount -t tmpfs -o mode=1777 tmpfs "$stage"
for path; do
    mkdir -p "$stage/${path#/tmp/}"
    mount --bind "$path" "$stage/${path#/tmp/}"
done
echo '127.0.0.1 localhost host-a host-b' > "$stage/hosts"
mount --bind "$stage/hosts" /etc/hosts
mount --rbind "$stage" /tmp
echo ready
cat > /dev/null
"""


class Host(Jobs):
    """Starts jobs on one host; its ``/tmp`` can be looked into through :attr:`tmp`."""

    def __init__(self, name: str, directory: Path, apart: bool = False) -> None:
        super().__init__(directory / name)
        self.name = name
        self._namespaces = ("--uts", "--pid", "--mount", *(("--net",) if apart else ()))
        self._stage = self.directory / "tmp"
        self._stage.mkdir(parents=True)
        complaints = []
        for self._user in (_AS_ROOT, _AS_ANYBODY):
            self._process = self._boot(directory)
            assert self._process.stdout is not None
            if self._process.stdout.readline() == "ready\n":
                break
            complaints.append(self._process.communicate()[1].strip())
        else:
            raise AssertionError(
                "the two-host tests need Linux namespaces, and this machine gives none: run them as root, or allow "
                f"unprivileged user namespaces (unshare said: {'; and with --user: '.join(complaints)})"
            )
        self._init = _namespace_init(self._process.pid)
        self.tmp = Path(f"/proc/{self._init}/root/tmp")

    def _boot(self, directory: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["unshare", *self._user, *self._namespaces, "--mount-proc", "--fork", "--kill-child",
             "sh", "-c", _INIT, "sh", sys.executable, self.name, str(self._stage), *_kept_in_tmp(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, command: Sequence[str], env: dict[str, str]) -> Job:
        """Start `command` on this host, in the job's directory."""
        there = self.directory / f"job-{len(self._jobs)}"
        in_directory = ("sh", "-c", 'cd "$0" && exec "$@"', str(there))
        return super().start([*self._enter(*self._namespaces), *in_directory, *command], env | {"TMPDIR": "/tmp"})

    def ip(self, *arguments: str) -> str:
        """Run ip(8) on this host's network, and with the tests' pids."""
        command = [*self._enter("--net"), "ip", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def lay_cable(self, other: Host, name: str, network: str) -> None:
        """Connect two hosts that are apart, by interfaces of that name; this one becomes `network`.1, the other .2."""
        self.ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", str(other._init))
        for number, host in ((1, self), (2, other)):
            host.ip("link", "set", name, "addrgenmode", "none")  # no IPv6 address, which gloo would rather take
            host.ip("addr", "add", f"{network}.{number}/24", "dev", name)
            host.ip("link", "set", name, "up")
            host.ip("link", "set", "lo", "up")

    def cut_cable(self, other: Host, name: str, network: str) -> None:
        """What the two send each other is lost from now on, and neither is told. With the link down they would be."""
        nobody = ("lladdr", "02:00:00:00:00:99", "dev", name, "nud", "permanent")
        self.ip("neigh", "replace", f"{network}.2", *nobody)
        other.ip("neigh", "replace", f"{network}.1", *nobody)

    def _enter(self, *namespaces: str) -> tuple[str, ...]:
        user = ("--user", "--preserve-credentials") if self._user else ()
        return ("nsenter", f"--target={self._init}", *user, *namespaces)

    def start_as_init(self, command: Sequence[str], env: dict[str, str]) -> Job:
        """Start `command` as PID 1 of its own PID namespace, as the only process of a container is."""
        return self.start(["unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", *command], env)

    def init_pid(self, job: Job) -> int:
        """The pid, as the tests see it, of a job that was started as PID 1."""
        return _namespace_init(job.process.pid)

    def end(self) -> None:
        """Kill everything on this host."""
        super().end()
        self._process.communicate()


@contextlib.contextmanager
def two_hosts(directory: Path, apart: bool = False) -> Iterator[tuple[Host, Host]]:
    """``host-a`` and ``host-b``, until the end of the block; both see `directory`."""
    with contextlib.ExitStack() as running:
        hosts = []
        for name in NAMES:
            host = Host(name, directory, apart)
            running.callback(host.end)
            hosts.append(host)
        yield hosts[0], hosts[1]


def torchrun_node(number: int, port: int, *options: str) -> tuple[str, ...]:
    """torchrun with one worker, as node `number` of two that meet at `port`."""
    return (
        str(BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}",
        "--master-addr=127.0.0.1", f"--master-port={port}", *options,
    )  # fmt: skip


def _kept_in_tmp(directory: Path) -> list[str]:
    """What lies in the real /tmp and is needed on the hosts: the test's directory, this checkout, the interpreter."""
    needed = {str(Path(path).resolve()) for path in (directory, ROOT, sys.prefix, sys.base_prefix, *sys.path) if path}
    return sorted(path for path in needed if path.startswith("/tmp/") and os.path.isdir(path))


def _namespace_init(pid: int) -> int:
    """The nearest descendant of `pid` that is PID 1 of a PID namespace."""

    def found() -> int | None:
        generation = [pid]
        while generation:
            generation = [child for parent in generation for child in _children(parent)]
            for child in generation:
                if _own_pid(child) == 1:
                    return child
        return None

    return until(found, 10, f"a PID 1 below process {pid}") or 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _own_pid(pid: int) -> int | None:
    """What process `pid` takes its own pid to be."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None
