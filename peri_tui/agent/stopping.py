"""The stop of one task: five layers in order, each with a deadline, each believed only by its evidence.

Runs in the task's supervisor, which nothing cancels. What the token's listeners did at once (socket shut, first
signal sent) is repeated here where that is harmless, then *proven*: open sockets are looked up in the kernel's tables,
processes by ``waitpid``, files by their hashes. A layer that stays silent past its deadline is named, and the rest
goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from peri_tui.agent.cancel import CancelCause
from peri_tui.agent.rig import TaskRig
from peri_tui.agent.scheduler.run import Run
from peri_tui.core.messages import Files, LayerEvidence
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Ev, Layer

UNWIND_S: Final = 3.0
DURABLE_S: Final = 2.0
MODEL_QUIET_S: Final = 1.0
RESTORE_STALL_S: Final = 5.0
_POLL_S: Final = 0.005
SUPERVISOR: Final = "peri-supervisor"

Trace = Callable[..., None]


@dataclass(slots=True)
class StopReport:
    """What a stop proved: evidence by layer, what became of the files, what is left."""

    evidence: list[LayerEvidence] = field(default_factory=list)
    files: Files = field(default_factory=Files)
    residue: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """True when every layer gave its evidence and nothing is left."""
        return all(layer.ok for layer in self.evidence) and not self.residue


class Stopping:
    """One stop.

    Args:
        run: the task as the scheduler has it, its token set.
        rig: what the task holds.
        restore: put the files back (else they are kept, and can be undone).
        trace: ``(layer, ev, **data)`` appends a trace record and shows it.
    """

    def __init__(self, run: Run, rig: TaskRig, *, restore: bool, trace: Trace) -> None:
        assert run.token.cause is not None
        self._cause: CancelCause = run.token.cause
        self._run = run
        self._rig = rig
        self._restore = restore
        self._trace = trace
        self._moved = time.monotonic()
        self._report = StopReport()

    async def run(self) -> StopReport:
        """Stop everything and return the proof. Never raises for a layer that failed: it is in the report."""
        self._rig.close_gate()
        unwound, quiet, tree = await asyncio.gather(
            self._unwind(), self._quiet_model(), self._end_processes()
        )
        files = await self._files()
        clean = await self._clean_up()
        self._report.evidence = [
            self._layer(Layer.SCHEDULER, unwound),
            self._layer(Layer.MODEL, quiet),
            self._layer(Layer.ROLLBACK, _join(tree, files, clean)),
        ]
        return self._report

    # --- layer 3: the body is gone ----------------------------------------------------------------------------------

    async def _unwind(self) -> _Said:
        body = self._rig.body
        if body is not None:
            await asyncio.wait({body}, timeout=UNWIND_S)
        gone = body is None or body.done()
        self._trace(Layer.SCHEDULER, Ev.TASK_UNWOUND, ok=gone, said="running → cancelling")
        if not gone:
            self._report.residue.append("the task's own code still runs")
            return _Said(False, missing=f"the task's own code did not unwind in {UNWIND_S:g} s")
        if not await self._durable():
            return _Said(False, missing="the state store did not take the stop: it is not durable")
        return _Said(True, "running → cancelling")

    async def _durable(self) -> bool:
        """Tell whether the compare-and-set, which runs beside all this, was committed."""
        deadline = time.monotonic() + DURABLE_S
        while self._run.row.state is not TaskState.CANCELLING and time.monotonic() < deadline:
            if self._run.refused:
                return False
            await asyncio.sleep(_POLL_S)
        return self._run.row.state is TaskState.CANCELLING

    # --- layer 4: the model's connection is gone --------------------------------------------------------------------

    async def _quiet_model(self) -> _Said:
        model = self._rig.model
        if model is None:
            self._trace(Layer.MODEL, Ev.MODEL_QUIET, ok=True, said="no model was called")
            return _Said(True, "no model was called")
        model.shut()
        deadline = time.monotonic() + MODEL_QUIET_S
        while (open_now := model.open_sockets()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            model.shut()
        usage, far = model.usage(), model.far_end()
        tokens = f"{'' if usage.exact else '~'}{usage.tokens_out:,} tokens so far"
        said = f"connection closed, far end: {far}, {tokens}" if far != "none" else f"interrupted, {tokens}"
        missing = f"a connection to the model is still open: {', '.join(open_now)}" if open_now else ""
        self._trace(Layer.MODEL, Ev.MODEL_QUIET, ok=not open_now, said=missing or said, far_end=far)
        self._rig.log("model stopped", layer=4, ok=not open_now, far_end=far)
        if open_now:
            self._report.residue.extend(f"open connection {line}" for line in open_now)
            return _Said(False, missing=missing)
        return _Said(True, said)

    # --- layer 5: processes, files, cleanups ------------------------------------------------------------------------

    async def _end_processes(self) -> _Said:
        evidence = await self._rig.stop_processes()
        self._report.killed = evidence.list_ended()
        left = [f"pid {one.pid} {one.user} {one.command} ({one.reason})" for one in evidence.survivors]
        proven = evidence.outcome != "best_effort"
        said = describe_processes([ref.command for ref in evidence.ended], proven=proven)
        for note in evidence.notes:
            self._trace(Layer.ROLLBACK, Ev.CLEANUP, name="git lock", ok=True, said=note)
        if left:
            self._report.residue.extend(left)
            missing = f"waits for {len(left)} process{_es(left)}: {left[0]}"
            self._trace(Layer.ROLLBACK, Ev.TREE_SURVIVED, said=missing, survivors=left)
            self._trace(Layer.ROLLBACK, Ev.TREE_EMPTY, ok=False, said=missing)
            return _Said(False, missing=missing)
        self._trace(
            Layer.ROLLBACK, Ev.TREE_EMPTY, ok=True, said=said, outcome=evidence.outcome, rung=evidence.rung
        )
        return _Said(True, said)

    async def _files(self) -> _Said:
        self._trace(Layer.ROLLBACK, Ev.ROLLBACK_BEGUN, restore=self._restore)
        work = asyncio.ensure_future(self._rig.settle_files(restore=self._restore, progress=self._progress))
        while not work.done():
            left = self._moved + RESTORE_STALL_S - time.monotonic()
            if left <= 0:
                missing = f"the files: no progress for {RESTORE_STALL_S:g} s"
                self._report.residue.append(missing)
                self._trace(Layer.ROLLBACK, Ev.ROLLBACK_DONE, ok=False, said=missing)
                return _Said(False, missing=missing)
            await asyncio.wait({work}, timeout=left)
        return self._judge_files(work)

    def _judge_files(self, work: asyncio.Future[Any]) -> _Said:
        error = work.exception()
        if error is not None:
            missing = f"the files are not restored: {error}"
            self._report.residue.append(missing)
            self._trace(Layer.ROLLBACK, Ev.ROLLBACK_DONE, ok=False, said=missing)
            return _Said(False, missing=missing)
        settled = work.result()
        self._report.files = settled.files
        self._report.residue.extend(settled.residue)
        said = describe_files(settled.files)
        missing = settled.residue[0] if settled.residue else ""
        self._trace(Layer.ROLLBACK, Ev.ROLLBACK_DONE, ok=not settled.residue, said=missing or said)
        return _Said(not settled.residue, said, missing)

    def _progress(self, done: int, total: int) -> None:
        # Called in the files' thread.
        self._moved = time.monotonic()
        self._rig.loop.call_soon_threadsafe(self._rig.show_progress, done, total)

    async def _clean_up(self) -> _Said:
        failed = []
        for result in await self._rig.cleanups.run():
            self._trace(
                Layer.ROLLBACK, Ev.CLEANUP, name=result.name, ok=result.ok, seconds=round(result.seconds, 4)
            )
            if not result.ok:
                failed.append(f"cleanup {result.name!r}: {result.error}")
        self._report.residue.extend(failed)
        self._trace(Layer.ROLLBACK, Ev.RESOURCES_CLEAN, ok=not failed, said="; ".join(failed))
        self._rig.log("resources cleaned", layer=5, ok=not failed)
        return _Said(not failed, "", failed[0] if failed else "")

    def _layer(self, layer: Layer, said: _Said) -> LayerEvidence:
        ms = (said.mono - self._cause.mono) / 1e6
        return LayerEvidence(
            layer=int(layer), ok=said.ok, ms=round(ms, 2), summary=said.summary, missing=said.missing
        )


@dataclass(slots=True)
class _Said:
    """What one part of a layer says, and when."""

    ok: bool
    summary: str = ""
    missing: str = ""
    mono: int = field(default_factory=time.monotonic_ns)


def _join(*parts: _Said) -> _Said:
    return _Said(
        all(part.ok for part in parts),
        ", ".join(part.summary for part in reversed(parts) if part.summary),
        "; ".join(part.missing for part in parts if part.missing),
        max(part.mono for part in parts),
    )


def describe_processes(commands: list[str], *, proven: bool = True) -> str:
    """Return which programs were ended, in a few words; without proof, only that none is known to be left."""
    # The proof comes first: on a narrow screen the end of a line is cut.
    own = [command for command in commands if command.strip() and command != SUPERVISOR]
    left = "0 processes left" if proven else "0 known processes left (best effort)"
    if not own:
        return left
    names = sorted({command.split()[0].rpartition("/")[2] for command in own})
    more = ", …" if len(names) > 4 else ""
    return f"{left}, {len(own)} ended ({', '.join(names[:4])}{more})"


def _es(items: list[str]) -> str:
    return "es" if len(items) > 1 else ""


def describe_files(files: Files) -> str:
    """Return what became of the files in a few words."""
    parts = []
    if files.restored:
        parts.append(f"{len(files.restored)} file{'s' if len(files.restored) > 1 else ''} restored")
    if files.kept:
        parts.append(f"{len(files.kept)} kept by choice")
    if files.conflicts:
        parts.append(f"{len(files.conflicts)} left as you changed them")
    if files.not_restored:
        parts.append(f"{len(files.not_restored)} changed by commands: not restored")
    return ", ".join(parts) or "no file was changed"
