"""After a crash, and after the end: put back what a dead owner left, show what was before, undo a finished task."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from peri_tui.agent.rollback.beneath import PathLike, Root
from peri_tui.agent.rollback.beneath import show as printable
from peri_tui.agent.rollback.journal import Journal, Owner, Story, read
from peri_tui.agent.rollback.node import same
from peri_tui.agent.rollback.plan import reduce
from peri_tui.agent.rollback.proof import RollbackEvidence
from peri_tui.agent.rollback.restore import Progress, put_back, silent
from peri_tui.agent.rollback.segments import SegmentStore
from peri_tui.agent.rollback.vault import Vault, check_task, owner_is_dead, this_process
from peri_tui.config import Paths
from peri_tui.errors import PeriError, RollbackError, ToolError


@dataclass(frozen=True, slots=True)
class Recovered:
    """One journal that a recovery took up. No ``evidence``: it could not be, and ``error`` says why in one line."""

    task: str
    workspace: str
    evidence: RollbackEvidence | None
    error: str = ""

    @property
    def complete(self) -> bool:
        """True when every file is proven to be back (or somebody else's)."""
        return self.evidence is not None and self.evidence.complete and not self.error


@dataclass(frozen=True, slots=True)
class Pending:
    """A journal without an end. ``owner_alive``: its task runs; ``damage``: the byte where it is damaged."""

    task: str
    workspace: str
    owner: Owner
    owner_alive: bool
    paths: list[str]
    damage: int | None = None


def recover(
    paths: Paths,
    *,
    only_task: str | None = None,
    is_owner_dead: Callable[[Owner], bool] = owner_is_dead,
    progress: Progress = silent,
) -> list[Recovered]:
    """Finish the rollback of every journal whose owner is gone; newest first. Running it again changes nothing.

    A journal is left alone while its lock or its workspace's is held, or while its owner (if not this process) is
    not proven dead.

    Args:
        paths: where journals and backups are.
        only_task: look at this task only.
        is_owner_dead: proof that a process is gone.
        progress: called with (done, total) paths of the journal at hand.
    """
    found = []
    for file, story in _left(paths):
        begin = story.begin
        if only_task not in (None, file.stem):
            continue
        if begin is None and story.damage is not None:
            found.append(Recovered(file.stem, "", None, f"{file}: damaged at byte {story.damage}"))
        elif begin is None:
            _remove_empty(file)
        elif _is_self(begin.owner) or is_owner_dead(begin.owner):
            taken = _recover(paths, file, progress)
            found += [taken] if taken else []
    return found


def _is_self(owner: Owner) -> bool:
    return owner == this_process(owner.instance)


def _left(paths: Paths) -> list[tuple[Path, Story]]:
    """Return the journals that have no end, newest first."""
    found = []
    for file in paths.journal.glob("*/*.wal") if paths.journal.is_dir() else []:
        with suppress(OSError):
            story = read(file)
            if not story.ended:
                found.append((file, story))
    return sorted(found, key=lambda pair: -(pair[1].begin.wall if pair[1].begin else 0))


def _remove_empty(file: Path) -> None:
    """A journal whose first record was never written: nothing was done under it."""
    with suppress(OSError):
        opened = Journal.resume(file)
        if opened is not None:
            journal, again = opened
            journal.remove() if not again.records else journal.close()


def _recover(paths: Paths, file: Path, progress: Progress) -> Recovered | None:
    try:
        opened = Journal.resume(file)
    except OSError as error:
        return Recovered(file.stem, "", None, f"{file}: {error.strerror}")
    if opened is None:
        return None
    journal, story = opened
    try:
        begin = story.begin
        if begin is None or story.ended:
            return None
        mode = "undo" if story.undoing else "recover"
        return _with_vault(
            paths,
            os.fsdecode(begin.path),
            lambda vault: put_back(vault, journal, begin.task, mode, progress),
            begin.task,
        )
    finally:
        journal.close()


def _with_vault(
    paths: Paths, workspace: str, act: Callable[[Vault], RollbackEvidence], task: str
) -> Recovered:
    try:
        with Root(workspace) as root:
            vault = Vault(paths, root)
            try:
                evidence = act(vault)
            finally:
                vault.release()
    except PeriError as error:
        return Recovered(task, workspace, None, str(error))
    except OSError as error:
        return Recovered(task, workspace, None, f"{printable(workspace)}: {error.strerror or error}")
    return Recovered(task, workspace, evidence)


def pending(paths: Paths) -> list[Pending]:
    """Return the journals that have no end: tasks that run, and what a recovery has left to do."""
    found = []
    for _, story in _left(paths):
        if (begin := story.begin) is not None:
            changed = [os.fsdecode(item.path) for item in reduce(story.records)]
            alive = not owner_is_dead(begin.owner)
            found.append(
                Pending(begin.task, os.fsdecode(begin.path), begin.owner, alive, changed, story.damage)
            )
    return found


def show(paths: Paths, task: str, path: PathLike) -> bytes:
    """Return the bytes that a file had before a task changed it.

    Args:
        path: relative to the task's workspace, or absolute inside it.

    Raises:
        RollbackError: no such task, or its backup is damaged.
        ToolError: the task did not change that path, or it was no file.
    """
    file = _find(paths, task)
    story = read(file)
    workspace = story.begin.path if story.begin else b""
    wanted = os.fsencode(path).removeprefix(workspace + b"/").removeprefix(b"./")
    for item in reduce(story.records):
        if item.path == wanted:
            if item.base.kind != "file":
                word = "did not exist" if item.base.kind == "none" else f"was a {item.base.kind}"
                raise ToolError(f"{printable(path)}: {word} before task {task}")
            store = SegmentStore(paths.store / file.parent.name / "seg")
            try:
                return store.get(item.base.sha)
            finally:
                store.close()
    raise ToolError(f"{printable(path)}: not changed by task {task}")


def _find(paths: Paths, task: str) -> Path:
    check_task(task)
    for file in paths.journal.glob(f"*/{task}.wal") if paths.journal.is_dir() else []:
        return file
    raise RollbackError(f"task {task}: has no journal; it changed no file, or it is not known here")


def undo(paths: Paths, workspace: Path, task: str, progress: Progress = silent) -> RollbackEvidence:
    """Put back the files of a task that ended and kept them. What it displaces is kept in turn.

    A path that somebody else, or a later task, changed since is a conflict: it stays, and a note names the task.

    Raises:
        RollbackError: no such task, it has not ended, or its files were put back already.
        WorkspaceBusy: a task changes this workspace now.
    """
    with Root(workspace) as root:
        vault = Vault(paths, root)
        file = vault.journal_path(task)
        if not file.exists():
            raise RollbackError(
                f"task {task}: has no journal here; it changed no file in {printable(workspace)}"
            )
        opened = Journal.resume(file)
        if opened is None:
            raise RollbackError(f"task {task}: is not finished")
        journal, story = opened
        try:
            _refuse_undo(task, story)
            evidence = put_back(vault, journal, task, "undo", progress)
            return replace(evidence, notes=evidence.notes + _later(vault, story, evidence.conflicts))
        finally:
            journal.close()
            vault.release()


def _refuse_undo(task: str, story: Story) -> None:
    if story.ended == "committed" or (not story.ended and story.undoing):
        return
    words = "is not finished; recover it" if not story.ended else f"was {story.ended} already"
    raise RollbackError(f"task {task}: {words}")


def _later(vault: Vault, story: Story, conflicts: list[str]) -> list[str]:
    """Name the later task that changed a path in conflict."""
    notes = []
    begin = story.begin
    for file in sorted(vault.journals.glob("*.wal")):
        other = read(file)
        if not conflicts or begin is None or other.begin is None or other.begin.wall <= begin.wall:
            continue
        if other.ended == "committed":
            changed = {os.fsdecode(i.path) for i in reduce(other.records) if not same(i.base, i.newest)}
            later = other.begin.task
            notes += [
                f"{printable(path)}: changed by task {later} since" for path in conflicts if path in changed
            ]
    return notes
