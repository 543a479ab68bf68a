"""The processes of the agent: everything that is started goes through here, and everything can be ended from here.

``Processes`` is the one registry. A command runs below a supervisor (see ``warden``), which is the only one that can
say that a tree is empty; what it says is looked up again in ``/proc`` before it counts (see ``command``).

Built for Linux. macOS has no subreaper, so what is said there is never a proof (outcome ``best_effort``, see
``darwin``; it has not been run on macOS); elsewhere ``start`` refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from peri_tui.agent.processes.child_env import child_env
from peri_tui.agent.processes.command import Command, OnLimit, OnRung
from peri_tui.agent.processes.evidence import (
    ExitStatus,
    ProcessRef,
    Survivor,
    TreeEvidence,
    TreeStats,
)
from peri_tui.agent.processes.guard import WARN_SHARE, Level, LimitReport, Limits, Which, default_memory
from peri_tui.agent.processes.ladder import GIT, Ladder, Rung, is_git
from peri_tui.agent.processes.ledger import Ledger
from peri_tui.agent.processes.link import request_file
from peri_tui.agent.processes.output import OnFresh, Output, Policy
from peri_tui.agent.processes.platforms import Link, Platform, find_platform
from peri_tui.agent.processes.signal_report import SignalReport
from peri_tui.agent.processes.spill import Spill, SpillWriter, spill_path
from peri_tui.agent.scheduler.ownership import start_time
from peri_tui.errors import ProcessError, SpawnFailed, WardenLost

__all__ = [
    "Command",
    "ExitStatus",
    "Forced",
    "Ladder",
    "LimitReport",
    "Limits",
    "ProcessRef",
    "Processes",
    "Rung",
    "SignalReport",
    "Survivor",
    "TreeEvidence",
    "TreeStats",
    "child_env",
]

Forced = asyncio.Event | Callable[[], bool]
Containment = Literal["auto", "plain", "strict"]
PIPE: Final = -1
DEFAULT_LIMITS: Final = Limits(processes=512, seconds=1800.0, output=10 << 30)
_FORCED_POLL_S = 0.05
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Order:
    """What ``spawn`` was asked for."""

    task: str
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    stdin: int | None
    on_output: OnFresh | None
    ladder: Ladder
    limits: Limits
    terminal: tuple[int, int] | None
    spill: str | None


OnSignalled = Callable[[SignalReport], None]


class Processes:
    """All commands of all tasks of one agent. One event loop, not thread-safe.

    Args:
        ladder: the grace periods of a stop; ``git_ladder`` those of git, which must not be killed early.
        on_warden_lost: called when the warden died; its commands are being killed by then.
        on_rung: called with task, command, rung and seconds since the stop, each time a signal is sent.
        on_limit: called when a task comes near a limit or crosses it; without it, the command is stopped.
        on_signalled: called while a stop waits: after each signal, and then twice a second.
        spill: the folder of files with long output; without it none are written.
        policy: see ``Output``.
        containment: ``auto`` uses a delegated cgroup where there is one, ``plain`` does not; ``strict`` asks for
            namespaces of their own. What cannot be had is in ``notes``, once.
        limits: what one task may take; ``memory`` 0 there means the usual share of this machine.
        ledger: written to, so that a later agent finds what a crash left.
        platform: the system's back end, this system's if None.
    """

    def __init__(
        self,
        *,
        ladder: Ladder | None = None,
        git_ladder: Ladder = GIT,
        on_warden_lost: Callable[[], None] | None = None,
        on_rung: OnRung | None = None,
        on_limit: OnLimit | None = None,
        on_signalled: OnSignalled | None = None,
        limits: Limits = DEFAULT_LIMITS,
        ledger: Ledger | None = None,
        spill: Path | None = None,
        policy: Policy = "discard",
        containment: Containment = "auto",
        platform: Platform | None = None,
    ) -> None:
        self._platform = platform or find_platform(sys.platform)
        self._ladder = ladder or Ladder()
        self._git_ladder = git_ladder
        self._ledger = ledger
        self._on_warden_lost = on_warden_lost
        self._on_rung = on_rung
        self._on_limit = on_limit
        self._on_signalled = on_signalled
        self._limits = limits
        self._spill = spill
        self._policy: Policy = policy
        self._writer = SpillWriter()
        self._containment: Containment = containment
        self.notes: list[str] = []
        self._told: set[tuple[str, Which, Level]] = set()
        self._signalled: dict[str, tuple[Rung, int]] = {}
        self._link: Link | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._by_number: dict[int, Command] = {}
        # Not live any more, but a stop of their task must still account for them.
        self._owed: list[Command] = []
        self._stopped: dict[str, list[Command]] = {}
        self._closed = False

    @property
    def warden_pid(self) -> int | None:
        """The warden's process id while it runs; None where the platform has no warden."""
        return (self._link.pid or None) if self._link is not None and self._link.alive else None

    def listen(self, *, on_limit: OnLimit | None = None, on_signalled: OnSignalled | None = None) -> None:
        """Set who is told of limits and of signals."""
        self._on_limit = on_limit or self._on_limit
        self._on_signalled = on_signalled or self._on_signalled

    async def start(self) -> None:
        """Start the warden, if none runs.

        Raises:
            ProcessError: this system is not supported.
            WardenLost: it does not come up.
        """
        async with self._starting:
            if self._closed:
                raise ProcessError("the agent is ending, nothing is started any more")
            if self._link is None or not self._link.alive:
                await self._launch()

    async def _launch(self) -> None:
        try:
            words = {"auto": ("cgroup",), "plain": (), "strict": ("strict",)}[self._containment]
            link = self._platform.launch(self._learn_sweep, self._learn_loss, words)
        except OSError as error:
            raise WardenLost(f"the warden cannot be started: {error.strerror}", errno=error.errno) from None
        self._link = link
        try:
            await link.ready()
        except WardenLost:
            await link.close(0)
            raise
        self._say_downgrades(link.facts)
        if self._ledger is not None and link.pid:
            self._ledger.warden_started(ProcessRef(link.pid, start_time(link.pid) or 0, "peri-warden"))

    @property
    def containment(self) -> str:
        """How commands are held now: ``strict``, ``cgroup`` or ``plain``; empty before ``start``."""
        facts = self._link.facts if self._link is not None else {}
        return (
            "strict" if facts.get("strict") else "cgroup" if facts.get("cgroup") else "plain" if facts else ""
        )

    def _say_downgrades(self, facts: Mapping[str, Any]) -> None:
        said = list(self._platform.notes)
        if facts.get("refused"):
            said.append(
                f"strict containment is not possible here ({facts['refused']}): the usual one is used"
            )
        if facts.get("scan"):
            said.append("this kernel lists no children: processes are found by reading all of /proc")
        self.notes += [note for note in said if note not in self.notes]

    async def spawn(
        self,
        task: str,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: int | None = None,
        on_output: OnFresh | None = None,
        ladder: Ladder | None = None,
        limits: Limits | None = None,
        terminal: tuple[int, int] | None = None,
        spill: str | None = None,
    ) -> Command:
        """Start a command and return it once it runs.

        Args:
            task: whose it is; a task that was stopped can start nothing more.
            argv: the command; the first word is looked up in the ``PATH`` of ``env``.
            cwd: its folder.
            env: its whole environment (see ``child_env``).
            stdin: a descriptor for its input, still the caller's afterwards; ``/dev/null`` if None; ``PIPE`` for a
                pipe that is written with ``Command.send_input`` and closed by the first rung of a stop.
            on_output: gets fresh output (see ``Output``).
            ladder: other grace periods than the usual ones of the program.
            limits: other limits than the usual ones.
            terminal: columns and lines of a terminal of its own, as its input, output and errors; without one
                nothing can ask for a password and wait.
            spill: name of the file that keeps output which is too long for memory (see ``Output.spill``).

        Raises:
            SpawnFailed: it cannot be started, or the task was stopped; names errno and stage.
            WardenLost: the warden does not run and cannot be started.
        """
        await self.start()
        if task in self._stopped:
            raise SpawnFailed(
                f"task {task} was stopped, nothing more is started for it", errno=0, stage="stopped"
            )
        assert self._link is not None
        ladder = ladder or (self._git_ladder if is_git(argv) else self._ladder)
        order = _Order(
            task, argv, cwd, env, stdin, on_output, ladder, limits or self._usual_limits(), terminal, spill
        )
        command = await self._request(order)
        try:
            await command.started()
        except BaseException as error:
            # Nobody will hold this command, so nobody could stop it.
            command.output.cut()
            if not isinstance(error, SpawnFailed):
                command.force()
            raise
        return command

    def interrupt(self, task: str) -> None:
        """Stop a task's commands: the first rung is sent before this returns. Never waits; may be repeated."""
        commands = self._stopped.setdefault(task, [])
        owed = [command for command in self._owed if command.task == task]
        for command in (*self._live(task), *owed):
            if command not in commands:
                commands.append(command)
            command.interrupt()

    def force(self, task: str) -> None:
        """Kill a task's commands now. Never waits; may be repeated."""
        for command in self._live(task):
            command.force()
        self.interrupt(task)

    async def stop(self, task: str, *, forced: Forced | None = None) -> TreeEvidence:
        """End all processes of a task and return the proof; a repeated call gives the same answer.

        Where processes had survived, a repeated call looks again. Nothing can be started for the task afterwards.

        Args:
            task: the task; one without commands is ``empty``.
            forced: when it is set (or returns true), grace periods are skipped from then on.
        """
        self.interrupt(task)
        async with self._watch(task, forced):
            parts = await asyncio.gather(*(command.stop() for command in self._stopped[task]))
        return TreeEvidence.merge(parts)

    def move(self, command: Command, task: str) -> bool:
        """Give a running command to another task; False when it is over, or a stop of its task has begun."""
        if not command.live or command.rungs or command.task in self._stopped:
            return False
        command.task = task
        command.limit(replace(command.limits, seconds=0.0))  # What the user lets stay has no end of its time.
        if self._ledger is not None:
            self._ledger.command_moved(command.number, task)
        return True

    def stats(self, task: str) -> TreeStats:
        """Return what a task's trees used when they were last sampled."""
        return TreeStats.total(command.stats for command in self._live(task))

    async def sample(self, task: str) -> TreeStats:
        """Return what a task's trees use now (within 1 s). Their sum is held against the limits, too."""
        total = TreeStats.total(await asyncio.gather(*(command.sample() for command in self._live(task))))
        self._check_total(task, total)
        return total

    def list_refs(self, task: str) -> tuple[ProcessRef, ...]:
        """Return the processes of a task that are known (commands, orphans, last sample)."""
        return tuple(ref for command in self._live(task) for ref in command.refs)

    def forget(self, task: str) -> None:
        """Drop what is kept to answer a repeated ``stop`` of a task that has ended."""
        self._signalled.pop(task, None)
        self._told = {one for one in self._told if one[0] != task}
        if not self._live(task):
            self._stopped.pop(task, None)
            self._owed = [command for command in self._owed if command.task != task]

    async def close(self) -> TreeEvidence:
        """Kill everything, end the warden, and say what is proven. Nothing can be started afterwards."""
        self._closed = True
        commands = list(self._by_number.values())
        for command in commands:
            command.force()
        parts = await asyncio.gather(*(command.stop() for command in commands))
        for command in commands:
            command.abandon()
        async with self._starting:
            link, self._link = self._link, None
        if link is not None and link.alive:
            await link.close(_CLOSE_S)
        await asyncio.to_thread(self._writer.close)
        return TreeEvidence.merge(parts)

    def _live(self, task: str) -> list[Command]:
        return [command for command in self._by_number.values() if command.task == task]

    async def _request(self, order: _Order) -> Command:
        link = self._link
        assert link is not None
        number = next(self._numbers)
        with contextlib.ExitStack() as stack, _naming_what_ran_out(order.argv):
            request = _opened(stack, _checked_request(order, self._platform))
            ours, theirs = self._platform.packet_pair()
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(ours.close)
            stack.enter_context(theirs)
            output = self._open_output(order, number)
            undo.callback(output.cut)
            source, ours_in = (output.writing_fd, -1) if order.terminal else _input(stack, order.stdin)
            command = Command(
                order.task, number, order.argv, order.cwd, ours, output, ladder=order.ladder, on_rung=self._on_rung,
                on_ended=self._drop, guarded=lambda: link.guards, on_limit=self._heed_limit,
                on_signalled=self._tell_signalled, limits=order.limits, stdin_fd=ours_in,
                alive=self._platform.is_alive,
            )  # fmt: skip
            output.on_limit = functools.partial(command.tell_limit, "output")
            command.ledger = self._ledger
            undo.callback(command.abandon, never_asked=True)
            # Known before it is asked for: a stop in between finds it, and its order waits in the socket.
            self._by_number[number] = command
            written = output.writing_fd
            await link.request(number, [theirs.fileno(), request, source, written, written])
            undo.pop_all()
        output.hand_over()
        return command

    def _open_output(self, order: _Order, number: int) -> Output:
        spill = None
        if self._spill is not None and order.spill is not None:
            spill = Spill(spill_path(self._spill, order.task, order.spill, number), self._writer)
        return Output(
            order.on_output, limit_bytes=order.limits.output, spill=spill, policy=self._policy,
            terminal=order.terminal,
        )  # fmt: skip

    # -- limits -------------------------------------------------------------------------------------------------

    def _usual_limits(self) -> Limits:
        return self._limits if self._limits.memory else replace(self._limits, memory=default_memory())

    def _check_total(self, task: str, total: TreeStats) -> None:
        live = self._live(task)
        if len(live) < 2:
            return  # The supervisor looks closer.
        for which, value in (("memory", total.rss_bytes), ("processes", total.processes)):
            limit = max(getattr(command.limits, which) for command in live)
            if limit and value >= WARN_SHARE * limit:
                level: Level = "limit" if value >= limit else "warn"
                names = " + ".join(command.name for command in live)[:200]
                self._heed_limit(LimitReport(task, names, which, value, limit, level))  # type: ignore[arg-type]

    def _heed_limit(self, report: LimitReport) -> None:
        """Tell it once a task and level; without a listener the task's commands are stopped."""
        key = (report.task, report.which, report.level)
        if key in self._told or (report.task in self._stopped and report.level == "warn"):
            return
        self._told.add(key)
        if self._on_limit is not None:
            self._on_limit(report)
        elif report.level != "warn":
            for command in self._live(report.task):
                command.interrupt()

    def _tell_signalled(self, command: Command) -> None:
        """Sum up what a stop of a task waits for; several commands may stand on different rungs."""
        if self._on_signalled is None:
            return
        task = command.task
        live = [one for one in self._live(task) if one.rung]
        total = TreeStats.total(one.stats for one in live)
        rung = max((one.rung for one in live), default=Rung.NONE)
        due = [one.next_rung for one in live]
        next_rung, next_s = min(
            (one for one in due if one[0]), key=lambda one: one[1], default=(Rung.NONE, 0.0)
        )
        fresh = self._signalled.get(task, (Rung.NONE, -1))[0] is not rung
        self._signalled[task] = (rung, total.processes)
        self._on_signalled(
            SignalReport(task, rung, total.processes, total.names, next_rung, round(next_s, 1), fresh)
        )

    @contextlib.asynccontextmanager
    async def _watch(self, task: str, forced: Forced | None) -> AsyncIterator[None]:
        watcher = asyncio.ensure_future(self._force_when(task, forced)) if forced is not None else None
        try:
            yield
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _force_when(self, task: str, forced: Forced) -> None:
        if isinstance(forced, asyncio.Event):
            await forced.wait()
        else:
            while not forced():  # noqa: ASYNC110  a plain function cannot tell when it changes
                await asyncio.sleep(_FORCED_POLL_S)
        self.force(task)

    def _drop(self, command: Command) -> None:
        self._by_number.pop(command.number, None)
        # Nobody could prove its end, or it is said to be over and yet one that was named lives.
        alive = any(self._platform.is_alive(ref) for ref in command.refs)
        if alive or not command.proven:
            self._owed.append(command)
        if not alive and command.accounted and self._ledger is not None:
            self._ledger.command_ended(command.number)

    def _learn_sweep(self, message: dict[str, Any]) -> None:
        command = self._by_number.get(int(message["id"]))
        if command is not None:
            command.learn_sweep(message)

    def _learn_loss(self, _link: Link) -> None:
        for command in list(self._by_number.values()):
            command.learn_loss()
            if command not in self._owed:
                self._owed.append(command)
        if self._on_warden_lost is not None:
            self._on_warden_lost()


@contextlib.contextmanager
def _naming_what_ran_out(argv: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{' '.join(argv)[:200]}: {error.strerror} (descriptors)"
        raise SpawnFailed(what, errno=error.errno, stage="descriptors") from None


def _opened(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _input(stack: contextlib.ExitStack, stdin: int | None) -> tuple[int, int]:
    """Return the descriptor that the command reads from, and our end of a pipe to it (-1 without)."""
    if stdin is None:
        return _opened(stack, os.open(os.devnull, os.O_RDONLY)), -1
    if stdin != PIPE:
        return stdin, -1
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return _opened(stack, reading), writing


def _checked_request(order: _Order, platform: Platform) -> int:
    argv, cwd, env = order.argv, order.cwd, order.env
    words = [*argv, cwd, *env, *env.values()]
    if not argv or any("\0" in word for word in words) or any("=" in name for name in env):
        raise SpawnFailed(
            f"{list(argv)[:1]}: empty command, or a NUL or '=' where none may be", errno=22, stage="request"
        )
    return request_file(
        argv, cwd, env, new_file=platform.new_file, limits=order.limits.wire, terminal=order.terminal is not None
    )  # fmt: skip
