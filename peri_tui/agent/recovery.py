"""Ending what a dead agent left: never re-run, only ended, rolled back and reported.

Its supervisors end their process trees by themselves when the agent's sockets close, so here their absence is only
*proven*: no process of this user carries the task's tag any more, and none that the dead agent's ledger names lives.
Its connections went with its process. The files are put back from the journal.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

from peri_tui.agent.processes.sweep import Sweep
from peri_tui.agent.rig import Settled, settle
from peri_tui.agent.rollback.recover import pending, recover
from peri_tui.agent.scheduler.store import TaskRow
from peri_tui.agent.stopping import describe_files
from peri_tui.config import Paths
from peri_tui.core.messages import Files, LayerEvidence, TaskEnded
from peri_tui.core.states import StopReason, TaskState, exit_code
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import PeriError
from peri_tui.log import Log

PROCESSES_GONE_S: Final = 5.0
_POLL_S: Final = 0.02


class Recovery:
    """Recovers tasks of dead owners.

    Args:
        paths: where the journals are.
        log: this agent's log.
    """

    def __init__(self, paths: Paths, log: Log) -> None:
        self._paths = paths
        self._log = log
        self._sweep = Sweep(paths)
        self.notes: list[str] = []

    async def recover(self, row: TaskRow) -> TaskEnded:
        """End one task and return its end; the proof is the same as that of a stop."""
        started = time.monotonic()
        left = await self._processes_gone(row)
        settled = await self._restore(row)
        residue = [f"pid {pid} {command}" for pid, command in left] + settled.residue
        reason = StopReason(row.stop_reason) if row.stop_reason else StopReason.OWNER_LOST
        state = TaskState.CANCEL_FAILED
        if not residue:
            state = TaskState.CANCELLED if reason is StopReason.USER else TaskState.FAILED
        said = describe_files(settled.files)
        self._trace(row, Layer.ROLLBACK, Ev.RESOURCES_CLEAN, ok=not residue, said="; ".join(residue))
        self.notes.append(f"task {row.task} of an agent that died was ended: {said}")
        return TaskEnded(
            task=row.task,
            state=state.value,
            stop_reason=reason.value,
            verified=not residue,
            message="its agent process died",
            cancel_id=row.cancel_id,
            evidence=self._evidence(left, settled, said),
            files=settled.files,
            residue=residue,
            stop_seconds=round(time.monotonic() - started, 3),
            exit_code=exit_code(state, reason),
        )

    async def _processes_gone(self, row: TaskRow) -> list[tuple[int, str]]:
        deadline = time.monotonic() + PROCESSES_GONE_S
        left = await asyncio.to_thread(self._left_of, row.task)
        while left and time.monotonic() < deadline:
            # Nothing tells us when somebody else's children end.
            await asyncio.sleep(_POLL_S)
            left = await asyncio.to_thread(self._left_of, row.task)
        said = f"{len(left)} processes left" if left else "0 processes left"
        self._trace(row, Layer.MODEL, Ev.MODEL_QUIET, ok=True, said="its connections closed with its process")
        self._trace(row, Layer.ROLLBACK, Ev.TREE_EMPTY, ok=not left, said=said, outcome="best_effort")
        return left

    def _left_of(self, task: str) -> list[tuple[int, str]]:
        # The tag misses a process that cleared its environment, the ledger one that was never sampled.
        named = {one.ref.pid: one.ref.command for one in self._sweep.find(task) if one.role == "command"}
        return list((dict(tagged_processes(task)) | named).items())

    async def _restore(self, row: TaskRow) -> Settled:
        self._trace(row, Layer.ROLLBACK, Ev.ROLLBACK_BEGUN, restore=True)
        try:
            settled = await asyncio.to_thread(restore_files, self._paths, row.task)
        except (PeriError, OSError) as error:
            settled = Settled(Files(), [f"the files are not restored: {error}"])
        said = settled.residue[0] if settled.residue else describe_files(settled.files)
        self._trace(row, Layer.ROLLBACK, Ev.ROLLBACK_DONE, ok=not settled.residue, said=said)
        return settled

    def _evidence(self, left: list[tuple[int, str]], settled: Settled, said: str) -> list[LayerEvidence]:
        bad = [f"pid {pid} {command}" for pid, command in left] + settled.residue
        return [
            LayerEvidence(layer=3, ok=True, summary="owner proven dead, taken over"),
            LayerEvidence(layer=4, ok=True, summary="its connections closed with its process"),
            LayerEvidence(layer=5, ok=not bad, summary=said, missing=bad[0] if bad else ""),
        ]

    def _trace(self, row: TaskRow, layer: Layer, ev: Ev, **data: Any) -> None:
        self._log.trace(row.task, int(layer), ev.value, cancel_id=row.cancel_id, **data)


def restore_files(paths: Paths, task: str) -> Settled:
    """Finish the rollback of a task whose owner is proven dead. Blocks on the disk."""
    found = recover(paths, only_task=task, is_owner_dead=lambda owner: True)
    if found and found[0].evidence is not None:
        return settle(found[0].evidence)
    if found:
        return Settled(Files(), [f"the files are not restored: {found[0].error}"])
    left = [one for one in pending(paths) if one.task == task]
    return Settled(Files(), [f"the files of {task} are still held by pid {one.owner.pid}" for one in left])


def tagged_processes(task: str) -> list[tuple[int, str]]:
    """Return (pid, command) of this user's processes whose environment carries the task's tag. Linux only."""
    tag = f"PERI_TASK={task}".encode()
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if tag in (entry / "environ").read_bytes().split(b"\0"):
                found.append((int(entry.name), (entry / "comm").read_text().strip()))
        except OSError:
            # Gone meanwhile, or another user's.
            continue
    return found
