"""The files of one task: every change goes through here, and can be put back from here.

The order of one edit is the write-ahead order: contents before and after durable in the store, the intent durable in
the journal, a whole new file under a temporary name, exchanged with the old one, what came out looked at and kept.
At any instant the disk alone tells how to get back.

All methods block on the disk; they are meant for one dedicated thread. Only ``close_gate`` may be called from
another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from peri_tui.agent.rollback import calls, edits, place
from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.rollback.diff import Change, describe
from peri_tui.agent.rollback.journal import (
    Changed,
    Committed,
    Displaced,
    Done,
    Intent,
    Journal,
    Seen,
    Void,
    WindowClosed,
    WindowOpened,
)
from peri_tui.agent.rollback.node import NONE, State, observe, observe_path, same
from peri_tui.agent.rollback.proof import RollbackEvidence
from peri_tui.agent.rollback.restore import Progress, put_back, silent
from peri_tui.agent.rollback.scan import scan
from peri_tui.agent.rollback.vault import Vault, check_task
from peri_tui.agent.rollback.window import Window, WindowChange
from peri_tui.config import Paths
from peri_tui.errors import FileChanged, PeriError, RollbackError, StoreFull, ToolError


class Transaction:
    """One task's changes to one workspace.

    Nothing is made on disk until the first change or the first command. The workspace's lock is taken at the first
    change and held to the end, so several Peris may read one workspace side by side.
    """

    def __init__(self, vault: Vault, task: str, instance: str, policy: str, wall: Callable[[], int]) -> None:
        self.root = vault.root
        self.task = task
        self._vault = vault
        self._instance = instance
        self._policy = policy
        self._wall = wall
        self._journal: Journal | None = None
        self._seq = 0
        self._gate_closed = False
        self._ended = ""
        self._own: dict[bytes, State] = {}
        self._window: Window | None = None
        self._by_commands: dict[str, str] = {}
        self._umask = _read_umask()

    @classmethod
    def open(
        cls,
        paths: Paths,
        workspace: Path,
        task: str,
        *,
        instance: str = "",
        policy: str = "restore",
        wall: Callable[[], int] = time.time_ns,
    ) -> Transaction:
        """Begin a task's changes; nothing is written yet.

        Args:
            paths: where journals and backups are.
            workspace: an existing folder.
            task: the task's id.
            instance: the agent's id, told to another one that finds the workspace busy.
            policy: what a stop does, as recorded.
            wall: wall clock in nanoseconds.

        Raises:
            InputError: no such folder, or the task id cannot be a file name.
            RollbackError: the backups would be inside the workspace.
        """
        root = Root(workspace)
        try:
            return cls(Vault(paths, root), check_task(task), instance, policy, wall)
        except PeriError:
            root.close()
            raise

    # Facts

    def touched(self) -> list[str]:
        """Return the paths of files that the task itself changed, sorted."""
        return sorted(os.fsdecode(path) for path in self._own)

    def changed_by_commands(self) -> list[WindowChange]:
        """Return what changed while commands ran, sorted by path; the last change of a path counts."""
        return [WindowChange(path, kind) for path, kind in sorted(self._by_commands.items())]

    def close_gate(self) -> None:
        """Refuse every further edit; one under way ends. Safe from any thread."""
        self._gate_closed = True

    # Edits

    def edit(self, path: str | bytes, data: bytes | None, *, expected_sha: str | None) -> Change:
        """Give a file new bytes, or delete it (``data=None``), so that it can be put back.

        A link that stays inside the workspace is followed for new bytes and deleted itself. Missing folders are
        made. Mode, owner and attributes stay.

        Args:
            path: relative to the workspace, or absolute inside it.
            data: the whole new content.
            expected_sha: SHA-256 (hex) of the content that the caller has seen; ``""``: the file must not exist;
                ``None``: whatever is there.

        Raises:
            OutsideWorkspace, ToolError: bad path, not a regular file, no permission; nothing was changed.
            FileChanged: the file is not what the caller has seen, or somebody saved it at this moment; theirs stays.
            StoreFull: the backup cannot be made durable; nothing was changed.
            WorkspaceBusy: another task changes this workspace.
        """
        self._refuse_closed()
        rel = self.root.resolve(path, last=data is not None)
        edits.refuse_name(rel, path)
        try:
            return self._edit(rel, path, data, expected_sha)
        except OSError as error:
            words = (error.strerror or str(error)).lower()
            raise ToolError(f"{show(path)}: cannot be changed: {words}", errno=error.errno) from None

    def _edit(self, rel: bytes, path: str | bytes, data: bytes | None, expected: str | None) -> Change:
        missing = edits.missing_folders(self.root, rel)
        before = edits.Before(NONE) if missing else edits.look(self.root, rel)
        pre = before.state
        edits.refuse_unexpected(pre, path, data, expected)
        post = edits.state_after(pre, data, self._umask)
        kind = "deleted" if data is None else "added" if pre.kind == "none" else "modified"
        if same(pre, post):
            return Change(os.fsdecode(rel), "unchanged")
        journal = self._begin_changes()
        self._store_both(rel, before, data)
        folders = self._make_folders(journal, missing)
        try:
            self._put(journal, rel, pre, post, data)
        except Exception:
            self._unmake_folders(journal, folders)
            raise
        return describe(os.fsdecode(rel), kind, before.data, data)

    def _store_both(self, rel: bytes, before: edits.Before, data: bytes | None) -> None:
        edits.store_before(self._vault.store, self.root, rel, before)
        if data is not None:
            self._vault.store.put(data)
        self._vault.store.sync()

    def _put(self, journal: Journal, rel: bytes, pre: State, post: State, data: bytes | None) -> None:
        with self.root.parent(rel) as (folder, name):
            in_place = pre.kind == "file" and post.kind == "file" and pre.nlink > 1
            intent = self._intend(rel, pre, post, os.fstat(folder).st_mtime_ns, in_place=in_place)
            temp = place.temp_name(self.task, intent.seq)
            journal.append(intent, sync=True)
            try:
                done = edits.put_in_place(folder, name, temp, intent, data, self._keeper(journal, rel))
            except OSError as error:
                self._give_up(journal, intent, folder, name, error)
                raise
            if not done:
                self._note(journal, Void(seq=intent.seq, why="changed by somebody else"))
                raise FileChanged(f"{show(rel)}: saved by somebody else at this moment; theirs stays")
            self._settle(journal, intent, folder, temp)

    def _give_up(self, journal: Journal, intent: Intent, folder: int, name: bytes, error: OSError) -> None:
        # Void only what is proven not to be there; an intent that stays open is looked at by the rollback.
        with suppress(OSError):
            if same(observe(folder, name), intent.pre):
                self._note(journal, Void(seq=intent.seq, why=str(error.strerror)))
                return
        self._own[intent.path] = intent.post

    def _intend(
        self, rel: bytes, pre: State, post: State, folder_mtime: int, *, in_place: bool = False
    ) -> Intent:
        self._seq += 1
        return Intent(seq=self._seq, pre=pre, post=post, in_place=in_place, folder=folder_mtime).named(rel)

    def _settle(self, journal: Journal, intent: Intent, folder: int, temp: bytes) -> None:
        """Keep what was displaced, make the names durable, say that it is done."""
        if intent.pre.kind != "none" and not intent.in_place:
            self._discard(journal, intent.path, folder, temp, str(intent.seq))
        with suppress(OSError):
            calls.fsync(folder)
        self._note(journal, Done(seq=intent.seq, folder=os.fstat(folder).st_mtime_ns))
        self._own[intent.path] = intent.post
        if self._window is not None:
            self._window.note_own(self.root, intent.path)

    def _keeper(self, journal: Journal, rel: bytes) -> place.Keep:
        def keep(folder: int, temp: bytes) -> None:
            self._discard(journal, rel, folder, temp, "saved", why="saved meanwhile")

        return keep

    def _discard(
        self, journal: Journal, rel: bytes, folder: int, temp: bytes, label: str, why: str = "before"
    ) -> None:
        trash, sha, state = self._vault.keep(self.task, folder, temp, label)
        self._note(journal, Displaced(trash=trash, sha=sha, target=state.target, why=why).named(rel))

    def _note(self, journal: Journal, record: Void | Done | Displaced) -> None:
        # Recovery compares states, so these only save it work: a full disk must not fail an edit that is in place.
        with suppress(StoreFull):
            journal.append(record, sync=False)

    # Folders

    def _make_folders(self, journal: Journal, missing: list[bytes]) -> list[Intent]:
        made: list[Intent] = []
        for rel in missing:
            with self.root.parent(rel) as (folder, name):
                post = State(kind="dir", mode=0o777 & ~self._umask)
                intent = self._intend(rel, NONE, post, os.fstat(folder).st_mtime_ns)
                journal.append(intent, sync=True)
                try:
                    calls.mkdir(folder, name)
                except FileExistsError:
                    self._note(journal, Void(seq=intent.seq, why="made by somebody else"))
                    continue
                except OSError as error:
                    self._note(journal, Void(seq=intent.seq, why=str(error.strerror)))
                    self._unmake_folders(journal, made)
                    raise
                calls.fsync(folder)
                self._note(journal, Done(seq=intent.seq, folder=os.fstat(folder).st_mtime_ns))
                made.append(intent)
        return made

    def _unmake_folders(self, journal: Journal, made: list[Intent]) -> None:
        for intent in reversed(made):
            with suppress(OSError), self.root.parent(intent.path) as (folder, name):
                calls.rmdir(folder, name)
                calls.set_times(folder, intent.folder)
                self._note(journal, Void(seq=intent.seq, why="not needed"))

    # Commands

    def window_open(self) -> None:
        """Look at the workspace before a command; the journal says that one runs.

        Raises:
            StoreFull: the journal cannot be written; do not start the command.
        """
        self._refuse_closed()
        journal = self._open_journal()
        self._seq += 1
        journal.append(WindowOpened(seq=self._seq, wall=self._wall()), sync=True)
        self._window = Window(self._seq, scan(self.root))

    def window_close(self) -> list[WindowChange]:
        """Return what differs since ``window_open`` and record it. Call it when the command's tree is gone."""
        window, journal = self._window, self._journal
        if window is None or journal is None:
            return []
        self._window = None
        changes, notes = window.compare(self.root)
        self._by_commands |= {change.path: change.kind for change in changes}
        records = [Changed(change=change.kind).named(change.raw) for change in changes]
        self._adopt(journal, changes)
        with suppress(StoreFull):
            journal.append(WindowClosed(seq=window.seq, changes=records, notes=notes), sync=True)
        return changes

    def _adopt(self, journal: Journal, changes: list[WindowChange]) -> None:
        """A file of ours that a command changed again: keep its bytes, so that the file can still be put back."""
        for change in changes:
            if change.raw not in self._own:
                continue
            with suppress(OSError, StoreFull, ToolError):
                state = observe_path(self.root, change.raw)
                if state.kind not in ("none", "file"):
                    continue
                if state.kind == "file":
                    edits.store_before(self._vault.store, self.root, change.raw, edits.Before(state))
                    self._vault.store.sync()
                self._seq += 1
                with self.root.parent(change.raw) as (folder, _):
                    mtime = os.fstat(folder).st_mtime_ns
                journal.append(Seen(seq=self._seq, state=state, folder=mtime).named(change.raw), sync=True)
                self._own[change.raw] = state

    # The end

    def keep(self) -> None:
        """End the task and keep its files; ``undo`` can put them back later.

        Raises:
            StoreFull: the end cannot be recorded; a recovery would then put the files back.
        """
        if self._ended:
            return
        self.window_close()
        if self._journal is not None:
            if self._own or self._by_commands:
                self._commit(self._journal)
            else:
                self._journal.remove()
        self._end("kept")

    commit = keep

    def _commit(self, journal: Journal) -> None:
        try:
            journal.append(Committed(), sync=True)
        except StoreFull:
            if not self._vault.drop_ballast():
                raise
            journal.append(Committed(), sync=True)

    def rollback(self, progress: Progress = silent) -> RollbackEvidence:
        """Put back every file that the task itself changed, prove it by reading again, and end.

        Args:
            progress: called with (done, total) files, at least once a file.

        Raises:
            RollbackError: the task has ended before, or the journal is not its own.
            OSError: the disk failed. The transaction stays open and this may be called again.
        """
        self._gate_closed = True
        if self._ended:
            raise RollbackError(f"task {self.task}: its files were {self._ended} already")
        self.window_close()
        if self._journal is None:
            self._end("restored")
            return RollbackEvidence()
        evidence = put_back(self._vault, self._journal, self.task, "rollback", progress)
        if not (self._own or self._by_commands or evidence.blocked or evidence.conflicts):
            self._journal.remove()
        self._end("restored")
        return evidence

    def _end(self, how: str) -> None:
        self._ended, self._gate_closed = how, True
        if self._journal is not None:
            self._journal.close()
        self._vault.release()
        self.root.close()

    # Beginnings

    def _refuse_closed(self) -> None:
        if self._ended:
            raise RollbackError(f"task {self.task}: its files were {self._ended} already")
        if self._gate_closed:
            raise ToolError("the task is being stopped; nothing more is written")

    def _open_journal(self) -> Journal:
        if self._journal is None:
            self._vault.make()
            begin = self._vault.begin(self.task, self._instance, self._wall(), self._policy)
            self._journal = Journal.create(self._vault.journal_path(self.task), begin)
        return self._journal

    def _begin_changes(self) -> Journal:
        first = not self._vault.locked
        self._vault.acquire(self._instance)
        try:
            if first:
                self._vault.load_ballast()
            return self._open_journal()
        except PeriError:
            if first:
                self._vault.release()
            raise


def _read_umask() -> int:
    # ``os.umask`` would change it for every thread for a moment.
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
