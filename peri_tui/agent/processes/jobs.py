"""Background jobs: commands that run on while their task goes on, and services, which outlive it.

A job is an ordinary command of its task, so a stop of the task (or its end) ends it like any other. The user may
promote it: then it belongs to the pseudo task ``service:<job>``, which no stop of a task touches, until the user ends
it or the agent ends. Nothing is ever promoted by a model.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from peri_tui.agent.processes.command import Command
from peri_tui.agent.processes.evidence import TreeEvidence, TreeStats
from peri_tui.agent.processes.spawn import Processes
from peri_tui.core.messages import JobChanged, JobInfo, TaskEvent, scrub
from peri_tui.errors import ProcessError

SERVICE: Final = "service:"
SAMPLE_S: Final = 1.0
MAX_JOBS: Final = 32
KEPT_ENDED: Final = 64
_SHOWN_RSS: Final = 1 << 20
_SHOWN_CPU: Final = 0.5

Emit = Callable[[TaskEvent], object]


@dataclass(slots=True, eq=False)
class Job:
    """One background command. ``task`` is the one that started it, also after it became a service."""

    id: str
    task: str
    text: str
    command: Command
    tmp: Path
    emit: Emit
    started: float = field(default_factory=time.time)
    service: bool = False
    watcher: asyncio.Task[None] | None = None
    told: JobChanged | None = None

    @property
    def live(self) -> bool:
        """True while anything of it runs."""
        return self.command.live

    @property
    def state(self) -> str:
        """running, exited (its command ended, others of its processes run), or ended."""
        if not self.live:
            return "ended"
        return "running" if self.command.exit_status is None else "exited"

    @property
    def how(self) -> str:
        """How the command ended, "" while it runs."""
        status = self.command.exit_status
        if status is None:
            return "" if self.live else "ended"
        return f"exit {status.code}" if status.code is not None else f"signal {status.signal}"

    def event(self, stats: TreeStats) -> JobChanged:
        """Return what there is to tell of it now."""
        return JobChanged(
            task=self.task, job=self.id, state=self.state, pid=self.command.ref.pid, command=self.text,
            cpu=round(stats.cpu_seconds, 2), rss=stats.rss_bytes, processes=stats.processes, service=self.service,
            how=self.how,
        )  # fmt: skip

    def describe(self) -> str:
        """Return it in one line."""
        return f"{self.id}: pid {self.command.ref.pid} {self.text}"[:200]


class Jobs:
    """All jobs of one agent. One event loop, not thread-safe.

    Args:
        processes: starts and ends them.
        tmp: the folder of their temporary folders: a job's must not go with its task's.

    ``on_ended`` is called when nothing of a job is left.
    """

    def __init__(self, processes: Processes, tmp: Path) -> None:
        self._processes = processes
        self._tmp = tmp
        self._numbers = itertools.count(1)
        self._jobs: dict[str, Job] = {}
        self.on_ended: Callable[[], None] = lambda: None

    async def start(
        self, task: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], text: str, emit: Emit
    ) -> Job:
        """Start a job and return at once.

        Args:
            task: whose it is.
            argv, cwd, env: as for ``Processes.spawn``; ``TMPDIR`` is set here.
            text: the command as it is shown.
            emit: takes the task's events.

        Raises:
            ProcessError: it cannot be started, or the task has too many.
        """
        if sum(job.live for job in self.of(task)) >= MAX_JOBS:
            raise ProcessError(f"{MAX_JOBS} background jobs of this task run already; stop one first")
        name = f"j{next(self._numbers)}"
        folder = self._tmp / f"{task}-{name}"
        await asyncio.to_thread(folder.mkdir, 0o700, True, True)
        try:
            command = await self._processes.spawn(
                task, argv, cwd=cwd, env=dict(env) | {"TMPDIR": str(folder)}
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # It ends with its task, not by a clock of its own.
        command.limit(replace(command.limits, seconds=0.0))
        job = Job(name, task, scrub(" ".join(text.split()))[:200], command, folder, emit)
        self._jobs[name] = job
        self._tell(job)
        job.watcher = asyncio.create_task(self._watch(job), name=f"job {name}")
        return job

    def of(self, task: str) -> list[Job]:
        """Return a task's jobs, services that it started and ended ones included, oldest first."""
        return [job for job in self._jobs.values() if job.task == task]

    def find(self, task: str, name: str) -> Job:
        """Return a job of a task. Raises ProcessError: there is none of that name; names those that are."""
        job = self._jobs.get(name)
        if job is None or (task and job.task != task):
            known = ", ".join(one.id for one in (self.of(task) if task else self._jobs.values())) or "none"
            raise ProcessError(f"unknown job {name[:40]!r}; known: {known}")
        return job

    def services(self) -> list[Job]:
        """Return the services that run."""
        return [job for job in self._jobs.values() if job.service and job.live]

    def kept(self, task: str) -> list[str]:
        """Return the services that a task leaves running, in words."""
        return [job.describe() for job in self.services() if job.task == task]

    def promote(self, job: Job) -> None:
        """Make a running job a service.

        Raises:
            ProcessError: it is over, or being stopped.
        """
        if job.service:
            return
        if not job.live or not self._processes.move(job.command, SERVICE + job.id):
            raise ProcessError(f"job {job.id} is over or being stopped: it cannot become a service")
        job.service = True
        self._tell(job)

    async def stop(self, job: Job) -> TreeEvidence:
        """End a job or a service, and return the proof; a repeated call gives the same answer."""
        evidence = await job.command.stop()
        self._tell(job)
        return evidence

    async def list(self) -> list[JobInfo]:
        """Return every job that runs and the last that ended, with what they take now, oldest first."""
        jobs = list(self._jobs.values())
        stats = await asyncio.gather(*(job.command.sample() for job in jobs))
        return [_info(job.event(one), job) for job, one in zip(jobs, stats, strict=True)]

    async def close(self) -> None:
        """Wait for the watchers of jobs that have ended; called when the processes are closed."""
        watchers = [job.watcher for job in self._jobs.values() if job.watcher is not None]
        for job in self._jobs.values():
            if job.live and job.watcher is not None:
                job.watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    # --- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self, job: Job) -> None:
        """Tell of changes until nothing of the job is left."""
        try:
            while job.live:
                exited = asyncio.ensure_future(job.command.wait())
                await asyncio.wait({exited}, timeout=SAMPLE_S)
                exited.cancel()
                if exited.done() and job.live:
                    # Nothing tells when the rest of the tree ends.
                    await asyncio.sleep(SAMPLE_S / 4)
                self._tell(job, await job.command.sample())
        finally:
            job.command.output.cut()
            shutil.rmtree(job.tmp, ignore_errors=True)
        self._forget_old()
        self.on_ended()

    def _tell(self, job: Job, stats: TreeStats | None = None) -> None:
        event = job.event(stats if stats is not None else job.command.stats)
        if job.told is None or _is_news(job.told, event):
            job.told = event
            job.emit(event)

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if not job.live]
        for job in ended[:-KEPT_ENDED]:
            self._jobs.pop(job.id, None)


def _is_news(before: JobChanged, now: JobChanged) -> bool:
    if (before.state, before.service, before.how) != (now.state, now.service, now.how):
        return True
    # Each event is stored: numbers that hardly changed are not worth one.
    return abs(now.rss - before.rss) >= _SHOWN_RSS or now.cpu - before.cpu >= _SHOWN_CPU


def _info(event: JobChanged, job: Job) -> JobInfo:
    return JobInfo(
        job=event.job, task=event.task, state=event.state, pid=event.pid, command=event.command, cpu=event.cpu,
        rss=event.rss, processes=event.processes, service=event.service, how=event.how, started=job.started,
    )  # fmt: skip


class TaskJobs:
    """One task's view of the jobs: what its tools may use.

    Args:
        jobs: the agent's.
        task: whose.
        emit: takes the task's events.
    """

    def __init__(self, jobs: Jobs, task: str, emit: Emit) -> None:
        self._jobs = jobs
        self._task = task
        self._emit = emit

    async def start(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], text: str) -> Job:
        """Start a job; see ``Jobs.start``."""
        return await self._jobs.start(self._task, argv, cwd=cwd, env=env, text=text, emit=self._emit)

    def find(self, name: str) -> Job:
        """Return a job of this task. Raises ProcessError."""
        return self._jobs.find(self._task, name)

    async def stop(self, job: Job) -> TreeEvidence:
        """End a job of this task. Raises ProcessError: it is a service by now, which only the user ends."""
        if job.service:
            raise ProcessError(f"job {job.id} is a service now: only the user ends it")
        return await self._jobs.stop(job)
