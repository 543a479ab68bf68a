"""Commands that are hard to end. Run by path: ``python -I -S nasty.py MODE MARKER [N]``; prints ``ready``.

The marker is only there to be seen in ``/proc``. Every mode works without the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def ready() -> None:
    os.write(1, b"ready\n")


def sleep() -> None:
    while True:
        time.sleep(1000)


def ignore() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def daemon() -> int:
    """Fork twice, lose session, descriptors and environment; returns the middle child's pid to the caller."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return pid
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, "sleeper", sys.argv[2]], {})


def sleeper(_: int) -> None:
    ready()
    sleep()


def plain(_: int) -> None:
    if os.fork():
        ready()
        os.wait()
    sleep()


def stubborn(_: int) -> None:
    ignore()
    if os.fork():
        ready()
    sleep()


def stopped(_: int) -> None:
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        sleep()
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep()


def new_session(_: int) -> None:
    if os.fork() == 0:
        os.setsid()
        sleep()
    time.sleep(0.05)
    ready()
    sleep()


def threaded(_: int) -> None:
    # Children belong to the thread that made them: each thread has a list of its own.
    import threading

    def make() -> None:
        if os.fork() == 0:
            os.setsid()
            ready()
            sleep()
        sleep()

    threading.Thread(target=make).start()
    sleep()


def other_user(_: int) -> None:
    if os.fork() == 0:
        os.setsid()
        os.setuid(65534)
        ready()
    sleep()


def hog(megabytes: int) -> None:
    ready()
    kept = [b"x" * (4 << 20) for _ in range(megabytes // 4)]
    os.write(1, b"full %d\n" % len(kept))
    sleep()


def breeds(count: int) -> None:
    """Fork one child after the other, not too fast for somebody who watches."""
    ready()
    for _ in range(count):
        if os.fork() == 0:
            sleep()
        time.sleep(0.01)
    sleep()


def own_group(_: int) -> None:
    if os.fork() == 0:
        os.setpgid(0, 0)
        sleep()
    time.sleep(0.05)
    ready()
    sleep()


def lost_daemon(_: int) -> None:
    daemon()
    ready()
    sleep()


def exited_daemon(_: int) -> None:
    daemon()
    ready()


def respawner(_: int) -> None:
    ignore()
    ready()
    while True:
        if os.fork() == 0:
            os.setsid()
            sleep()
        os.wait()


def wide(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            sleep()
    ready()
    sleep()


def chain(count: int) -> None:
    for _ in range(count):
        if os.fork():
            sleep()
    ready()
    sleep()


def hops(count: int) -> None:
    ready()
    for _ in range(count):
        if os.fork():
            os._exit(0)
        os.setsid()
    sleep()


def burst(count: int) -> None:
    ready()
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            sleep()
    sleep()


def zombies(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            os._exit(0)
    ready()
    sleep()


def flood(_: int) -> None:
    block = b"x" * 65535 + b"\n"
    while True:
        os.write(1, block)


def paced(megabytes: int) -> None:
    """Print so many MB a second, as evenly as can be."""
    ready()
    block = (b"x" * 99 + b"\n") * 10_000
    due = time.monotonic()
    while True:
        os.write(1, block)
        due += 1 / megabytes
        if (left := due - time.monotonic()) > 0:
            time.sleep(left)
        elif left < -1:
            due = time.monotonic()  # It was stopped meanwhile: nothing is made up for.


def holds_stdout(_: int) -> None:
    if os.fork() == 0:
        sleep()
    ready()


def kills_supervisor(_: int) -> None:
    if os.fork() == 0:
        os.setsid()
        sleep()
    ready()
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGKILL)
    sleep()


def stops_supervisor(_: int) -> None:
    ignore()
    ready()
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGSTOP)
    if os.fork() == 0:
        os.setsid()
    sleep()


def cleans_up(_: int) -> None:
    try:
        ready()
        sleep()
    except KeyboardInterrupt:
        os.write(1, b"cleaned up\n")


if __name__ == "__main__":
    {name: value for name, value in globals().items() if callable(value)}[sys.argv[1]](
        int(sys.argv[3]) if len(sys.argv) > 3 else 0
    )
