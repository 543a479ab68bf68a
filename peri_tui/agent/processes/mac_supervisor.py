"""The macOS supervisor: one a command. It starts the command in a session of its own, and ends what it can find.

One self-contained file, standard library only, started by path (``python -I -S mac_supervisor.py SOCK REQUEST IN OUT
ERR LIFE``, all descriptors). macOS has no child subreaper, no parent-death signal and no pidfd, so nothing there can
prove that a tree is empty. What is done instead: the group is signalled, and the process table (``ps(1)``) is searched
for members of the command's group and session, for children by parent number, and for everyone who was seen so before
and moved away since. After a kill that is repeated until two looks find nobody. The last word is then ``gone`` (none
is known any more), never ``empty``.

Stated limits: a process that leaves its session *and* loses its parent between two looks is not found; start times
have whole seconds, so a number that is reused within one second could be taken for its predecessor; between the last
look and the signal there is a moment that no call of the system closes. **Never run on macOS so far**: it was tested
on Linux only, with a fake platform and with the real ``ps`` there.

Messages are those of ``warden``, one JSON object a line. End of file on ``SOCK`` means: kill everything; that is what
ends the command when the agent is killed. ``LIFE`` is held open for as long as this process lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from calendar import timegm
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

_COLUMNS: Final = ("pid", "ppid", "pgid", "uid", "rss", "stat", "lstart", "comm")
_PS: Final = ("ps", *(word for column in _COLUMNS for word in ("-o", f"{column}=")))
_PS_ENV: Final = {"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC"}
_PS_S: Final = 5.0
_LOOKS_AT_S: Final = (0.05, 0.2, 0.5, 1.0)
_LOOK_EVERY_S: Final = 2.0
_DEADLINE_S: Final = 4.5
_PAUSE_S: Final = 0.02
_PAUSE_MAX_S: Final = 5.0
_QUIET_LOOKS: Final = 2
_LIST_MAX: Final = 500
_WARN_SHARE: Final = 0.8
_NICENESS: Final = 5
_FILE_BYTES: Final = 10 << 30
_WAITING_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the process table; ``start`` in seconds since 1970, ``rss`` in bytes, ``sid`` 0 if unknown."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    uid: int
    start: int
    name: str
    rss: int = 0
    dead: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """What tells a process from a later one with its number."""
        return self.pid, self.start

    @property
    def wire(self) -> list[Any]:
        """The process as it is listed in messages."""
        return [self.pid, self.start, self.name]


class Host(Protocol):
    """What is asked of the system."""

    def list_processes(self, pids: Iterable[int] = ()) -> dict[int, Row]:
        """Return the process table, or of it those numbers. Raises OSError: it cannot be read."""

    def kill(self, pid: int, number: int) -> None:
        """Signal one process. Raises OSError."""

    def kill_group(self, group: int, number: int) -> None:
        """Signal a process group. Raises OSError."""


def parse_table(text: str, session_of: Callable[[int], int] = lambda _: 0) -> dict[int, Row]:
    """Return the rows of ``ps -o pid= -o ppid= -o pgid= -o uid= -o rss= -o stat= -o lstart= -o comm=`` by pid.

    Lines that are not of that form are left out. The session comes from ``session_of`` (``getsid(2)``): macOS' own
    ``ps`` prints an address, or nothing of use, in that column.
    """
    found = {}
    for line in text.splitlines():
        fields = line.split(None, 11)
        try:
            pid, ppid, pgid, uid, rss = map(int, fields[:5])
            start = timegm(time.strptime(" ".join(fields[6:11]), "%a %b %d %H:%M:%S %Y"))
        except ValueError:
            continue
        name = fields[11].strip().rpartition("/")[2] if len(fields) > 11 else ""
        found[pid] = Row(pid, ppid, pgid, session_of(pid), uid, start, name, rss * 1024, "Z" in fields[5])
    return found


class PsHost:
    """The real system, through ``ps``, ``kill(2)`` and ``getsid(2)``."""

    def list_processes(self, pids: Iterable[int] = ()) -> dict[int, Row]:
        """Return the process table, or of it those numbers. Raises OSError: ``ps`` cannot be run, or hangs."""
        which = ["-p", ",".join(map(str, pids))] if pids else ["-ax"]
        try:
            done = subprocess.run(
                [*_PS, *which], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=_PS_ENV, timeout=_PS_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise OSError(f"ps gave no answer within {_PS_S:.0f} s") from None
        return parse_table(done.stdout.decode("utf-8", "replace"), _session)

    def kill(self, pid: int, number: int) -> None:
        """Signal one process. Raises OSError."""
        os.kill(pid, number)

    def kill_group(self, group: int, number: int) -> None:
        """Signal a process group. Raises OSError."""
        os.killpg(group, number)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


class Lines:
    """Messages over a stream socket, one a line: macOS has no packet sockets that also tell the end of file."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._heard = bytearray()
        self._waiting = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once it is closed."""
        return self._sock.fileno()

    def recv(self, size: int = 65536) -> bytes:
        """Return one message, none at the end of file. Raises BlockingIOError when none is there, or OSError."""
        while b"\n" not in self._heard:
            data = self._sock.recv(size)
            if not data:
                return b""
            self._heard += data
        line, _, rest = self._heard.partition(b"\n")
        self._heard = rest
        return bytes(line)

    def send(self, data: bytes) -> int:
        """Send a message, or keep it until the next one or ``flush``. Raises OSError: the peer is gone or deaf."""
        if len(self._waiting) > _WAITING_BYTES:
            raise BlockingIOError("the peer does not read")
        self._waiting += data + b"\n"
        self.flush()
        return len(data)

    def flush(self) -> None:
        """Send what waits, as far as it goes. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                del self._waiting[: self._sock.send(self._waiting)]

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class Tree:
    """The processes that are known to be a command's.

    Args:
        host: the system.
        leader: the command's number, which is also its group's and its session's.
    """

    def __init__(self, host: Host, leader: int) -> None:
        self.leader = leader
        self.reaped = False  # From then on the leader's number may become somebody else's.
        self._host = host
        self._known: dict[tuple[int, int], Row] = {}
        self._start: int | None = None
        self._group_over = False

    def look(self) -> list[Row]:
        """Return who of the tree lives now, parents before children. Raises OSError: the table cannot be read."""
        table = self._host.list_processes()
        own = table.get(self.leader)
        if self._start is None and own is not None and not self.reaped:
            self._start = own.start
        self._group_over |= own is not None and own.start != self._start
        found = {pid: row for pid, row in table.items() if row.key in self._known or self._in_group(row)}
        self._group_over |= self.reaped and not any(self._in_group(row) for row in found.values())
        self._adopt(table, found)
        self._known = {row.key: row for row in found.values()}
        return [row for row in found.values() if not row.dead]

    def _in_group(self, row: Row) -> bool:
        return not self._group_over and self.leader in (row.pgid, row.sid)

    @staticmethod
    def _adopt(table: Mapping[int, Row], found: dict[int, Row]) -> None:
        """Add the children of those found, and theirs, to the fixed point."""
        grows = True
        while grows:
            fresh = {
                pid: row
                for pid, row in table.items()
                if pid not in found and row.ppid in found and row.start >= found[row.ppid].start
            }
            found.update(fresh)
            grows = bool(fresh)

    def hit(self, rows: Sequence[Row], *numbers: int) -> list[Row]:
        """Signal these very processes; one whose number was reused meanwhile is left alone. Returns who was hit."""
        if not rows:
            return []
        now = self._host.list_processes([row.pid for row in rows])
        same = [
            row for row in rows if row.pid in now and now[row.pid].key == row.key and not now[row.pid].dead
        ]
        for row in same:
            for number in numbers:
                with contextlib.suppress(OSError):  # Gone, or another user's: the next look tells.
                    self._host.kill(row.pid, number)
        return same

    def hit_group(self, *numbers: int) -> bool:
        """Signal the leader's group while its number is surely ours; False when it is not any more."""
        if self.reaped:
            return False
        for number in numbers:
            with contextlib.suppress(OSError):
                self._host.kill_group(self.leader, number)
        return True


class Supervisor:
    """Obeys the agent, and ends what is known of a tree when told to, or when the agent is gone.

    Args:
        peer: the agent.
        tree: what is known of the command's processes.
        poll: returns how the command ended (as ``Popen.returncode``), None while it runs; reaps it.
        limits: ``memory`` in bytes, ``processes``, ``seconds``; looked at when the table is.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peer: Lines,
        tree: Tree,
        poll: Callable[[], int | None],
        limits: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.tree = tree
        self.over = False
        self.gone = False
        self._poll = poll
        self._limits = dict(limits or {})
        self._clock = clock
        self._began = clock()
        self._looks = [self._began + s for s in _LOOKS_AT_S]
        self._told: set[tuple[str, str]] = set()
        self._ended: dict[tuple[int, int], list[Any]] = {}
        self._deadline: float | None = None
        self._pause = _PAUSE_S
        self._quiet = 0
        self._survivors_told = False

    @property
    def pause(self) -> float:
        """Seconds until ``work`` is due again, whatever is heard."""
        if self._deadline is not None:
            return self._pause
        return max(0.0, self._looks[0] - self._clock())

    def tell(self, ev: str, **facts: Any) -> None:
        """Send a message; a peer that does not take it is gone."""
        try:
            self.peer.send(json.dumps({"ev": ev} | facts).encode())
        except OSError:
            self.gone = True

    def work(self) -> None:
        """Do what is due: obey, reap, look, kill. ``over`` is true once nobody is known any more."""
        self._hear()
        self._reap()
        if self.gone and self._deadline is None:
            self.begin_kill(_DEADLINE_S)
        if self._deadline is not None:
            self._kill_pass()
        elif not self.over and self._clock() >= self._looks[0]:
            self._measure()

    def _hear(self) -> None:
        while not self.gone:
            try:
                data = self.peer.recv()
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.gone = True
                return
            self.obey(json.loads(data))

    def obey(self, message: Mapping[str, Any]) -> None:
        """Do what the agent asks for."""
        op = message.get("op")
        if op == "signal":
            self._signal(int(message["sig"]), str(message.get("scope", "group")), bool(message.get("cont")))
        elif op == "kill":
            self.begin_kill(float(message.get("deadline_ms", _DEADLINE_S * 1000)) / 1000)
        elif op == "stats":
            alive, rss = self._measure()
            self.tell(
                "stats", rss=rss, nprocs=len(alive), cpu=0.0, list=[row.wire for row in alive[:_LIST_MAX]]
            )
        elif op == "limits":
            self._limits = dict(message["limits"])

    def _signal(self, number: int, scope: str, cont: bool) -> None:
        numbers = (number, int(signal.SIGCONT)) if cont else (number,)
        alive = self._look()
        if scope == "group":
            group = [row for row in alive if row.pgid == self.tree.leader]
            hit = group if self.tree.hit_group(*numbers) else self.tree.hit(group, *numbers)
        else:
            hit = self.tree.hit(alive, *numbers)
        self._note(alive, hit, number)
        names = list(dict.fromkeys(row.name for row in alive))
        self.tell("signalled", sig=number, n=len(alive), names=names[:20])

    def begin_kill(self, seconds: float) -> None:
        """Kill everyone who is known, from now on; after ``seconds``, those who still live are reported."""
        if self._deadline is not None:
            return
        self._deadline = self._clock() + seconds
        self.tell("killing")
        # Whom only the chain of parents shows must be known before the chain is cut.
        alive = self._look()
        if self.tree.hit_group(signal.SIGKILL):
            self._note(alive, [row for row in alive if row.pgid == self.tree.leader], signal.SIGKILL)

    def _kill_pass(self) -> None:
        assert self._deadline is not None
        alive = self._look()
        self._note(alive, self.tree.hit(alive, signal.SIGKILL), signal.SIGKILL)
        self._reap()
        self._quiet = 0 if alive or not self.tree.reaped else self._quiet + 1
        if self._quiet >= _QUIET_LOOKS:
            self._finish()
        elif self._clock() > self._deadline:
            if not self._survivors_told:
                self._survivors_told = True
                self.tell("survivors", list=[_survivor(row) for row in alive[:100]], n=len(alive))
            self._pause = min(self._pause * 2, _PAUSE_MAX_S)

    def _reap(self) -> None:
        if self.tree.reaped or (status := self._poll()) is None:
            return
        self.tree.reaped = True
        self.tell("exit", status=status)
        if self._deadline is None:
            left = self._look()
            if left:
                self.tell("orphans", n=len(left), sample=[row.wire for row in left[:32]])
            else:
                self._finish()

    def _finish(self) -> None:
        self.over = True
        self.tell("gone", killed=list(self._ended.values())[:_LIST_MAX])

    def _look(self) -> list[Row]:
        self._looks = [at for at in self._looks if at > self._clock()] or [self._clock() + _LOOK_EVERY_S]
        return self.tree.look()

    def _note(self, alive: Sequence[Row], hit: Sequence[Row], number: int) -> None:
        for row in alive:
            self._ended.setdefault(row.key, [*row.wire, 0])
        for row in hit:
            self._ended[row.key][3] = int(number)

    def _measure(self) -> tuple[list[Row], int]:
        """Look, and report each limit that is near or crossed, once. What ended unasked before a stop is over."""
        alive = self._look()
        rss = sum(row.rss for row in alive)
        used = {"memory": rss, "processes": len(alive), "seconds": self._clock() - self._began}
        for which, value in used.items():
            limit = self._limits.get(which, 0)
            level = "limit" if value >= limit else "warn" if value >= limit * _WARN_SHARE else ""
            if limit and level and (which, level) not in self._told:
                self._told.add((which, level))
                self.tell("limit", which=which, value=value, limit=limit, level=level)
        if self.tree.reaped and not alive and self._deadline is None:
            self._finish()
        return alive, rss


def _survivor(row: Row) -> list[Any]:
    foreign = row.uid != os.geteuid() and os.geteuid() != 0
    return [row.pid, row.start, row.name, row.uid, "not permitted" if foreign else "blocked in kernel"]


def start_command(request: Mapping[str, Any], stdio: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own. Raises OSError."""

    def settle() -> None:
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        os.nice(_NICENESS)
        for which, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, _FILE_BYTES)):
            hard = resource.getrlimit(which)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(which, (most, most))
        if request.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [word.encode("latin-1") for word in request["argv"]],
        stdin=stdio[0], stdout=stdio[1], stderr=stdio[2],
        cwd=request["cwd"].encode("latin-1"),
        env={name.encode("latin-1"): value.encode("latin-1") for name, value in request["env"].items()},
        start_new_session=True,
        preexec_fn=settle,  # Safe: this process has one thread.
    )  # fmt: skip


def _wake_on_child() -> int:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def _run(peer: Lines, request: Mapping[str, Any], stdio: Sequence[int], host: Host) -> None:
    wake = _wake_on_child()
    try:
        command = start_command(request, stdio)
    except (OSError, subprocess.SubprocessError) as error:
        stage = "exec" if os.path.isdir(request["cwd"].encode("latin-1")) else "chdir"
        peer.send(
            json.dumps(
                {"ev": "spawn_failed", "errno": getattr(error, "errno", 0) or 0, "stage": stage}
            ).encode()
        )
        return
    finally:
        for fd in set(stdio):
            os.close(fd)
    supervisor = Supervisor(peer, Tree(host, command.pid), command.poll, request.get("limits"))
    try:
        rows = host.list_processes([command.pid, os.getpid()])
        starts = [rows[pid].start if pid in rows else 0 for pid in (command.pid, os.getpid())]
        supervisor.tell(
            "started", pid=command.pid, start_time=starts[0], sup_pid=os.getpid(), sup_start=starts[1]
        )
    except OSError:
        supervisor.gone = True  # Without a process table nothing can be promised: end it.
    serve(supervisor, wake)


def _work(supervisor: Supervisor) -> bool:
    try:
        supervisor.work()
    except OSError:
        time.sleep(_PAUSE_S)
    return supervisor.over


def serve(supervisor: Supervisor, wake: int) -> None:
    """Work until nobody of the tree is known any more; the process table may fail now and then."""
    while not _work(supervisor):
        listened = [wake] if supervisor.gone else [wake, supervisor.peer.fileno()]
        ready = select.select(listened, [], [], supervisor.pause)[0]
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
    with contextlib.suppress(OSError):
        supervisor.peer.flush()


def main(arguments: list[str]) -> int:
    """Run on descriptors: socket, request file, stdin, stdout, stderr, and one that tells that this still lives."""
    sock, request_fd, *stdio, life = map(int, arguments)
    for fd in (sock, request_fd, *stdio, life):
        os.set_inheritable(fd, False)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGPIPE,
        signal.SIGTSTP,
    ):
        signal.signal(number, signal.SIG_IGN)
    with open(request_fd, "rb") as file:
        file.seek(0)
        request = json.load(file)
    _run(Lines(socket.socket(fileno=sock)), request, stdio, PsHost())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
