"""The warden: starts every command of an agent and ends whole process trees, with proof.

One self-contained file, standard library only, started by path (``python -I -S warden.py FD``). It has one thread,
so it may fork. ``FD`` is a ``SOCK_SEQPACKET`` socket to the agent. Each ``spawn`` message carries five descriptors:
the task socket, a memory file with the request, and the command's stdin, stdout and stderr. The warden forks a
*supervisor*; the supervisor forks the command. Both are child subreapers, so a descendant that loses its parent
becomes a child of the supervisor whatever session, group or environment it gave itself. That is what makes
``waitpid`` = ``ECHILD`` a proof: the kernel says that no descendant exists (``prctl(2)``,
``PR_SET_CHILD_SUBREAPER``; Bazel's process wrapper uses the same idea).

Agent to supervisor: ``signal {sig, scope, cont}``, ``kill {deadline_ms}``, ``stats``, ``limits {limits}``.
Supervisor to agent: ``started``, ``spawn_failed``, ``exit``, ``orphans``, ``stats``, ``limit {which, value, limit, level}``,
``signalled {sig, n, names}``, ``killing``, ``survivors``, ``empty``.
Warden to agent: ``ready``, ``swept``.

End of file, or any error, on a task socket means: kill everything. Processes on the wire are
``[pid, start time in clock ticks since boot, name]``, ended ones with the number of the last signal they were sent
while they lived (0: none); texts that may be any bytes travel as their Latin-1 image.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import select
import sys
import termios
import time
from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from typing import Any, NoReturn
else:
    # Every page that an import writes is copied or counted at each fork: the inner modules do without enum, re,
    # functools and the like, which is most of the memory of a warden and a third of the time of a start.
    import _signal as signal
    import _socket as socket
    from _collections import deque

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
LIST_MAX = 500  # A packet must fit into the socket buffer of 208 KiB.
SURVIVORS_MAX = 100
NAMES_MAX = 20
DEADLINE_S = 4.5
SLOW_PASS_S = 0.1
HURRY_S = 1.0
NICENESS = 5
OOM_SCORE = 800
FILE_BYTES = 10 << 30
GUARD_IDLE_S = 0.5
GUARD_MIN_S = 0.01
GUARD_SHARE = 5  # A look may take one part in five of the time.
WARN_SHARE = 0.8
HARD_SHARE = 1.25
# How fast a tree may grow between two looks, whatever it did before: bytes, processes, seconds a second.
GUARD_PACE = {
    "memory": float(2 << 30),
    "processes": 1000.0,
    "seconds": 1.0,
    "cpu": float(os.cpu_count() or 1),
}
GUARD_HARD = ("memory", "processes")
_IGNORED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGPIPE, signal.SIGALRM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip


def prctl(option: int, value: int | bytes) -> None:
    """Call ``prctl(2)`` with one argument. Raises OSError."""
    argument: Any = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)


class suppress:
    """Leave a block without a word at one of these errors (``contextlib`` would be a large import)."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


class _Plain:
    """How a scanner of JSON reads numbers and objects: as Python's own."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = float


def _refuse(value: object) -> object:
    raise TypeError(f"not for the wire: {value!r}")


_scan: Any = make_scanner(_Plain)  # type: ignore[arg-type]
_encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)


def dump_json(value: dict[str, Any]) -> bytes:
    """Return a message as it goes on the wire."""
    return "".join(_encode(value, 0)).encode()


def parse_json(data: bytes) -> Any:
    """Return what a message says. Raises ValueError: it is no JSON."""
    text = data.decode()
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("no JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON value")
    return value


def check(result: int, what: str) -> None:
    """Raise OSError when a call of the C library failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write_file(path: str, text: str) -> None:
    """Write a small file of the kernel. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# --- what /proc says ------------------------------------------------------------------------------------------------


class Seen:
    """One process as ``/proc/PID/stat`` shows it: times in clock ticks, memory in pages."""

    __slots__ = ("name", "pages", "pgrp", "pid", "ppid", "start", "state", "threads", "ticks")

    def __init__(
        self,
        pid: int,
        start: int,
        name: str,
        state: str,
        ppid: int,
        pgrp: int,
        threads: int,
        ticks: int,
        pages: int,
    ) -> None:
        self.pid = pid
        self.start = start
        self.name = name
        self.state = state
        self.ppid = ppid
        self.pgrp = pgrp
        self.threads = threads
        self.ticks = ticks
        self.pages = pages

    @property
    def dead(self) -> bool:
        """True for a zombie. A leader whose other threads still run also shows Z, but has more than one thread."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def wire(self) -> list[Any]:
        """The process as it goes on the wire."""
        return [self.pid, self.start, self.name]


def read_file(path: str) -> bytes:
    """Return the content of a small file; empty when it, or the process it belongs to, is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return read_all(fd)
    except OSError:
        return b""
    finally:
        os.close(fd)


def read_all(fd: int) -> bytes:
    """Return everything from here to the end of a file. Raises OSError."""
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def read_stat(pid: int) -> Seen | None:
    """Return what is known of a process, or None when it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        head, closing, rest = os.read(fd, 4096).rpartition(b")")  # One line, which comes whole.
    except OSError:
        return None
    finally:
        os.close(fd)
    if not closing:
        return None
    word = rest.split()
    return Seen(
        pid, int(word[19]), head.partition(b"(")[2].decode("latin-1"), word[0].decode(), int(word[1]),
        int(word[2]), int(word[17]), sum(map(int, word[11:15])), int(word[21]),
    )  # fmt: skip


def read_uid(pid: int) -> int:
    """Return the effective user of a process, -1 when it is gone. (The owner of its folder may be root instead.)"""
    for line in read_file(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return -1


def scan_parents() -> dict[int, list[int]]:
    """Return children by parent from one pass over ``/proc``: for kernels without the ``children`` files."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (one := read_stat(int(entry))) is not None:
            found.setdefault(one.ppid, []).append(one.pid)
    return found


class Tree:
    """All descendants of this process, except those below ``spare``."""

    def __init__(self, scan: bool) -> None:
        self.me = os.getpid()
        self.spare: set[int] = set()
        self.refused: set[tuple[int, int]] = set()
        self._scan = self.scans = scan or not os.path.exists(f"/proc/self/task/{self.me}/children")
        self._parents: dict[int, list[int]] = {}

    def visit(self, *signals: int, group: int = 0) -> list[Seen]:
        """Walk the tree, parents first, and send the signals to each process (of ``group``, if given).

        Parents first, so that one which restarts its child is gone before the child is. A direct child cannot be
        mistaken: only this process can reap it. A deeper one is held by a pidfd, opened before its parent is looked
        at again, so a number that was reused is never hit. A mere look (no signals)
        needs no handle. Returns what was seen, zombies included.
        """
        self.look_around()
        queue = deque((pid, self.me) for pid in self.children(self.me) if pid not in self.spare)
        met: dict[int, Seen] = {}
        while queue:
            pid, parent = queue.popleft()
            if pid in met:
                continue
            one = self._visit_one(pid, met.get(parent), signals, group)
            if one is not None:
                met[pid] = one[0]
                queue.extend((child, pid) for child in one[1])
        return list(met.values())

    def look_around(self) -> None:
        """Without lists of children: see who is whose child now."""
        self._parents = scan_parents() if self._scan else {}

    def children(self, pid: int, threads: int = 1) -> list[int]:
        """Return the children of a process; every thread of it has a list of its own."""
        if self._scan:
            return self._parents.get(pid, [])
        tids = [str(pid)]
        if threads != 1:
            with suppress(OSError):
                tids = os.listdir(f"/proc/{pid}/task")
        return [int(word) for tid in tids for word in read_file(f"/proc/{pid}/task/{tid}/children").split()]

    def _visit_one(
        self, pid: int, parent: Seen | None, signals: tuple[int, ...], group: int
    ) -> tuple[Seen, list[int]] | None:
        handle = -1
        if parent is not None and signals:
            try:
                handle = os.pidfd_open(pid)
            except OSError:
                return None  # Gone, or no pidfd here: it becomes a direct child when its parent is dead.
        try:
            one = read_stat(pid)
            if one is None or not self._ours(one, parent):
                return None
            if one.dead:
                return one, []  # It passed its children on, and no signal reaches it.
            children = self.children(pid, one.threads)
            if not group or one.pgrp == group:
                self._send(one, handle, signals)
            return one, children
        finally:
            if handle >= 0:
                os.close(handle)

    def _ours(self, one: Seen, parent: Seen | None) -> bool:
        if parent is None or one.ppid == self.me:
            return one.ppid == self.me
        if parent.ppid == self.me:
            return (
                one.ppid == parent.pid
            )  # Nobody reaps our own children meanwhile, so the number is still its.
        again = read_stat(parent.pid)
        return one.ppid == parent.pid and again is not None and again.start == parent.start

    def _send(self, one: Seen, handle: int, signals: tuple[int, ...]) -> None:
        try:
            for number in signals:
                if handle >= 0:
                    signal.pidfd_send_signal(handle, number)
                else:
                    os.kill(one.pid, number)
        except PermissionError:
            self.refused.add((one.pid, one.start))
        except OSError:
            pass

    def survivor(self, one: Seen) -> list[Any]:
        """Return a process that did not end: pid, start time, command, uid, why."""
        reason = "did not end"
        if (one.pid, one.start) in self.refused:
            reason = "not permitted"
        elif one.state == "D":
            reason = "blocked in kernel"
        words = b""
        if one.state != "D":  # Such a process may hold the lock that reading its command line waits for.
            words = read_file(f"/proc/{one.pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
        return [one.pid, one.start, words[:200].decode("latin-1") or one.name, read_uid(one.pid), reason]


# --- what warden and supervisor share -------------------------------------------------------------------------------


class Peer:
    """A packet socket that never blocks: what cannot be sent now is sent when it can."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.gone = False
        self._queue: deque[bytes] = deque()

    def tell(self, ev: str, **facts: Any) -> None:
        """Queue one message and send what can be sent."""
        self._queue.append(dump_json({"ev": ev} | facts))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._queue and not self.gone:
                self.sock.send(self._queue[0])
                self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    @property
    def waiting(self) -> bool:
        """True while something is queued for a peer that is there."""
        return bool(self._queue) and not self.gone

    def hear(self, descriptors: int = 0) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, or None; ``gone`` is set at the end."""
        try:
            room = socket.CMSG_LEN(descriptors * 4) if descriptors else 0
            data, rights, _, _ = self.sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
            if data:
                return parse_json(data), descriptors_in(rights)
            self.gone = True
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            self.gone = True
        return None


def descriptors_in(rights: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a packet (``cmsg(3)``: each is a C int)."""
    return [
        int.from_bytes(data[at : at + 4], sys.byteorder, signed=True)
        for level, kind, data in rights
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for at in range(0, len(data) - 3, 4)
    ]


def wake_on_child() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def ignore_signals() -> None:
    """Let no terminal or polite signal end this process, nor those it forks."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def settle_process(name: bytes) -> None:
    """Become a subreaper."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, name)


def wait_for(peer: Peer, fds: list[int], seconds: float | None) -> None:
    """Wait until the peer or a descriptor has something, or the time is over; empties wake-up pipes."""
    poll = select.poll()
    if not peer.gone:
        poll.register(peer.sock, select.POLLIN | (select.POLLOUT if peer.waiting else 0))
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll(None if seconds is None else max(1, int(seconds * 1000)))
    with suppress(OSError):
        os.read(fds[0], 4096)


class Hunt:
    """When to look again while a tree is being killed."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.passes = 0
        self.told = False
        self.pause = 0.001
        self.due = self.began

    def tire(self, found_new: bool) -> None:
        """Wait a little longer each time a pass found nothing new to kill."""
        self.passes += 1
        limit = SLOW_PASS_S if self.told else 0.01
        self.pause = 0.001 if found_new else min(self.pause * 2, limit)
        self.due = time.monotonic() + self.pause


class Guard:
    """Says when a tree comes near its limits, crosses them, or is beyond all patience; and when to look again.

    Args:
        limits: ``memory`` in bytes, ``processes``, ``seconds``, ``cpu`` in seconds; what is missing or 0 has no limit.
        now: monotonic seconds; the clock starts there.
    """

    def __init__(self, limits: dict[str, float], now: float) -> None:
        self.began = now
        self.set(limits, now)

    def set(self, limits: dict[str, float], now: float) -> None:
        """Take other limits; what was told is told again."""
        self.limits = {which: value for which, value in limits.items() if value and which in GUARD_PACE}
        self._told: dict[str, int] = {}
        self._before: tuple[float, dict[str, float]] = (now, {})
        self.due = now + min([GUARD_IDLE_S, *(limit / GUARD_PACE[w] / 2 for w, limit in self.limits.items())])

    def pause(self, now: float) -> float | None:
        """Return the seconds until the next look; None when there is nothing to look for."""
        return max(0.0, self.due - now) if self.limits else None

    def see(self, used: dict[str, float], now: float, cost: float) -> list[tuple[str, float, float, str]]:
        """Take what is used now; return ``(which, value, limit, level)``, each level once: warn, limit, hard.

        Args:
            used: values by the names of the limits.
            now: monotonic seconds.
            cost: seconds that the look took.
        """
        used = used | {"seconds": now - self.began}
        found = []
        wait = GUARD_IDLE_S
        for which, limit in self.limits.items():
            level = self._level(which, used[which] / limit)
            if level > self._told.get(which, 0):
                self._told[which] = level
                found.append((which, used[which], limit, ("", "warn", "limit", "hard")[level]))
            wait = min(wait, self._until_next(which, used, now))
        self._before = (now, used)
        self.due = now + max(wait, GUARD_MIN_S, cost * GUARD_SHARE)
        return found

    def _level(self, which: str, share: float) -> int:
        if share >= HARD_SHARE and which in GUARD_HARD:
            return 3
        return 2 if share >= 1 else 1 if share >= WARN_SHARE else 0

    def _until_next(self, which: str, used: dict[str, float], now: float) -> float:
        then, before = self._before
        pace = GUARD_PACE[which]
        if now > then:
            pace = max(pace, (used[which] - before.get(which, 0.0)) / (now - then))
        limit = self.limits[which]
        left = limit - used[which] if used[which] < limit else limit * HARD_SHARE - used[which]
        # Half of the way only: a tree may speed up, and time itself may not.
        return max(0.0, left / pace / (1 if which == "seconds" else 2)) if left > 0 else GUARD_IDLE_S


# --- the supervisor: one a command ------------------------------------------------------------------------------------


class Supervisor:
    """Starts one command, holds its whole tree, ends it when told or when the agent is gone."""

    def __init__(self, peer: Peer, scan: bool, *, strict: bool = False, group: str = "") -> None:
        self.peer = peer
        self.tree = Tree(scan)
        self.wake = wake_on_child()
        self.strict = strict
        self.group = ControlGroup(group) if group else None
        self.init = 0
        self.note_fd = -1
        self.status_fd = -1
        self.leader = 0
        self.exit_status: int | None = None
        self.failed = False
        self.empty = False
        self.hunt: Hunt | None = None
        self.guard = Guard({}, time.monotonic())
        self._ended: dict[tuple[int, int], list[Any]] = {}

    def start(self, request: dict[str, Any], stdio: list[int]) -> None:
        """Fork the command. ``request``: argv, env, cwd as Latin-1 images of bytes; limits; terminal, when stdio is one."""
        self.guard = Guard(request.get("limits", {}), time.monotonic())
        reading, writing = os.pipe2(os.O_CLOEXEC)
        stage = "fork"
        try:
            if self.group is not None:
                self.group.make()
            if self.strict:
                stage = "namespace"
                self._start_caged(request, stdio, writing)
            else:
                self.leader = os.fork()
                if self.leader == 0:
                    run_command(request, stdio, writing, self.tree.me, self.group)
        except OSError as error:
            self.fail(error.errno or 0, stage)
            return
        finally:
            os.close(writing)
            for fd in stdio:
                os.close(fd)
        os.set_blocking(reading, False)
        self.status_fd = reading
        if self.strict:
            self._find_leader()

    def _start_caged(self, request: dict[str, Any], stdio: list[int], writing: int) -> None:
        """Fork the first process of new namespaces, which forks the command; its end is the end of all of them."""
        enter_cage()
        going, self.go_fd = os.pipe2(os.O_CLOEXEC)
        self.note_fd, noting = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.init = os.fork()
        if self.init == 0:
            os.close(self.go_fd)
            be_init(request, stdio, writing, going, noting, self.group)
        os.close(going)
        os.close(noting)

    def _find_leader(self) -> None:
        """Learn the command's number out here: it waits until then, so that it cannot be gone."""
        deadline = time.monotonic() + 2.0
        while not self.leader and time.monotonic() < deadline:
            self.tree.look_around()
            found = self.tree.children(self.init)
            if found:
                self.leader = found[0]
            elif select.select([self.status_fd], [], [], 0.001)[0]:
                break  # It failed before there was a command.
        with suppress(OSError):
            os.write(self.go_fd, b"g")
        os.close(self.go_fd)

    def fail(self, number: int, stage: str) -> None:
        """Report that the command cannot run."""
        self.failed = True
        self.peer.tell("spawn_failed", errno=number, stage=stage)

    def serve(self) -> None:
        """Work until the tree is empty; every way out of here leaves no descendant."""
        while True:
            if self.status_fd >= 0:
                self._learn_start()
            if self._reap():
                break
            if self.peer.gone and self.hunt is None:
                self.hunt = Hunt(DEADLINE_S)
            if self.hunt is not None and time.monotonic() >= self.hunt.due:
                # Not at each death: 200 of them would mean 200 walks among the dying.
                self._kill_pass(self.hunt)
            fds = [self.wake, *(fd for fd in (self.status_fd, self.note_fd) if fd >= 0)]
            now = time.monotonic()
            wait_for(self.peer, fds, self.hunt.due - now if self.hunt else self.guard.pause(now))
            self.peer.flush()
            while not self.peer.gone and (heard := self.peer.hear()) is not None:
                self._obey(heard[0])
            if self.hunt is None and self.guard.limits and time.monotonic() >= self.guard.due:
                self._look()
        self._report_empty()

    def _learn_start(self) -> None:
        try:
            told = os.read(self.status_fd, 64)
        except BlockingIOError:
            return
        os.close(self.status_fd)
        self.status_fd = -1
        if told:
            number, stage = told.decode().split()
            self.fail(int(number), stage)
            return
        one, own = read_stat(self.leader), read_stat(self.tree.me)
        self.peer.tell(
            "started", pid=self.leader, start_time=one.start if one else 0, sup_pid=self.tree.me,
            sup_start=own.start if own else 0,
        )  # fmt: skip

    def _reap(self) -> bool:
        """Collect the dead; True when the kernel says that there is no descendant any more."""
        leader_ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.empty = True
                break
            if pid == 0:
                break
            if pid == self.leader:
                self.exit_status = os.waitstatus_to_exitcode(status)
                leader_ended = True
        if self.note_fd >= 0:
            leader_ended = self._read_note()
        if leader_ended:
            self._report_exit()
        return self.empty

    def _read_note(self) -> bool:
        """Read how the command in the namespace ended, if it did."""
        try:
            told = os.read(self.note_fd, 16)
        except BlockingIOError:
            return False
        os.close(self.note_fd)
        self.note_fd = -1
        # The first process went without a word: it was killed, and all with it.
        self.exit_status = int(told) if told else -int(signal.SIGKILL)
        return bool(self.leader)

    def _look_at(self, *signals: int, group: int = 0) -> list[Seen]:
        """Visit the tree; the first process of the namespace is ours and not the command's."""
        return [one for one in self.tree.visit(*signals, group=group) if one.pid != self.init]

    def _report_exit(self) -> None:
        if self.status_fd >= 0:
            self._learn_start()
        if not self.failed:
            self.peer.tell("exit", status=self.exit_status)
        if not self.empty:
            left = [one.wire for one in self._look_at() if not one.dead]
            self.peer.tell("orphans", n=len(left), sample=left[:32])

    def _obey(self, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "signal":
            self._signal(int(message["sig"]), message.get("scope", "group"), bool(message.get("cont")))
        elif op == "kill" and self.hunt is None:
            self._begin_kill(message.get("deadline_ms", DEADLINE_S * 1000) / 1000)
        elif op == "stats":
            self._report_stats()
        elif op == "limits":
            self.guard.set(message["limits"], time.monotonic())

    def _begin_kill(self, seconds: float) -> None:
        if self.hunt is None:
            self.hunt = Hunt(seconds)
            self.peer.tell("killing")
            if self.group is not None or self.init:
                # One stroke ends all of them: who they were must be known before.
                self._note(self._look_at(), signal.SIGKILL)
            if self.group is not None:
                self.group.kill()

    def _signal(self, number: int, scope: str, cont: bool) -> None:
        signals = (number, signal.SIGCONT) if cont else (number,)
        group = 0
        if scope == "tree":
            seen = self._look_at(*signals)
        elif self.exit_status is not None or self.init:
            # The leader is reaped, so its number may be somebody else's group by now: only verified members.
            group = self.leader
            seen = self._look_at(*signals, group=group)
        else:
            group = self.leader
            seen = self._look_at()
            with suppress(OSError):
                for one in signals:
                    os.killpg(self.leader, one)
        self._note(seen, number, group)
        names = list(dict.fromkeys(one.name for one in seen if not one.dead))
        self.peer.tell("signalled", sig=number, n=sum(not one.dead for one in seen), names=names[:NAMES_MAX])

    def _note(self, seen: list[Seen], number: int, group: int = 0) -> bool:
        """Remember what lived when a signal was sent; tell whether any of it is new."""
        before = len(self._ended)
        for one in seen:
            if not one.dead:
                row = self._ended.setdefault((one.pid, one.start), [*one.wire, 0])
                if not group or one.pgrp == group:
                    row[3] = int(number)
        return len(self._ended) > before

    def _kill_pass(self, hunt: Hunt) -> None:
        fresh = True
        while fresh:
            seen = self._look_at(signal.SIGKILL)
            fresh = self._note(seen, signal.SIGKILL)
            hunt.tire(fresh)
            if self._reap():
                return
            if time.monotonic() > hunt.deadline and not hunt.told:
                hunt.told = True
                self._report_survivors(seen)
            if hunt.told:
                return

    def _report_survivors(self, seen: list[Seen]) -> None:
        left = [self.tree.survivor(one) for one in seen if not one.dead]
        self.peer.tell("survivors", list=left[:SURVIVORS_MAX], n=len(left))

    def _report_stats(self) -> None:
        alive, used = self._look()
        self.peer.tell(
            "stats", rss=used["memory"], nprocs=len(alive), cpu=round(used["cpu"], 3),
            list=[one.wire for one in alive[:LIST_MAX]],
        )  # fmt: skip

    def _look(self) -> tuple[list[Seen], dict[str, float]]:
        """Measure the tree, and report the limits that it reached; a tree far beyond one is killed at once."""
        began = time.monotonic()
        alive = [one for one in self._look_at() if not one.dead]
        reaped = os.times()
        used: dict[str, float] = {
            "memory": sum(one.pages for one in alive) * os.sysconf("SC_PAGE_SIZE"),
            "processes": len(alive),
            "cpu": sum(one.ticks for one in alive) / os.sysconf("SC_CLK_TCK")
            + reaped.children_user + reaped.children_system,
        }  # fmt: skip
        now = time.monotonic()
        for which, value, limit, level in self.guard.see(used, now, now - began):
            self.peer.tell("limit", which=which, value=value, limit=limit, level=level)
            if level == "hard":
                self._begin_kill(DEADLINE_S)
        return alive, used

    def _report_empty(self) -> None:
        hunt = self.hunt
        if self.group is not None:
            self.group.remove()
        self.peer.tell(
            "empty", killed=list(self._ended.values())[:LIST_MAX], n=len(self._ended),
            passes=hunt.passes if hunt else 0,
            ms=round((time.monotonic() - hunt.began) * 1000, 2) if hunt else 0,
        )  # fmt: skip
        deadline = time.monotonic() + 1.0
        while self.peer.waiting and time.monotonic() < deadline:
            wait_for(self.peer, [self.wake], 0.05)
            self.peer.flush()


def run_command(
    request: dict[str, Any], stdio: list[int], status: int, parent: int, group: ControlGroup | None = None
) -> NoReturn:
    """Become the command: in the fork, never returns. Failures are told through ``status``."""
    stage = "session"
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)  # The supervisor died before the line above: nobody would end us.
        for number in signal.valid_signals():
            if signal.getsignal(number) != signal.SIG_DFL:  # Asking is cheap, setting is two system calls.
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        stage = "stdio"
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        if request.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.dup2(status, 3, inheritable=False)
        status = 3
        os.closerange(4, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        yield_to_others()
        if group is not None:
            group.join()
        stage = "chdir"
        os.chdir(request["cwd"].encode("latin-1"))
        stage = "exec"
        argv = [word.encode("latin-1") for word in request["argv"]]
        env = {name.encode("latin-1"): value.encode("latin-1") for name, value in request["env"].items()}
        execute(argv, env)
    except OSError as error:
        os.write(status, f"{error.errno or 0} {stage}".encode())
    except BaseException:
        os.write(status, f"22 {stage}".encode())
    finally:
        os._exit(127)


def execute(argv: list[bytes], env: dict[bytes, bytes]) -> NoReturn:
    """Become a program that is looked up as ``execvpe`` does, which would import a module first. Raises OSError."""
    if b"/" in argv[0]:
        os.execve(argv[0], argv, env)
    refused: OSError | None = None
    for folder in env.get(b"PATH", os.defpath.encode()).split(b":"):
        try:
            os.execve(os.path.join(folder, argv[0]), argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing: OSError = error
        except OSError as error:
            refused = refused or error
    raise refused or missing


def yield_to_others() -> None:
    """Let this process lose against Peri for the processor and for memory; no core files, no endless file."""
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError, ValueError):
        score = int(read_file("/proc/self/oom_score_adj"))
        write_file("/proc/self/oom_score_adj", str(max(score, OOM_SCORE)))
    for which, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (most, most))


class ControlGroup:
    """A cgroup v2 of one command (``cgroups(7)``): the kernel ends all its members in one stroke.

    An accelerator only; what proves that nothing is left is the same as without it.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder. Raises OSError."""
        os.mkdir(self.path)

    def join(self) -> None:
        """Move this process into it. Raises OSError."""
        write_file(f"{self.path}/cgroup.procs", "0")

    def kill(self) -> None:
        """Kill every member; what cannot be done here is done one by one."""
        with suppress(OSError):
            write_file(f"{self.path}/cgroup.kill", "1")

    def remove(self) -> None:
        """Remove the folder; the kernel may need a moment after the last member."""
        for _ in range(50):
            try:
                os.rmdir(self.path)
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.002)
            else:
                return


def find_delegated() -> str:
    """Return the cgroup v2 folder that this process is in, when it may divide it; empty when not.

    The root of the hierarchy is nobody's to divide, whoever may write to it.
    """
    lines = read_file("/proc/self/cgroup").decode("utf-8", "replace").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    for line in read_file("/proc/self/mountinfo").decode("utf-8", "replace").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 ") and own != "/":
            folder = place.split()[4] + own
            if os.access(folder, os.W_OK) and os.access(f"{folder}/cgroup.procs", os.W_OK):
                return folder
    return ""


def make_group(folder: str) -> str:
    """Return a new cgroup of the warden's own below a folder; empty when it cannot be had, or cannot kill."""
    own = f"{folder}/peri-{os.getpid()}"
    try:
        os.mkdir(own)
    except OSError:
        return ""
    if os.path.exists(f"{own}/cgroup.kill"):
        return own
    os.rmdir(own)
    return ""


def enter_cage() -> None:
    """Make a user and a process namespace, the latter for the next fork (``namespaces(7)``). Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    check(_libc.unshare(ctypes.c_int(CLONE_NEWUSER | CLONE_NEWPID)), "unshare")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{uid} {uid} 1")
    write_file("/proc/self/gid_map", f"{gid} {gid} 1")


def mount_own_proc() -> None:
    """Show the namespace's own processes in ``/proc``, to its members only. Raises OSError."""
    check(_libc.unshare(ctypes.c_int(CLONE_NEWNS)), "unshare")
    check(_libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount /")
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    check(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")


def be_init(
    request: dict[str, Any],
    stdio: list[int],
    status: int,
    going: int,
    noting: int,
    group: ControlGroup | None,
) -> NoReturn:
    """Be the first process of a namespace: start the command, reap what loses its parent, end when all have."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, b"peri-init")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mount_own_proc()
        command = os.fork()
        if command == 0:
            # The supervisor looks for us first. It closes the pipe when it dies, and then there is nothing to start.
            if not os.read(going, 1):
                os._exit(127)
            run_command(request, stdio, status, 1, group)
    except OSError as error:
        os.write(status, f"{error.errno or 0} namespace".encode())
        os._exit(127)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) != noting:
            with suppress(OSError):
                os.close(int(entry))
    while True:
        try:
            pid, result = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == command:
            os.write(noting, str(os.waitstatus_to_exitcode(result)).encode())
            os.close(noting)


def why_not_strict() -> str:
    """Try the namespaces once; return why they cannot be had, empty when they can."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            enter_cage()
            if os.fork() == 0:
                mount_own_proc()
                os.write(writing, b"yes")
            else:
                os.wait()
        except BaseException as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        told = file.read(300).decode("utf-8", "replace")
    os.waitpid(child, 0)
    return "" if told == "yes" else told or "refused"


def supervise(
    sock: int, request_fd: int, stdio: list[int], scan: bool, *, strict: bool = False, group: str = ""
) -> NoReturn:
    """Be the supervisor: in the fork, never returns. Exit status 0 means that the tree is empty."""
    keep = {0, 1, 2, sock, request_fd, *stdio}
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in keep:
            with suppress(OSError):
                os.close(int(entry))
    code = 1
    try:
        os.setsid()
        settle_process(b"peri-supervisor")
        supervisor = Supervisor(Peer(socket.socket(fileno=sock)), scan, strict=strict, group=group)
        try:
            os.lseek(request_fd, 0, os.SEEK_SET)
            request = read_all(request_fd)
            os.close(request_fd)
            supervisor.start(parse_json(request), stdio)
            supervisor.serve()
        except BaseException:
            # Whatever went wrong here, nothing below may stay.
            supervisor.peer.gone = True
            supervisor.serve()
        code = 0
    finally:
        os._exit(code)


# --- the warden: one an agent -----------------------------------------------------------------------------------------


class Warden:
    """Forks supervisors, and ends what one of them left when it was killed itself."""

    def __init__(self, peer: Peer, scan: bool, *, strict: bool = False, cgroup: str = "") -> None:
        self.peer = peer
        self.scan = scan
        # Never strict as a matter of course: a caged program sees other users' files as nobody's.
        self.refused = why_not_strict() if strict else ""
        self.strict = strict and not self.refused
        self.group = make_group(cgroup) if cgroup else ""
        self.tree = Tree(scan)
        self.wake = wake_on_child()
        self.supervisors: dict[int, int] = {}
        self.to_sweep: list[int] = []
        self.hunt: Hunt | None = None
        self._ended: dict[tuple[int, int], list[Any]] = {}
        self._quiet = 0
        self._hurry_until = 0.0

    def serve(self) -> None:
        """Work until the agent is gone and every supervisor has ended its tree."""
        self.peer.tell(
            "ready", pid=os.getpid(), strict=self.strict, cgroup=bool(self.group), refused=self.refused,
            scan=self.tree.scans,
        )  # fmt: skip
        while not (self.peer.gone and not self.supervisors and not self.to_sweep):
            if self.peer.gone:
                self._hurry()
            wait_for(self.peer, [self.wake], self._pause())
            self.peer.flush()
            while not self.peer.gone and (heard := self.peer.hear(5)) is not None:
                self._obey(*heard)
            self._reap()
            if self.to_sweep:
                self._sweep()
        if self.group:
            ControlGroup(self.group).remove()

    def _leaf(self, number: int) -> str:
        return f"{self.group}/{number}" if self.group else ""

    def _pause(self) -> float | None:
        if self.hunt is not None:
            return self.hunt.pause
        return HURRY_S / 4 if self.peer.gone and time.monotonic() < self._hurry_until else None

    def _hurry(self) -> None:
        """The agent is gone: wake supervisors that a task has frozen, and replace those that stay so."""
        now = time.monotonic()
        if not self._hurry_until:
            self._hurry_until = now + 2 * HURRY_S
            self._signal_supervisors(signal.SIGCONT)
        elif now > self._hurry_until - HURRY_S:
            self._signal_supervisors(signal.SIGKILL, "Tt")

    def _signal_supervisors(self, number: int, states: str = "") -> None:
        for pid in self.supervisors:
            one = read_stat(pid)
            if one is not None and (not states or one.state in states):
                os.kill(pid, number)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            if message.get("op") == "spawn" and len(fds) == 5:
                self._spawn(int(message["id"]), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, number: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                os.write(
                    fds[0], dump_json({"ev": "spawn_failed", "errno": error.errno, "stage": "supervisor"})
                )
            return
        if pid == 0:
            leaf = self._leaf(number)
            supervise(fds[0], fds[1], fds[2:], self.scan, strict=self.strict, group=leaf)
        self.supervisors[pid] = number
        self.tree.spare.add(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.supervisors.pop(pid, None)
            self.tree.spare.discard(pid)
            if number is not None and status == 0:
                self.peer.tell("swept", id=number, n=0, killed=[], survivors=[])
            elif number is not None:
                if self.group:
                    ControlGroup(self._leaf(number)).kill()
                self.to_sweep.append(number)
                self.hunt = self.hunt or Hunt(DEADLINE_S)
                self._quiet = 0

    def _sweep(self) -> None:
        assert self.hunt is not None
        seen = self.tree.visit(signal.SIGKILL)
        for one in seen:
            if not one.dead:
                self._ended.setdefault((one.pid, one.start), [*one.wire, int(signal.SIGKILL)])
        self.hunt.tire(bool(seen))
        # The list of children may miss one that moves while it is read; there is no ECHILD here to rely on.
        self._quiet = self._quiet + 1 if not seen else 0
        late = time.monotonic() > self.hunt.deadline
        if self._quiet >= 3 or (late and not self.hunt.told):
            left = [self.tree.survivor(one) for one in seen if not one.dead]
            self._report_sweep(left[:SURVIVORS_MAX])
            self.hunt.told = True
        if self._quiet >= 3:
            for number in self.to_sweep if self.group else ():
                ControlGroup(self._leaf(number)).remove()
            self.to_sweep, self.hunt, self._ended = [], None, {}

    def _report_sweep(self, left: list[list[Any]]) -> None:
        killed = list(self._ended.values())[:LIST_MAX]
        for number in self.to_sweep:
            self.peer.tell("swept", id=number, n=len(self._ended), killed=killed, survivors=left)


def main(arguments: list[str]) -> int:
    """Run the warden on the socket whose descriptor is the first argument.

    More words: ``scan`` avoids the lists of children, ``strict`` asks for namespaces, ``cgroup`` for a delegated
    cgroup, ``cgroup=FOLDER`` for one below that folder.
    """
    sock = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(sock.fileno(), False)
    ignore_signals()
    settle_process(b"peri-warden")
    gc.freeze()  # Forks share these pages as long as nothing writes to them.
    words = dict(word.partition("=")[::2] for word in arguments[1:])
    cgroup = (words["cgroup"] or find_delegated()) if "cgroup" in words else ""
    Warden(Peer(sock), "scan" in words, strict="strict" in words, cgroup=cgroup).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
