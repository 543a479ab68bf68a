"""A workspace with everything that tools lose, and a survey of it to compare byte by byte."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peri_tui.config import Paths

OLD = 1_577_836_800_123_456_789

Survey = dict[bytes, tuple[Any, ...]]

CONTENTS: dict[bytes, bytes] = {
    b"plain.txt": b"one\ntwo\nthree\n",
    b"crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    b"cr.txt": b"one\rtwo\r",
    b"mixed.txt": b"one\r\ntwo\nthree\r",
    b"no_newline.txt": b"one\ntwo",
    b"bom.txt": b"\xef\xbb\xbfone\n",
    b"utf16.txt": "one\ntwo\n".encode("utf-16"),
    b"latin1.txt": b"caf\xe9\n",
    b"nul.bin": b"a\0b\0",
    b"empty": b"",
    b"private": b"secret\n",
    b"script.sh": b"#!/bin/sh\n",
    b"readonly": b"look\n",
    b"attr.txt": b"with attribute\n",
    b"sub/deep/inner.txt": b"inner\n",
    b"n\xff\xfe": b"odd name\n",
    b" lead\nnewline": b"odder name\n",
}
MODES = {b"private": 0o640, b"script.sh": 0o755, b"readonly": 0o444}


def build_workspace(folder: Path) -> Path:
    """Make the workspace in ``folder`` (which must not exist) and return it."""
    folder.mkdir()
    base = os.fsencode(folder)
    for name, data in CONTENTS.items():
        path = base + b"/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, MODES.get(name, 0o644))
    os.setxattr(base + b"/attr.txt", "user.k", b"v\0\xff")
    os.link(base + b"/plain.txt", base + b"/sub/second name")
    os.symlink(b"plain.txt", base + b"/link")
    os.symlink(b"not there", base + b"/dangling")
    os.mkfifo(base + b"/pipe")
    os.mkdir(base + b"/hollow")
    os.chmod(base + b"/hollow", 0o2775)
    for path in sorted(_walk(base), reverse=True):
        os.utime(path, ns=(OLD, OLD), follow_symlinks=False)
    return folder


def survey(folder: Path, *, times: bool = True) -> Survey:
    """Return path → (type, mode, bytes' hash, link text, mtime, attributes, names of the same inode)."""
    base = os.fsencode(folder)
    groups: dict[tuple[int, int], list[bytes]] = {}
    found: Survey = {}
    for path in _walk(base):
        info = os.lstat(path)
        if stat.S_ISREG(info.st_mode):
            groups.setdefault((info.st_dev, info.st_ino), []).append(path)
    for path in _walk(base):
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        regular, link = kind == stat.S_IFREG, kind == stat.S_IFLNK
        found[path[len(base) :]] = (
            kind,
            stat.S_IMODE(info.st_mode),
            _hash(path) if regular else "",
            os.readlink(path) if link else b"",
            info.st_mtime_ns if times else 0,
            {key: os.getxattr(path, key) for key in os.listxattr(path)} if regular else {},
            tuple(sorted(groups[info.st_dev, info.st_ino])) if regular else (),
        )
    return found


def differences(before: Survey, after: Survey) -> list[str]:
    """Return one line a difference, empty when equal."""
    paths = sorted(before.keys() | after.keys())
    return [
        f"{path!r}: {before.get(path)} -> {after.get(path)}"
        for path in paths
        if before.get(path) != after.get(path)
    ]


def paths_in(folder: Path) -> Paths:
    """Return Peri's folders beneath ``folder``."""
    return Paths(folder / "config", folder / "data", folder / "state", folder / "run")


def _walk(base: bytes) -> Iterator[bytes]:
    yield base
    with os.scandir(base) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        else:
            yield entry.path


def _hash(path: bytes) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
