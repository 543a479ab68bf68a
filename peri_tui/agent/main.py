"""The agent process: assembled, announced, and ended in an order that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from peri_tui.agent.desk import ControlDesk
from peri_tui.agent.executor import TaskExecutor
from peri_tui.agent.instructions import TrustStore
from peri_tui.agent.presence import ADOPTION_GRACE_S, Presence
from peri_tui.agent.processes.ledger import Ledger, ledger_folder
from peri_tui.agent.processes.spawn import Ladder, Limits, Processes, ProcessRef
from peri_tui.agent.processes.spill import sweep_spill
from peri_tui.agent.processes.sweep import Sweep, describe
from peri_tui.agent.questions import QuestionDesk
from peri_tui.agent.recovery import Recovery
from peri_tui.agent.scheduler.ownership import Liveness, start_time, this_boot
from peri_tui.agent.scheduler.scheduler import Scheduler
from peri_tui.agent.scheduler.store import InstanceRow
from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.agent.server import AgentServer
from peri_tui.config import Paths, Settings, api_key, load_settings
from peri_tui.core.ids import make_ulid
from peri_tui.core.states import StopReason
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log
from peri_tui.net import post_cancel, warm

SHUTDOWN_S: Final = 12.0
RECOVER_S: Final = 120.0
SWEEP_S: Final = 1.0


@dataclass(slots=True)
class Agent:
    """The parts of one agent process."""

    instance: str
    paths: Paths
    log: Log
    store: SqliteStore
    liveness: Liveness
    ledger: Ledger
    processes: Processes
    questions: QuestionDesk
    trust: TrustStore
    recovery: Recovery
    executor: TaskExecutor
    scheduler: Scheduler


async def assemble(paths: Paths, settings: Settings, instance: str, workspace: Path) -> Agent:
    """Build the agent's parts, make it known, and end what dead agents left.

    Raises:
        StoreUnavailable: the state store cannot be opened.
    """
    log = Log(paths.log / "agent.jsonl", paths.trace, instance)
    log.hide(api_key())
    store = SqliteStore(paths.db)
    await store.open()
    liveness = Liveness(paths.data / "instances")
    liveness.hold(instance)
    await store.register(
        InstanceRow(
            instance=instance,
            pid=os.getpid(),
            start_time=start_time(os.getpid()) or 0,
            boot_id=this_boot(),
            workspace=str(workspace),
            socket=str(paths.socket(instance)),
            started=time.time(),
        )
    )
    ledger = open_ledger(
        paths, instance, workspace, trouble=lambda text: log.event("ledger", layer=5, error=text)
    )
    usual, git = usual_ladders(settings)
    processes = Processes(
        ledger=ledger, ladder=usual, git_ladder=git, limits=usual_limits(settings),
        spill=paths.spill, policy="throttle" if settings.output_policy == "throttle" else "discard",
        containment="strict" if settings.containment == "strict" else "plain" if settings.containment == "plain" else "auto",
    )  # fmt: skip
    await asyncio.to_thread(sweep_spill, paths.spill, time.time())
    questions = QuestionDesk()
    trust = TrustStore(paths.data / "trust.json")
    recovery = Recovery(paths, log)
    executor = TaskExecutor(
        paths, settings, log, processes=processes, questions=questions, trust=trust, recovery=recovery
    )
    scheduler = Scheduler(
        store,
        log,
        executor,
        instance=instance,
        concurrency=settings.concurrency,
        liveness=liveness,
        route=nudge,
    )
    await processes.start()
    recovery.notes.extend(processes.notes)
    for note in processes.notes:
        log.event("downgrade", layer=5, note=note)
    scheduler.start()
    await scheduler.recover_dead()
    recovery.notes.extend(await find_left(Sweep(paths, liveness=liveness)))
    return Agent(
        instance,
        paths,
        log,
        store,
        liveness,
        ledger,
        processes,
        questions,
        trust,
        recovery,
        executor,
        scheduler,
    )


def usual_ladders(settings: Settings) -> tuple[Ladder, Ladder]:
    """Return the grace periods that the user set, for all programs and for git."""
    confirm = settings.kill_confirm_s
    return Ladder(settings.interrupt_s, settings.terminate_s, confirm), Ladder(
        settings.git_interrupt_s, 0.0, confirm
    )


def usual_limits(settings: Settings) -> Limits:
    """Return what one task's processes may take."""
    return Limits(
        memory=settings.max_memory_mb << 20,
        processes=settings.max_processes,
        seconds=settings.max_command_s,
        cpu=settings.max_cpu_s,
        output=settings.max_output_mb << 20,
    )


def open_ledger(paths: Paths, instance: str, workspace: Path, *, trouble: Callable[[str], None]) -> Ledger:
    """Begin this agent's ledger of processes; what keeps it from being written is told and stops nothing."""
    me = ProcessRef(os.getpid(), start_time(os.getpid()) or 0, "agent")
    return Ledger(
        ledger_folder(paths),
        instance=instance,
        boot=this_boot(),
        agent=me,
        workspace=str(workspace),
        trouble=trouble,
    )


async def find_left(sweep: Sweep) -> list[str]:
    """Return the note about processes that outlived their agent, none without; forget agents that left nothing.

    The supervisors of an agent that died just now are still ending their trees, so a little is waited for that.
    """
    deadline = time.monotonic() + SWEEP_S
    left = await asyncio.to_thread(sweep.find)
    while any(one.role != "command" for one in left) and time.monotonic() < deadline:
        await asyncio.sleep(SWEEP_S / 20)  # Nothing tells us when somebody else's children end.
        left = await asyncio.to_thread(sweep.find)
    await asyncio.to_thread(sweep.tidy)
    return [describe(left)] if left else []


async def nudge(owner: InstanceRow, task: str) -> None:
    """Tell another living agent that a task of its own is to be stopped; the store already says so."""
    try:
        await asyncio.to_thread(post_cancel, Path(owner.socket), task, timeout=1.0)
    except AgentUnreachable:
        # Its own look at the store, once a second, finds the stop.
        return


async def serve(
    paths: Paths, settings: Settings, instance: str, workspace: Path, *, ready_fd: int, parent_fd: int
) -> int:
    """Run an agent until its client is gone for good or a signal ends it. Returns the exit code."""
    agent = await assemble(paths, settings, instance, workspace)
    done = asyncio.Event()
    ending = _Ending(agent, done)
    presence = Presence(
        gone=lambda: ending.begin(StopReason.DISCONNECT),
        # A service outlives its task, so there is something to adopt: a screen that ends well stops it first.
        busy=lambda: bool(agent.scheduler.running() or agent.executor.jobs.services()),
        changed=lambda orphaned: ending.orphaned(orphaned),
        grace_s=_grace(),
    )
    agent.executor.jobs.on_ended = presence.work_ended
    desk = ControlDesk(
        instance,
        scheduler=agent.scheduler,
        store=agent.store,
        questions=agent.questions,
        presence=presence,
        trust=agent.trust,
        notes=agent.recovery.notes,
        jobs=agent.executor.jobs,
    )
    token = secrets.token_urlsafe(32)
    agent.log.hide(token)
    server = AgentServer(desk, paths.socket(instance), token, trace_dir=paths.trace, log=agent.log)
    _write_private(paths.token(instance), token.encode())
    await server.start()
    ending.announce(workspace, orphaned=False)
    _on_signals(ending)
    if parent_fd >= 0:
        presence.watch_pipe(parent_fd)
    _say_ready(ready_fd, {"ready": True, "pid": os.getpid()})
    # The first model request would otherwise import the HTTP client on the loop, and a stop in that moment would wait.
    warming = asyncio.get_running_loop().run_in_executor(None, warm)
    agent.log.event("agent ready", layer=2, workspace=str(workspace))
    await done.wait()
    await asyncio.wait({warming}, timeout=1.0)
    presence.close()
    await server.close()
    await _dismantle(agent)
    return 0


class _Ending:
    """Ends the agent once: stops every task through the five layers, then lets the main coroutine go on."""

    def __init__(self, agent: Agent, done: asyncio.Event) -> None:
        self._agent = agent
        self._done = done
        self._begun: asyncio.Task[None] | None = None
        self._workspace = Path()

    def begin(self, reason: StopReason) -> None:
        """Start the end, or force it when it was started before."""
        mode = "graceful" if self._begun is None else "force"
        task = asyncio.create_task(self._stop(reason, mode))
        self._begun = self._begun or task
        # Kept alive by the event loop only weakly, so by us.
        self._keep = task

    async def _stop(self, reason: StopReason, mode: str) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await self._agent.scheduler.stop_all(reason, mode=mode, source=reason.value)
                await self._agent.scheduler.idle(SHUTDOWN_S)
        except TimeoutError:
            self._agent.log.event("shutdown timed out", layer=3)
        self._done.set()

    def orphaned(self, orphaned: bool) -> None:
        self.announce(self._workspace, orphaned=orphaned)
        self._keep_orphaned = asyncio.create_task(
            self._agent.store.set_orphaned(self._agent.instance, orphaned)
        )
        self._agent.log.event("client gone" if orphaned else "client came", layer=2)

    def announce(self, workspace: Path, *, orphaned: bool) -> None:
        """Write the file by which clients find this agent."""
        self._workspace = workspace
        facts: dict[str, Any] = {
            "instance": self._agent.instance,
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "workspace": str(workspace),
            "orphaned": orphaned,
            "started": time.time(),
        }
        _write_private(self._agent.paths.runtime / f"{self._agent.instance}.json", msgspec.json.encode(facts))


async def _dismantle(agent: Agent) -> None:
    await agent.scheduler.close(1.0)
    await agent.processes.close()
    await agent.executor.jobs.close()
    agent.ledger.close()
    await agent.store.unregister(agent.instance)
    await agent.store.close()
    agent.liveness.release(agent.instance)
    for path in (agent.paths.token(agent.instance), agent.paths.runtime / f"{agent.instance}.json"):
        path.unlink(missing_ok=True)


async def recover_once(paths: Paths) -> int:
    """Do what every start does: end and roll back the tasks of dead agents; print what was done."""
    settings = load_settings(paths)
    agent = await assemble(paths, settings, make_ulid(int(time.time() * 1000), os.urandom(10)), Path.cwd())
    await agent.scheduler.idle(RECOVER_S)
    await _dismantle(agent)
    for note in agent.recovery.notes:
        sys.stdout.write(note + "\n")
    if not agent.recovery.notes:
        sys.stdout.write("nothing to recover\n")
    return 0


def _on_signals(ending: _Ending) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ending.begin, StopReason.SHUTDOWN)


def _grace() -> float:
    # A test need not wait half a minute to see that the grace ends.
    return float(os.environ.get("PERI_ADOPTION_GRACE", ADOPTION_GRACE_S))


def _write_private(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def _say_ready(fd: int, facts: dict[str, Any]) -> None:
    if fd >= 0:
        os.write(fd, msgspec.json.encode(facts) + b"\n")
        os.close(fd)


def say_failed(fd: int, message: str, exit_code: int) -> None:
    """Tell the launcher why this agent cannot start."""
    _say_ready(fd, {"error": message, "exit": exit_code})


__all__: Sequence[str] = ("Agent", "assemble", "recover_once", "say_failed", "serve")
