"""One command of a task, seen from the agent: its supervisor's messages, its ladder, its proof."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from peri_tui.agent.processes.evidence import (
    ExitStatus,
    ProcessRef,
    TreeEvidence,
    TreeStats,
    is_alive,
    refs_from_wire,
    text_from_wire,
)
from peri_tui.agent.processes.git_lock import drop_stale_lock
from peri_tui.agent.processes.guard import LimitReport, Limits
from peri_tui.agent.processes.ladder import Alive, Ladder, Rung, is_git
from peri_tui.agent.processes.ledger import Ledger
from peri_tui.agent.processes.link import Packets, read_packets, send_packet
from peri_tui.agent.processes.output import Output
from peri_tui.agent.processes.roster import Roster
from peri_tui.core import faults
from peri_tui.errors import SpawnFailed

FAULT: Final = "processes.skip_kill"
SETTLE_LIMIT_S: Final = 0.8
_START_S: Final = 10.0
_STATS_S: Final = 1.0
_SILENT_S: Final = 1.0
_DEADLINE_SHARE: Final = 0.9
_TICK_S: Final = 0.5

OnRung = Callable[[str, "Command", Rung, float], None]
OnLimit = Callable[[LimitReport], None]
OnSignalled = Callable[["Command"], None]


class Command:
    """A started (or starting) command and its whole process tree.

    Made by ``Processes.spawn`` only. ``number`` is the warden's name for it. One event loop, not thread-safe.
    """

    def __init__(
        self,
        task: str,
        number: int,
        argv: Sequence[str],
        cwd: str,
        sock: Packets,
        output: Output,
        *,
        ladder: Ladder,
        on_rung: OnRung | None,
        on_ended: Callable[[Command], None],
        guarded: Callable[[], bool],
        on_limit: OnLimit | None = None,
        on_signalled: OnSignalled | None = None,
        limits: Limits | None = None,
        stdin_fd: int = -1,
        alive: Callable[[ProcessRef], bool] = is_alive,
    ) -> None:
        self.task = task
        self.number = number
        self.output = output
        self.ladder = ladder
        self.orphans = 0
        self.rungs: list[tuple[Rung, float]] = []
        self.stats = TreeStats()
        self.ledger: Ledger | None = None
        self.limits = limits or Limits()
        self._git = is_git(argv)
        self._started_at = time.time()
        self._name = shlex.join(argv)[:200]
        self._on_limit = on_limit
        self._on_signalled = on_signalled
        self._stdin_fd = stdin_fd
        self._looked = 0.0
        self._cwd = cwd
        self._sock = sock
        self._on_rung = on_rung
        self._on_ended = on_ended
        self._guarded = guarded
        self._loop = asyncio.get_running_loop()
        self._ref: ProcessRef | None = None
        self._supervisor: ProcessRef | None = None
        self._supervisor_fd = -1
        self._failure: dict[str, Any] | None = None
        self._exit: ExitStatus | None = None
        self._end = ""  # "empty", "swept", "gone" (unproven) or "lost" once nothing more will be heard
        self._is_alive = alive
        self._roster = Roster(alive)
        self._killing = False
        self._rest_told = False
        self._news = asyncio.Event()
        self._stats_count = 0
        self._forced = False
        self._began = -1.0
        self._climb: asyncio.Task[TreeEvidence] | None = None
        self._loop.add_reader(sock, self._hear)

    @property
    def ref(self) -> ProcessRef:
        """The command's own process. Raises ProcessLookupError before it is started."""
        if self._ref is None:
            raise ProcessLookupError(f"{self._name}: not started")
        return self._ref

    @property
    def supervisor(self) -> ProcessRef | None:
        """The supervisor's process, once known."""
        return self._supervisor

    @property
    def name(self) -> str:
        """The command line, at most 200 characters."""
        return self._name

    @property
    def rung(self) -> Rung:
        """The hardest rung so far."""
        return self.rungs[-1][0] if self.rungs else Rung.NONE

    @property
    def next_rung(self) -> tuple[Rung, float]:
        """The rung that is due next and in how many seconds; ``(NONE, 0)`` when the hardest was sent."""
        if self._began < 0 or self.rung is Rung.KILL:
            return Rung.NONE, 0.0
        elapsed = self._loop.time() - self._began
        left = self.ladder.until_next(elapsed)
        return self.ladder.next_rung(elapsed + left + 0.001, self._forced, Alive.LEADER), left

    @property
    def exit_status(self) -> ExitStatus | None:
        """How the command ended, None while it runs."""
        return self._exit

    @property
    def live(self) -> bool:
        """True until the end of the whole tree is known."""
        return not self._end

    @property
    def proven(self) -> bool:
        """True when a supervisor, or the warden in its place, said that nothing is left."""
        return self._end in ("empty", "swept")

    @property
    def accounted(self) -> bool:
        """True when its supervisor lived to say the last word about it, proof or not."""
        return self.proven or self._end == "gone"

    @property
    def refs(self) -> tuple[ProcessRef, ...]:
        """Every process of the tree that was ever named, the command first."""
        return self._roster.refs

    # -- what callers do ----------------------------------------------------------------------------------------

    async def started(self) -> None:
        """Wait for the start.

        Raises:
            SpawnFailed: it cannot be started; ``errno`` and ``stage`` are in the evidence.
        """
        await self._until(lambda: self._ref is not None or bool(self._end or self._failure), _START_S)
        if self._ref is None:
            stages = {"": "timeout", "swept": "supervisor was killed", "lost": "warden was lost"}
            failure = self._failure or {"errno": 0, "stage": stages.get(self._end, "stopped")}
            if self._failure is None:
                self.force()
            raise self._spawn_failed(int(failure["errno"]), str(failure["stage"]))

    async def wait(self) -> ExitStatus:
        """Wait until the command itself ended; never for its output's end of file.

        A command whose supervisor was killed was killed with it: SIGKILL.
        """
        while self._exit is None and not self._end:
            await self._next_news()
        return self._exit or ExitStatus(None, signal.SIGKILL)

    async def settle(self, quiet_s: float = 0.25) -> int:
        """Take the rest of the output after the command's exit, without waiting for its end of file.

        Ends at the end of file, after ``quiet_s`` seconds without a byte, or after 0.8 s in all. Later output is read
        and thrown away. Returns how many processes of the tree still live; they stay stoppable.
        """
        await self.output.quiet(quiet_s, SETTLE_LIMIT_S)
        self.output.detach()
        # Right after the exit comes either what is left, or that nothing is.
        await self._until(lambda: self._rest_told or bool(self._end), _STATS_S)
        if self.live:
            self.orphans = (await self.sample()).processes
        return self.orphans if self.live else 0

    async def sample(self) -> TreeStats:
        """Return what the tree uses now; what was last known when the supervisor does not answer within 1 s."""
        if not self.live:
            return TreeStats()
        count = self._stats_count
        if send_packet(self._sock, {"op": "stats"}):
            await self._until(lambda: self._stats_count > count or bool(self._end), _STATS_S)
        return self.stats if self.live else TreeStats()

    def limit(self, limits: Limits) -> None:
        """Take other limits from now on (a service has no end of its time)."""
        self.limits = limits
        self.output.limit_bytes = limits.output
        if self.live:
            send_packet(self._sock, {"op": "limits", "limits": limits.wire})

    def send_input(self, data: bytes) -> int:
        """Write to the command's input without waiting (one started with a pipe or a terminal for it).

        Returns how many bytes were taken. Raises BrokenPipeError when nobody reads them, or none was made.
        """
        fd = self._stdin_fd if self._stdin_fd >= 0 else self.output.terminal_fd
        if fd < 0:
            raise BrokenPipeError(f"{self._name}: it has no input that could be written to")
        try:
            return os.write(fd, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise BrokenPipeError(f"{self._name}: its input is closed: {error.strerror}") from None

    def close_input(self) -> None:
        """Close the pipe to the command's input, if one was made."""
        if self._stdin_fd >= 0:
            os.close(self._stdin_fd)
            self._stdin_fd = -1

    def interrupt(self) -> None:
        """Stand on the first rung now and climb from there; a repeated call changes nothing."""
        if self._began >= 0:
            return
        self._began = self._looked = self._loop.time()
        self._step()
        self.output.mute()
        if self.live and self._ref is not None and self._exit is None:
            self._roster.at_stop = (self._ref,)
        self._climb = self._loop.create_task(self._run_ladder(), name=f"stop {self._name}")

    def force(self) -> None:
        """Kill now: every grace period is skipped; a repeated call changes nothing."""
        if self._forced:
            return
        self._forced = True
        if self._began < 0:
            self.interrupt()
        else:
            self._step()
            self._news.set()

    async def stop(self) -> TreeEvidence:
        """End the whole tree and return the proof; a repeated call gives the same answer.

        Where processes had survived, a repeated call looks again.
        """
        self.interrupt()
        assert self._climb is not None
        if self._climb.done() and self._climb.result().outcome == "survivors":
            self._climb = self._loop.create_task(self._prove(), name=f"check {self._name}")
        return await asyncio.shield(self._climb)

    def abandon(self, *, never_asked: bool = False) -> None:
        """Hang up. A supervisor takes that as an order to kill everything, and tells nobody.

        Args:
            never_asked: no supervisor was asked for, so there is nothing whose end is unproven.
        """
        if not self._end:
            self._finish("empty" if never_asked else "lost")

    # -- the ladder ---------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> Alive:
        if self._end:
            return Alive.NOTHING
        if self._ref is None:
            return Alive.REST  # There is nothing yet that could clean up after itself.
        # Between the exit and the word about what it left, nothing is known that would have to be killed.
        return Alive.REST if self._rest_told else Alive.LEADER

    def _step(self) -> None:
        elapsed = self._loop.time() - self._began
        rung = self.ladder.next_rung(elapsed, self._forced, self._alive)
        if rung <= self.rung:
            return
        self.rungs.append((rung, elapsed))
        if not faults.active(FAULT):
            self._send(rung)
        if self._on_rung is not None:
            self._on_rung(self.task, self, rung, elapsed)

    def _send(self, rung: Rung) -> None:
        self.close_input()
        if rung is Rung.CLOSE:
            return
        if rung is Rung.INTERRUPT:
            message: dict[str, Any] = {"op": "signal", "sig": signal.SIGINT, "scope": "group"}
        elif rung is Rung.TERMINATE:
            message = {"op": "signal", "sig": signal.SIGTERM, "scope": "tree", "cont": True}
        else:
            message = {"op": "kill", "deadline_ms": int(self.ladder.confirm_s * 1000 * _DEADLINE_SHARE)}
        send_packet(self._sock, message)

    async def _run_ladder(self) -> TreeEvidence:
        while self.live and self.rung is not Rung.KILL:
            elapsed = self._loop.time() - self._began
            await self._next_news(min(self.ladder.until_next(elapsed) + 0.001, _TICK_S))
            self._step()
            self._look_again()
        return await self._prove()

    def _look_again(self) -> None:
        # What is waited for changes while it is waited for: the screen names it.
        if self.live and self._on_signalled is not None and self._loop.time() > self._looked + _TICK_S:
            self._looked = self._loop.time()
            send_packet(self._sock, {"op": "stats"})

    async def _prove(self) -> TreeEvidence:
        began = self._loop.time()
        deadline = began + self.ladder.confirm_s
        nudges = [(began + _SILENT_S, signal.SIGCONT), (began + 2 * _SILENT_S, signal.SIGKILL)]
        while self.live and self._loop.time() < deadline and not self._roster.survivors:
            await self._next_news(min(deadline - self._loop.time(), 0.1))
            if nudges and self._loop.time() >= nudges[0][0]:
                self._nudge(nudges.pop(0)[1])
        self.output.cut()
        evidence = self._evidence()
        if self.proven and self._roster.killed(self._ref if self._git else None, "git"):
            note = await asyncio.to_thread(drop_stale_lock, self._cwd, self._started_at, time.time())
            evidence = replace(evidence, notes=(note,) if note else ())
        return evidence

    def _nudge(self, number: signal.Signals) -> None:
        """Wake, then replace, a supervisor that does not even acknowledge the kill (a task may stop it).

        When it is dead, the warden ends its tree.
        """
        if self._killing or self._supervisor_fd < 0 or faults.active(FAULT):
            return
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._supervisor_fd, number)

    def _evidence(self) -> TreeEvidence:
        silent = None if self._end else self._supervisor or ProcessRef(0, 0, self._name)
        seconds = self._loop.time() - self._began
        return self._roster.judge(proven=self.proven, silent=silent, rung=self.rung, seconds=seconds)

    # -- what the supervisor says -------------------------------------------------------------------------------

    def _hear(self) -> None:
        messages, gone = read_packets(self._sock)
        for message in messages:
            self._learn(message)
        if gone:
            self._hang_up()
            if not self._end and (self._failure is not None or not self._guarded()):
                self._finish("empty" if self._failure is not None else "lost")
        self._news.set()
        if self._began >= 0:
            self._step()

    def _learn(self, message: dict[str, Any]) -> None:
        ev = message.get("ev")
        if ev == "started":
            self._learn_start(message)
        elif ev == "spawn_failed":
            self._failure = message
        elif ev == "exit":
            self._exit = ExitStatus.from_wait(int(message["status"]))
        elif ev == "orphans":
            self.orphans = int(message["n"])
            self._rest_told = True
            self._know(refs_from_wire(message["sample"]))
        elif ev == "stats":
            self._learn_stats(message)
            if self._began >= 0:
                self._tell_signalled()
        elif ev == "signalled":
            names = tuple(text_from_wire(name) for name in message["names"])
            self.stats = replace(self.stats, processes=int(message["n"]), names=names)
            self._tell_signalled()
        elif ev == "limit":
            self.tell_limit(message["which"], message["value"], message["limit"], message["level"])
        elif ev == "killing":
            self._killing = True
        elif ev == "survivors":
            self._roster.learn_survivors(message["list"])
        elif ev in ("empty", "gone"):
            self._roster.learn_ended(message["killed"])
            self._finish(str(ev))

    def tell_limit(self, which: Any, value: float, limit: float, level: Any) -> None:
        """Report that a limit is near or crossed; a command that nobody listens for is stopped here."""
        report = LimitReport(self.task, self._name, which, value, limit, level)
        if self._on_limit is not None:
            self._on_limit(report)
        elif level != "warn":
            self.interrupt()

    def _tell_signalled(self) -> None:
        if self._on_signalled is not None and self.live:
            self._on_signalled(self)

    def _learn_start(self, message: dict[str, Any]) -> None:
        self._ref = ProcessRef(int(message["pid"]), int(message["start_time"]), self._name)
        self._know((self._ref,))
        self._supervisor = ProcessRef(int(message["sup_pid"]), int(message["sup_start"]), "peri-supervisor")
        with contextlib.suppress(OSError, AttributeError):  # The latter: macOS has none.
            self._supervisor_fd = os.pidfd_open(self._supervisor.pid)
        # The number may have been reused before the line above; then this is not our supervisor.
        if self._supervisor_fd >= 0 and not self._is_alive(self._supervisor):
            self._drop_handle()
        if self.ledger is not None:
            self.ledger.command_started(self)

    def _learn_stats(self, message: dict[str, Any]) -> None:
        self._know(self._roster.name(message["list"]))
        self._stats_count += 1
        names = tuple(dict.fromkeys(text_from_wire(row[2]) for row in message["list"]))
        self.stats = TreeStats(int(message["rss"]), float(message["cpu"]), int(message["nprocs"]), names)

    def learn_sweep(self, message: dict[str, Any]) -> None:
        """Take the warden's report: the supervisor is gone, and the warden ended what it had left, if anything."""
        if not self.hung_up:
            self._hear()  # What the supervisor still said itself is worth more.
        if self._end:
            return
        self._roster.learn_ended(message["killed"])
        self._roster.learn_survivors(message["survivors"])
        if not message["survivors"]:
            self._finish("swept")
        self._news.set()

    def learn_loss(self) -> None:
        """The warden is gone: the supervisor may still answer; if it is gone too, nobody can prove anything."""
        if self._sock.fileno() < 0 and not self._end:
            self._finish("lost")
        elif not self._end:
            self.force()

    @property
    def hung_up(self) -> bool:
        """True when the supervisor's socket is closed."""
        return self._sock.fileno() < 0

    def _know(self, refs: Sequence[ProcessRef]) -> None:
        fresh = self._roster.know(refs)
        if self.ledger is not None:
            self.ledger.processes_seen(self.number, fresh)

    def _finish(self, end: str) -> None:
        self._end = end
        self.orphans = 0
        self.close_input()
        self._hang_up()
        self._drop_handle()
        self._news.set()
        self._on_ended(self)

    def _hang_up(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _drop_handle(self) -> None:
        if self._supervisor_fd >= 0:
            os.close(self._supervisor_fd)
            self._supervisor_fd = -1

    def _spawn_failed(self, number: int, stage: str) -> SpawnFailed:
        reason = f"{os.strerror(number)} ({stage})" if number else f"not started: {stage}"
        what = self._cwd if stage == "chdir" else self._name
        return SpawnFailed(f"{what}: {reason}", errno=number, stage=stage)

    async def _next_news(self, timeout: float | None = None) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()

    async def _until(self, done: Callable[[], bool], timeout: float) -> None:
        deadline = self._loop.time() + timeout
        while not done() and (left := deadline - self._loop.time()) > 0:
            await self._next_news(left)
