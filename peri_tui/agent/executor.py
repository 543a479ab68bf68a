"""One task from its start to its proven end.

The executor runs in a supervisor task that nothing cancels. The body (the reason–act loop) is a task of its own: it
gets ``cancel`` exactly once, from the token. However a task ends, what it held is let go of here, and the words of
``task.end`` say only what was proven.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from peri_tui.agent import instructions
from peri_tui.agent.models.call import Clocks
from peri_tui.agent.models.registry import open_model
from peri_tui.agent.permissions import Permissions, SessionRules
from peri_tui.agent.processes.child_env import child_env
from peri_tui.agent.processes.jobs import Jobs, TaskJobs
from peri_tui.agent.processes.spawn import LimitReport, Processes, SignalReport
from peri_tui.agent.questions import QuestionDesk, Reply
from peri_tui.agent.recovery import Recovery
from peri_tui.agent.rig import PatientFiles, TaskRig
from peri_tui.agent.runner import Outcome, run_task
from peri_tui.agent.scheduler.run import Run
from peri_tui.agent.scheduler.store import TaskRow
from peri_tui.agent.stopping import Stopping, describe_files
from peri_tui.agent.task_context import TaskContext
from peri_tui.config import Paths, Settings, api_key
from peri_tui.core import messages
from peri_tui.core.messages import Asked, LayerEvidence, TaskEnded
from peri_tui.core.states import EXIT_DONE, StopReason, TaskState, exit_code
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import PeriError, StateError
from peri_tui.log import Log

SAMPLE_S: Final = 1.0
# How long an edit waits for another Peri's task in the same folder, when the task has no limit of its own.
BUSY_WAIT_S: Final = 10.0

# Whose files are put back: a stop follows the user's choice, a lost owner restores, a limit keeps the work.
_ALWAYS_RESTORE: Final = frozenset({StopReason.OWNER_LOST, StopReason.AGENT_KILLED, StopReason.DISCONNECT})
_ALWAYS_KEEP: Final = frozenset(
    {
        StopReason.LIMIT_TURNS,
        StopReason.LIMIT_TOKENS,
        StopReason.LIMIT_SECONDS,
        StopReason.LIMIT_MEMORY,
        StopReason.LIMIT_PROCESSES,
        StopReason.LIMIT_OUTPUT,
        StopReason.LIMIT_CPU,
        StopReason.SILENCE,
        StopReason.MODEL_ERROR,
        StopReason.UNAPPROVED,
        StopReason.INTERNAL_ERROR,
    }
)
# An end that is nobody's wish but an error's.
_ERRORS: Final = frozenset(
    {
        StopReason.MODEL_ERROR,
        StopReason.UNAPPROVED,
        StopReason.SILENCE,
        StopReason.INTERNAL_ERROR,
        StopReason.OWNER_LOST,
        StopReason.AGENT_KILLED,
    }
)


_LIMITS: Final = {
    "memory": StopReason.LIMIT_MEMORY,
    "processes": StopReason.LIMIT_PROCESSES,
    "seconds": StopReason.LIMIT_SECONDS,
    "cpu": StopReason.LIMIT_CPU,
    "output": StopReason.LIMIT_OUTPUT,
}


class TaskExecutor:
    """Executes tasks for the scheduler.

    Args:
        paths, settings, log: this agent's.
        processes: the registry of processes.
        questions: the desk of open questions.
        trust: the user's answers about workspaces.
        recovery: ends tasks whose owner died.
        environ: where keys are; children never see them.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        log: Log,
        *,
        processes: Processes,
        questions: QuestionDesk,
        trust: instructions.TrustStore,
        recovery: Recovery,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._log = log
        self._processes = processes
        self.jobs = Jobs(processes, paths.runtime / "tmp")
        self._questions = questions
        self._trust = trust
        self._recovery = recovery
        self._environ = environ
        self._rules: dict[str, SessionRules] = {}
        self._rigs: dict[str, TaskRig] = {}
        self._stops: set[asyncio.Task[None]] = set()
        processes.listen(on_limit=self._heed_limit, on_signalled=self._show_signalled)

    async def execute(self, run: Run) -> TaskEnded:
        """Do the whole task and return its end; a stop is carried out and proven in here."""
        started = time.monotonic()
        try:
            rig = self._open(run)
        except (PeriError, OSError) as error:
            failed = Outcome("failed", StopReason.INTERNAL_ERROR, _one_line(error), error=_as_peri(error))
            return self._not_begun(run, failed, started)
        self._rigs[run.task] = rig
        outcome = await self._live(run, rig)
        if outcome is not None and not run.token.is_set:
            if outcome.kind == "completed":
                end = await self._completed(run, rig, outcome, started)
                if await run.complete(end):
                    await self._let_go(run, rig)
                    return end
            else:
                await self._stop_inside(run, outcome)
        return await self._stopped(run, rig, outcome, started)

    async def recover(self, row: TaskRow) -> TaskEnded:
        """End a task that has no body: of a dead owner, or of a stop that failed and is tried again."""
        rig = self._rigs.get(row.task)
        if rig is None:
            return await self._recovery.recover(row)
        return await self._stopped(rig.run, rig, None, time.monotonic())

    # --- the life of a task -----------------------------------------------------------------------------------------

    def _open(self, run: Run) -> TaskRig:
        rig = TaskRig(
            run,
            paths=self._paths,
            processes=self._processes,
            questions=self._questions,
            trace=lambda layer, ev, **data: self._trace(run, layer, ev, **data),
            log=lambda name, *, layer=0, **facts: self._log.event(name, task=run.task, layer=layer, **facts),
        )
        settings = self._settings
        rig.model = open_model(
            run.submit.model,
            key=api_key(self._environ),
            clocks=Clocks(
                connect=settings.connect_s,
                first_byte=settings.first_byte_s,
                idle=settings.idle_s,
                total=settings.total_s,
            ),
            offline_rate=settings.offline_rate,
            environ=self._environ,
        )
        return rig

    async def _live(self, run: Run, rig: TaskRig) -> Outcome | None:
        """Run the body until it ends or the token is set; None where it was cut."""
        run.token.on_set(rig.interrupt)
        run.token.on_force(rig.force)
        body = asyncio.create_task(self._body(run, rig), name=f"body {rig.task}")
        rig.body = body
        run.token.bind(body)
        stop = asyncio.create_task(run.token.wait())
        watches = (
            asyncio.create_task(self._sample(run, rig)),
            asyncio.create_task(self._limit(run, rig)),
            stop,
        )
        await asyncio.wait({body, stop}, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        if not body.done() or body.cancelled():
            return None
        error = body.exception()
        if error is None:
            return body.result()
        self._log.event("body failed", task=rig.task, layer=3, error=repr(error))
        return Outcome(
            "failed", StopReason.INTERNAL_ERROR, _one_line(error), error=_as_peri(error), touched=True
        )

    async def _body(self, run: Run, rig: TaskRig) -> Outcome:
        await rig.loop.run_in_executor(None, rig.make_tmp)
        env = child_env(self._environ, rig.task, {"TMPDIR": str(rig.tmp)})
        permissions = Permissions(
            rig.task,
            mode=run.submit.approve,
            interactive=run.submit.interactive,
            workspace=rig.workspace,
            ask=self._ask,
            emit=rig.emit,
            set_state=run.set_state,
            environ=env,
            private=(self._paths.config, self._paths.data, self._paths.state, self._paths.runtime),
            rules=self._rules.setdefault(run.submit.session, SessionRules()),
        )
        assert rig.model is not None
        rig.patient = PatientFiles(rig.files, run.submit.budget.seconds or BUSY_WAIT_S)
        context = TaskContext(
            submit=run.submit,
            token=run.token,
            model=rig.model,
            processes=self._processes,
            files=rig.patient,
            root=rig.root,
            history=rig.history,
            permissions=permissions,
            emit=rig.emit,
            drain=run.drain,
            in_thread=rig.in_thread,
            env=env,
            jobs=TaskJobs(self.jobs, rig.task, run.emit),
            instructions=await instructions.read_instructions(rig.workspace, self._trust),
        )
        return await run_task(context)

    async def _ask(self, asked: Asked) -> Reply:
        return await self._questions.ask(asked.task, asked.qid)

    async def _sample(self, run: Run, rig: TaskRig) -> None:
        """Once a second: what the task does, and what its processes take."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            stats = await self._processes.sample(rig.task)
            run.emit(rig.progress(stats))

    async def _limit(self, run: Run, rig: TaskRig) -> None:
        if run.submit.budget.seconds > 0:
            await asyncio.sleep(run.submit.budget.seconds)
            if rig.patient is not None and rig.patient.give_up():
                # Not the task was slow: another one holds the folder, and the error says which process.
                return
            # A store that refuses must not keep the task running: the token is set before it is asked.
            with suppress(StateError):
                await run.stop(StopReason.LIMIT_SECONDS, "limit")

    def _heed_limit(self, report: LimitReport) -> None:
        """Say that a task comes near a limit; stop one that crossed it, through all five layers."""
        rig = self._rigs.get(report.task)
        if rig is None:
            return
        self._log.event(
            "limit", task=report.task, layer=5, which=report.which, value=report.value, limit=report.limit,
            level=report.level, command=report.command,
        )  # fmt: skip
        if report.level == "warn" and not rig.run.token.is_set:
            rig.emit(messages.Delta(task=report.task, ch="notice", part="guard", text=report.text + "\n"))
        if report.level != "warn" and not rig.over_limit:
            rig.over_limit = report.text
            stop = asyncio.create_task(self._stop_at_limit(rig.run, _LIMITS[report.which]))
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)

    async def _stop_at_limit(self, run: Run, reason: StopReason) -> None:
        # A store that refuses must not keep the task running: the token is set before it is asked.
        with suppress(StateError):
            await run.stop(reason, "guard")

    def _show_signalled(self, report: SignalReport) -> None:
        """Show what the stop waits for; only news goes into the trace's file."""
        rig = self._rigs.get(report.task)
        if rig is None or not rig.run.token.is_set:
            return
        self._trace(
            rig.run, Layer.ROLLBACK, Ev.TREE_SIGNALLED, shown_only=not report.fresh,
            signal=report.rung.word, said=report.text, processes=report.processes,
        )  # fmt: skip

    async def _stop_inside(self, run: Run, outcome: Outcome) -> None:
        with suppress(StateError):
            reason = StopReason.UNAPPROVED if outcome.unapproved else StopReason.INTERNAL_ERROR
            await run.stop(outcome.reason or reason, "runner")

    async def _let_go(self, run: Run, rig: TaskRig) -> None:
        """End what an ended task still holds; what cannot be ended is logged, the files are settled already."""
        await rig.settle_files(restore=False, progress=rig.show_progress)
        for result in await rig.cleanups.run():
            if not result.ok:
                self._log.event(
                    "cleanup failed", task=run.task, layer=5, cleanup=result.name, error=result.error
                )
        self._forget(run)

    def _forget(self, run: Run) -> None:
        self._rigs.pop(run.task, None)
        self._processes.forget(run.task)

    # --- ends -------------------------------------------------------------------------------------------------------

    async def _completed(self, run: Run, rig: TaskRig, outcome: Outcome, started: float) -> TaskEnded:
        """Say that the task completed. Its background processes end with it."""
        evidence = await self._processes.stop(rig.task)
        run.history = rig.history.close(None)
        return TaskEnded(
            task=run.task,
            state=TaskState.COMPLETED.value,
            message=outcome.message,
            answer=outcome.answer,
            usage=rig.usage(),
            files=rig.kept_files(),
            residue=[f"pid {one.pid} {one.command} ({one.reason})" for one in evidence.survivors],
            killed=evidence.list_ended(),
            services=self.jobs.kept(run.task),
            seconds=round(time.monotonic() - started, 3),
            exit_code=EXIT_DONE,
        )

    def _not_begun(self, run: Run, outcome: Outcome, started: float) -> TaskEnded:
        """Say that the task could not even begin: nothing was touched, nothing is open."""
        reason = outcome.reason
        return TaskEnded(
            task=run.task,
            state=TaskState.FAILED.value,
            stop_reason=reason.value if reason else "",
            message=outcome.message,
            seconds=round(time.monotonic() - started, 3),
            exit_code=_exit_code(TaskState.FAILED, reason, outcome),
        )

    async def _stopped(self, run: Run, rig: TaskRig, outcome: Outcome | None, started: float) -> TaskEnded:
        cause = run.token.cause
        assert cause is not None
        restore = cause.reason in _ALWAYS_RESTORE or (
            cause.reason not in _ALWAYS_KEEP and run.submit.on_stop == "restore"
        )
        report = await Stopping(run, rig, restore=restore, trace=rig.trace).run()
        run.history = rig.history.close(cause.reason, files=describe_files(report.files))
        if report.verified:
            self._forget(run)
        state = TaskState.CANCEL_FAILED
        if report.verified:
            state = TaskState.FAILED if cause.reason in _ERRORS else TaskState.CANCELLED
        now = time.monotonic()
        return TaskEnded(
            task=run.task,
            state=state.value,
            stop_reason=cause.reason.value,
            verified=report.verified,
            message=rig.over_limit or (outcome.message if outcome else ""),
            answer=outcome.answer if outcome else "",
            cancel_id=cause.cancel_id,
            evidence=[_client_layer(cause.source), *report.evidence],
            usage=rig.usage(),
            files=report.files,
            residue=report.residue,
            killed=report.killed,
            services=self.jobs.kept(run.task),
            seconds=round(now - started, 3),
            stop_seconds=round(now - cause.mono / 1e9, 4),
            exit_code=_exit_code(state, cause.reason, outcome),
        )

    def _trace(
        self,
        run: Run,
        layer: Layer,
        ev: Ev,
        *,
        mono: int | None = None,
        shown_only: bool = False,
        **data: Any,
    ) -> None:
        cause = run.token.cause
        cancel_id = cause.cancel_id if cause else ""
        if shown_only:
            mono = time.monotonic_ns()
        else:
            mono = self._log.trace(
                run.task, int(layer), ev.value, cancel_id=cancel_id, mono=mono, **data
            ).mono
        run.emit(
            messages.Traced(
                task=run.task, layer=int(layer), ev=ev.value, cancel_id=cancel_id, mono=mono, data=data
            )
        )


def _client_layer(source: str) -> LayerEvidence:
    # What the agent knows of layer 2: the cancel came, and by which way. Layer 1 speaks for itself, in the client.
    return LayerEvidence(layer=int(Layer.CLIENT), ok=True, summary=f"cancel came by {source}")


def _exit_code(state: TaskState, reason: StopReason | None, outcome: Outcome | None) -> int:
    code = exit_code(state, reason)
    error = outcome.error if outcome else None
    return error.exit_code if state is TaskState.FAILED and error is not None else code


def _as_peri(error: BaseException) -> PeriError | None:
    return error if isinstance(error, PeriError) else None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PeriError) else f"{type(error).__name__}: {text}"
