"""Everything one task holds that has to be let go of: model, processes, files, thread, cleanups.

The rig is opened before the task's body exists and outlives it, so that a stop finds all of it whatever the body did.
``interrupt`` and ``force`` are the token's listeners: synchronous, at once, on the event loop.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from peri_tui.agent.cancel import CancelCause
from peri_tui.agent.history import History
from peri_tui.agent.models.call import Model
from peri_tui.agent.processes.spawn import Processes, TreeEvidence, TreeStats
from peri_tui.agent.questions import QuestionDesk
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.cleanup import Cleanups
from peri_tui.agent.rollback.diff import Change
from peri_tui.agent.rollback.restore import RollbackEvidence
from peri_tui.agent.rollback.transaction import Transaction
from peri_tui.agent.scheduler.run import Run
from peri_tui.config import Paths
from peri_tui.core import faults
from peri_tui.core.messages import Files, Progressed, TaskEvent, Usage
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import WorkspaceBusy

CLEANUP_S: Final = 2.0
_SHOW_EVERY_S: Final = 0.1
_BUSY_POLL_S: Final = 0.1

P = ParamSpec("P")
R = TypeVar("R")
Trace = Callable[..., None]


@dataclass(slots=True)
class Settled:
    """What became of a task's files; ``residue`` names each that is not as it should be."""

    files: Files
    residue: list[str] = field(default_factory=list)


class TaskRig:
    """One task's resources.

    Args:
        run: the task as the scheduler has it.
        paths: where Peri keeps things.
        processes: the agent's registry of processes.
        questions: the desk of open questions.
        trace: appends a trace record of this task and shows it.
        log: appends a log event of this task.
    """

    def __init__(
        self,
        run: Run,
        *,
        paths: Paths,
        processes: Processes,
        questions: QuestionDesk,
        trace: Trace,
        log: Callable[..., None],
    ) -> None:
        self.run = run
        self.task = run.task
        self.workspace = Path(run.row.workspace)
        self.history = History(run.history or ())
        self.loop = asyncio.get_running_loop()
        self.body: asyncio.Task[Any] | None = None
        self.model: Model | None = None
        self.patient: PatientFiles | None = None
        self.processes = processes
        self.cleanups = Cleanups()
        self.log = log
        self.trace = trace
        self.over_limit = ""
        self.tmp = paths.runtime / "tmp" / run.task
        self._questions = questions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"files-{run.task[-6:]}")
        self.root = Root(self.workspace)
        self.files = Transaction.open(paths, self.workspace, run.task, policy=run.submit.on_stop)
        self._settling: asyncio.Task[Settled] | None = None
        self._last: Progressed | None = None
        self._life = time.monotonic()
        self._shown = 0.0
        self._register_cleanups()

    def _register_cleanups(self) -> None:
        self.cleanups.register("files thread", self._end_thread, CLEANUP_S)
        self.cleanups.register("workspace descriptor", self._close_root, CLEANUP_S)
        self.cleanups.register("temporary folder", self._remove_tmp, CLEANUP_S)
        self.cleanups.register("model client", self._close_model, CLEANUP_S)
        if faults.active("rollback.hang_cleanup"):
            self.cleanups.register("injected fault", partial(asyncio.sleep, 3600.0), 0.5)

    # --- the hot path -----------------------------------------------------------------------------------------------

    def interrupt(self, cause: CancelCause) -> None:
        """Let go of everything at once: hang up, send the first signal, close the questions; then write it down."""
        shut = self.model.shut() if self.model is not None else []
        hung_up = time.monotonic_ns()
        self.processes.interrupt(self.task)
        signalled = time.monotonic_ns()
        self._questions.cancel(self.task)
        self.trace(Layer.MODEL, Ev.SOCKET_SHUTDOWN, mono=hung_up, sockets=[str(one) for one in shut])
        self.trace(Layer.ROLLBACK, Ev.TREE_SIGNALLED, mono=signalled, signal="SIGINT")
        self.log("model interrupted", layer=4, sockets=len(shut))

    def force(self) -> None:
        """Skip what is left of every grace period."""
        self.processes.force(self.task)
        self.trace(Layer.ROLLBACK, Ev.TREE_SIGNALLED, signal="SIGKILL")

    # --- files ------------------------------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run file work in the task's one thread, to its end even when the awaiter is cancelled.

        A write that was begun is finished or journaled as unfinished; the cancel is raised after it.
        """
        future = self.loop.run_in_executor(self._thread, partial(work, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def close_gate(self) -> None:
        """Refuse every further edit of this task."""
        self.files.close_gate()

    async def settle_files(self, *, restore: bool, progress: Callable[[int, int], None]) -> Settled:
        """Put the files back, or keep them, and tell what became of each; a repeated call awaits the first one.

        Raises:
            RollbackError: layer 5 cannot even begin.
        """
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle(restore, progress))
        return await asyncio.shield(self._settling)

    async def _settle(self, restore: bool, progress: Callable[[int, int], None]) -> Settled:
        if restore:
            return settle(await self.in_thread(self.files.rollback, progress))
        kept = self.kept_files()
        await self.in_thread(self.files.keep)
        return Settled(kept)

    def kept_files(self) -> Files:
        """Return what the task changed, as files that stay."""
        by_commands = [change.path for change in self.files.changed_by_commands()]
        return Files(kept=sorted({*self.files.touched(), *by_commands}))

    def show_progress(self, done: int, total: int) -> None:
        """Show how far the restore is, at most ten times a second."""
        now = time.monotonic()
        if done == total or now - self._shown >= _SHOW_EVERY_S:
            self._shown = now
            self.trace(Layer.ROLLBACK, Ev.FILE, done=done, total=total)

    # --- signs of life ----------------------------------------------------------------------------------------------

    def emit(self, event: TaskEvent) -> bool:
        """Take an event of the body, and remember what it says of the task's progress."""
        self._life = time.monotonic()
        if isinstance(event, Progressed):
            self._last = event
        return self.run.emit(event)

    def progress(self, stats: TreeStats) -> Progressed:
        """Return what the task does now, with what its processes take."""
        last = self._last or Progressed(task=self.task, step=0, doing="starting")
        life = max(self._life, self.model.last_life if self.model else 0.0)
        return msgspec.structs.replace(
            last,
            seq=0,
            ts=0.0,
            cpu=stats.cpu_seconds,
            rss=stats.rss_bytes,
            processes=stats.processes,
            alive_ms=int((time.monotonic() - life) * 1000),
        )

    def usage(self) -> Usage:
        """Return the task's tokens so far."""
        return self.model.usage() if self.model else Usage()

    # --- processes --------------------------------------------------------------------------------------------------

    async def stop_processes(self) -> TreeEvidence:
        """End every process of the task and return the proof."""
        return await self.processes.stop(self.task)

    # --- cleanups ---------------------------------------------------------------------------------------------------

    def make_tmp(self) -> None:
        """Make the task's own temporary folder."""
        self.tmp.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def _close_model(self) -> None:
        if self.model is not None:
            await self.model.aclose()

    async def _remove_tmp(self) -> None:
        await self.loop.run_in_executor(None, partial(shutil.rmtree, self.tmp, ignore_errors=True))

    async def _close_root(self) -> None:
        self.root.close()

    async def _end_thread(self) -> None:
        self._thread.shutdown(wait=False)


class PatientFiles:
    """The task's files as its tools see them: an edit waits a while for another Peri's task in the folder.

    Args:
        files: the task's transaction.
        wait_s: seconds after which a busy workspace is an error.
    """

    def __init__(self, files: Transaction, wait_s: float) -> None:
        self._files = files
        self._wait_s = wait_s
        self._waiting = self._given_up = False
        self.window_open = files.window_open
        self.window_close = files.window_close

    def edit(self, path: str, data: bytes | None, expected_sha: str | None) -> Change:
        """Change one file; see ``Transaction.edit``. Blocks in the files' thread, a closed gate ends the wait."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                change = self._files.edit(path, data, expected_sha=expected_sha)
                self._waiting = False
                return change
            except WorkspaceBusy:
                if self._given_up or time.monotonic() > deadline:
                    raise
                self._waiting = True
                time.sleep(_BUSY_POLL_S)

    def give_up(self) -> bool:
        """End a wait that is under way with its error, which names the holder; False if nothing waits."""
        self._given_up = True
        return self._waiting


def settle(evidence: RollbackEvidence) -> Settled:
    """Translate the rollback's evidence into the words of ``task.end``."""
    files = Files(
        restored=list(evidence.restored),
        kept=list(evidence.kept),
        conflicts=list(evidence.conflicts),
        not_restored=list(evidence.not_restored),
    )
    residue = [f"{path}: changed by a command, not restored" for path in evidence.not_restored]
    residue += [f"{line}: not restored" for line in evidence.blocked]
    if not evidence.complete and not residue:
        residue.append("the files could not be verified")
    return Settled(files, residue)
