"""Looking from outside: what the kernel and the disk say, never what Peri says of itself."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def manifest(root: Path) -> dict[str, tuple[Any, ...]]:
    """Return type, mode, size, hash or target, mtime and links of everything below a folder."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            content: str = ""
            try:
                info = path.lstat()
                kind = stat.S_IFMT(info.st_mode)
                if stat.S_ISREG(info.st_mode):
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                elif stat.S_ISLNK(info.st_mode):
                    content = os.readlink(path)
            except FileNotFoundError:
                # Gone while we looked: a restore is under way, so this is not yet as it was.
                found[str(path.relative_to(root))] = ("gone",)
                continue
            mtime = info.st_mtime_ns if stat.S_ISREG(info.st_mode) else 0
            found[str(path.relative_to(root))] = (kind, stat.S_IMODE(info.st_mode), content, mtime, info.st_nlink
                                                  if stat.S_ISREG(info.st_mode) else 0)  # fmt: skip
    return found


def agents(runtime: Path) -> list[dict[str, Any]]:
    """Return the agents that announced themselves and live."""
    found = []
    for file in runtime.glob("*.json"):
        try:
            facts = json.loads(file.read_text())
            os.kill(facts["pid"], 0)
        except (OSError, ValueError):
            continue
        if state_of(facts["pid"]) not in ("Z", ""):
            found.append(facts)
    return found


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process, or an empty text when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def tagged(task: str = "") -> list[tuple[int, str]]:
    """Return living processes that carry a task's tag (any task's, without one)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
            tags = [item.partition(b"=")[2].decode() for item in environ if item.startswith(b"PERI_TASK=")]
            if tags and (not task or task in tags) and state_of(int(entry.name)) not in ("Z", ""):
                found.append((int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace")))
        except OSError:
            continue
    return found


def marked(marker: str) -> list[int]:
    """Return living processes with a marker among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in words and state_of(int(entry.name)) not in ("Z", ""):
            found.append(int(entry.name))
    return found


def sockets_to(pid: int, port: int) -> list[str]:
    """Return the TCP connections of a process to a local port, whatever their state, by the kernel's tables."""
    inodes = set()
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    except OSError:
        return []
    wanted = f":{port:04X}"
    return [line for line in lines if line.split()[2].endswith(wanted) and line.split()[9] in inodes]


def wait_until(holds: Callable[[], Any], timeout: float = 15, what: str = "") -> Any:
    """Wait for a condition; returns its value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"never happened: {what or holds}")
