"""Directories of this user's alone, in places that others can write to, such as the temporary directory."""

from __future__ import annotations

import os
import stat


class NotPrivate(OSError):
    """The directory can't be trusted; the message says why, without its name."""


def make_directories(path: str) -> None:
    """Like os.makedirs, which gives its mode to the last directory only: all that are made here are 0700."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_directories(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def make_private(path: str) -> None:
    """Make the directory `path` in a place others can write to, or check that it is ours alone.

    Whoever can plant it could otherwise choose which files we write, or read them.

    Raises:
        NotPrivate: it is a symbolic link, another user's, or writable by others.
        OSError: it can't be made.
    """
    make_directories(path)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate("it is not a directory, or a symbolic link to one")
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate("other users can write to it")
