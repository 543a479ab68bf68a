"""A command that outlives everything above it. Run by path: ``python -I -S deserter.py FOLDER [clean]``.

It leaves a daemon (own session, own parent; with ``clean`` also without environment), which writes its pid to
``FOLDER/pid``, waits for ``FOLDER/go`` and then kills agent, warden and supervisor at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def desert(folder: Path, clean: bool) -> None:
    supervisor = os.getppid()
    warden = parent_of(supervisor)
    above = [str(parent_of(warden)), str(warden), str(supervisor)]
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        argv = [sys.executable, "-I", "-S", __file__, str(folder), "daemon", *above]
        os.execve(sys.executable, argv, {} if clean else dict(os.environ))
    time.sleep(1000)


def daemon(folder: Path, above: list[int]) -> None:
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    while not (folder / "go").exists():
        time.sleep(0.01)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in above:
            os.kill(pid, number)
    while True:
        time.sleep(1000)


if __name__ == "__main__":
    words = sys.argv[2:]
    if words[:1] == ["daemon"]:
        daemon(Path(sys.argv[1]), [int(word) for word in words[1:]])
    else:
        desert(Path(sys.argv[1]), "clean" in words)
