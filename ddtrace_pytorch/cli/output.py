"""What commands write: files that are complete, or not there, and standard output."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO, Any, cast

from ddtrace_pytorch.cli.choice import Refused

# Of gzip's 1 to 9: what is above is hardly smaller, and takes much longer.
COMPRESSION = 4

STDOUT = "-"


def in_json(found: Any) -> str:
    """`found` for programs. A number that is not finite, which JSON has not, is in words, as in the run log."""
    try:
        return json.dumps(found, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(found), parse_constant=str), indent=2)


# What to do about it, by what is wrong.
_FULL, _NO_FOLDER = "make room there", "make the directory it is to be in, or name another"
_ADVICE = {
    errno.ENOSPC: f"{_FULL}, or name a file on another disk",
    errno.EDQUOT: f"{_FULL}, or name a file on another disk",
    errno.ENOENT: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EISDIR: "name a file in it",
}


class NotWritable(Refused):
    exit_code = 1

    def __init__(self, path: str, error: OSError) -> None:
        why, advice = error.strerror or error, _ADVICE.get(error.errno or 0, "name another file")
        if path == STDOUT:
            advice = f"; {_FULL}" if advice.startswith(_FULL) else ""
            super().__init__(f"can't write to standard output: {why}{advice}")
        else:
            super().__init__(f"can't write {path or repr(path)}: {why}; {advice}")


class StandardOutput(io.TextIOWrapper):
    """Says it in a sentence where it can't be written to. Who reads it may have had enough, as `head` has: click and
    rich end the command then without a word."""

    @classmethod
    def instead_of(cls, stream: io.TextIOWrapper) -> StandardOutput:
        # A job id must not break an ASCII terminal.
        return cls(stream.buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)

    def write(self, text: str, /) -> int:
        with self._told():
            return super().write(text)

    def flush(self) -> None:
        with self._told():
            super().flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            _let_go(self)
            raise NotWritable(STDOUT, error) from None


def _let_go(stream: IO[Any]) -> None:
    """What it still holds goes nowhere, instead of being tried again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def written(path: str) -> Iterator[IO[bytes]]:
    """What `path` will be once all is written; until then, and if that fails, there is what was there before. A device
    or a pipe gets it as it comes."""
    # In the place of a device or a pipe nobody wants a file, least of all in that of /dev/null.
    if path == STDOUT or (os.path.exists(path) and not os.path.isfile(path)):
        try:
            with nullcontext(sys.stdout.buffer) if path == STDOUT else open(path, "wb") as there:
                yield there
                there.flush()
        except BrokenPipeError:
            # Who reads it has had enough, as `head` does: click ends the command without a word.
            raise
        except OSError as error:
            if path == STDOUT:
                _let_go(sys.stdout)
            raise NotWritable(path, error) from None
        return
    folder, name = os.path.split(path)
    try:
        fd, unfinished = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder or ".")
    except OSError as error:
        raise NotWritable(path, error) from None
    try:
        with open(fd, "wb") as file:
            if name.endswith(".gz"):
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=COMPRESSION) as packed:
                    yield cast("IO[bytes]", packed)
            else:
                yield file
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, path)
    except BaseException as error:
        os.unlink(unfinished)
        if isinstance(error, OSError):
            raise NotWritable(path, error) from None
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
