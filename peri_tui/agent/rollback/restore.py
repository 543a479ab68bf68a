"""Put a task's files back, and prove it: shared by rollback, recovery and undo.

Every step is "make this path equal that state, after comparing", so a crash at any instruction is met by running all
of it again. The proof does not ask the steps what they did: it reads the journal again from the disk and looks at
every path afresh.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from peri_tui.agent.rollback import calls, place
from peri_tui.agent.rollback.beneath import show
from peri_tui.agent.rollback.journal import (
    Displaced,
    Journal,
    PathRecord,
    Record,
    RollbackBegun,
    Story,
    of_kind,
)
from peri_tui.agent.rollback.node import State, hash_fd, make_state, observe, same
from peri_tui.agent.rollback.plan import (
    AS_BEFORE,
    OURS,
    Finding,
    Item,
    classify,
    folder_times,
    is_written,
    reduce,
)
from peri_tui.agent.rollback.proof import RollbackEvidence, ending, prove
from peri_tui.agent.rollback.scan import scan
from peri_tui.agent.rollback.sweep import sweep
from peri_tui.agent.rollback.vault import Vault
from peri_tui.core import faults
from peri_tui.errors import PeriError, RollbackError, StoreFull, ToolError

__all__ = ["Progress", "RollbackEvidence", "check_story", "put_back", "silent"]

Progress = Callable[[int, int], None]

BATCH: Final = 256
SINGLE_SYNC: Final = 16
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def silent(done: int, total: int) -> None:
    """A progress listener that does nothing."""


def check_story(vault: Vault, story: Story) -> None:
    """Refuse a journal of another workspace, or one that names a path outside.

    Raises:
        RollbackError: it is one.
    """
    begin = story.begin
    if begin is None or not vault.owns(begin):
        other = show(begin.path) if begin else "no workspace"
        raise RollbackError(f"the journal belongs to {other}, not to {show(str(vault.root.path))}")
    for record in story.records[1:]:
        if isinstance(record, PathRecord):
            _check_path(vault, record.path)


def _check_path(vault: Vault, path: bytes) -> None:
    try:
        good = not path.startswith(b"/") and vault.root.relative(path) == path
    except ToolError:
        good = False
    if not good:
        raise RollbackError(f"the journal names {show(path)}, which is not inside the workspace")


def put_back(
    vault: Vault, journal: Journal, task: str, mode: str, progress: Progress = silent
) -> RollbackEvidence:
    """Put every path that a task changed back to its state before, and prove it.

    Args:
        vault: the workspace's backups; its lock is taken when there is something to do.
        journal: the task's, open.
        mode: rollback, recover or undo.
        progress: called with (done, total) paths.

    Raises:
        RollbackError: the journal is not for this workspace.
        WorkspaceBusy: another writer has the workspace.
    """
    return _Rollback(vault, journal, task, mode, progress).run()


class _Rollback:
    def __init__(self, vault: Vault, journal: Journal, task: str, mode: str, progress: Progress) -> None:
        self._vault = vault
        self._root = vault.root
        self._journal = journal
        self._task = task
        self._mode = mode
        self._progress = progress
        self._why: dict[bytes, str] = {}
        self._notes: list[str] = []
        self._done = 0
        self._total = 0
        self._work = False
        self._restored = 0
        self._displaced = 0

    def run(self) -> RollbackEvidence:
        story = self._journal.story()
        check_story(self._vault, story)
        if reduce(story.records):
            self._vault.acquire(story.begin.owner.instance if story.begin else "")
        left = sweep(self._root, self._vault, self._task, story.records, self._keeper)
        findings = self._look(reduce(story.records))
        folders = folder_times(self._root, story.records)
        again = bool(of_kind(story.records, RollbackBegun))
        self._note(RollbackBegun(mode=self._mode, folders=sorted(folders.items())), sync=True)
        self._apply(findings, again)
        self._give_times_back(folders)
        self._sync_all()
        evidence = prove(
            self._vault, self._journal.story(), self._why | left, lambda one: self._note(one, sync=True)
        )
        evidence = replace(
            evidence,
            bytes_restored=self._restored,
            bytes_displaced=self._displaced,
            notes=evidence.notes + self._notes,
        )
        self._note(ending(evidence), sync=True)
        return evidence

    def _look(self, items: list[Item]) -> list[Finding]:
        self._total = sum(item.newest.kind != "dir" for item in items)
        found = []
        for item in items:
            found.append(classify(self._root, self._vault.store, item))
            self._progress(0, self._total)
        return found

    # Apply

    def _apply(self, findings: list[Finding], again: bool) -> None:
        work = [finding for finding in findings if finding.verdict == OURS]
        self._work = bool(work)
        folders = [one for one in work if one.item.base.kind == "none" and one.now.kind == "dir"]
        work = [one for one in work if one.now.kind != "dir" or one.item.base.kind != "none"]
        self._done = self._total - len(work)
        if work and faults.active("rollback.skip_restore"):
            work = work[1:]
            self._step()
        back = [one for one in work if one.item.base.kind != "none"]
        out = [one for one in work if one.item.base.kind == "none"]
        for finding in out:  # first, because they free space
            self._try(finding, lambda one: self._take_out(one))
            self._step()
        back.sort(key=lambda one: one.item.base.size)
        whole = [one for one in back if not self._overwrites(one)]
        # Files with several names first: a name that was taken away joins the healed file.
        for group in ([one for one in back if self._overwrites(one)], whole):
            for at in range(0, len(group), BATCH):
                self._batch(group[at : at + BATCH])
        for finding in sorted(folders, key=lambda one: -one.item.path.count(b"/")):
            self._try(finding, self._remove_folder)
        for finding in findings if again else []:
            if finding.verdict == AS_BEFORE and finding.item.in_place:
                self._try(finding, self._finish_in_place)

    def _batch(self, batch: list[Finding]) -> None:
        """Make all new files whole, then durable in one call, then exchange them one by one."""
        single = len(batch) <= SINGLE_SYNC
        ready = []
        for finding in batch:
            if self._try(finding, lambda one: self._prepare(one, sync=single)):
                ready.append(finding)
            self._progress(self._done, self._total)
        if not single:
            self._sync_all()
        for finding in ready:
            self._try(finding, self._swap)
            self._step()
        for _ in range(len(batch) - len(ready)):
            self._step()

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def _try(self, finding: Finding, act: Callable[[Finding], None]) -> bool:
        """Run one step of one path; what stops it is remembered and stops no other."""
        try:
            try:
                act(finding)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._vault.drop_ballast():
                    raise
                act(finding)
        except OSError as error:
            self._why[finding.item.path] = (error.strerror or str(error)).lower()
            return False
        except PeriError as error:
            self._why[finding.item.path] = str(error)
            return False
        return True

    def _temp(self, item: Item) -> bytes:
        return place.temp_name(self._task, item.seqs[0], restore=True)

    def _prepare(self, finding: Finding, *, sync: bool) -> None:
        item, now = finding.item, finding.now
        with self._root.parent(item.path) as (folder, name):
            if self._overwrites(finding):
                if finding.why:  # half written: what is there is in no backup yet
                    self._store_now(folder, name)
            elif item.base.kind == "link":
                place.write_temp_link(folder, self._temp(item), item.base)
            elif not self._relink(item, folder):
                want = _wanted(item, now)
                place.write_temp(
                    folder,
                    self._temp(item),
                    lambda fd: self._vault.store.copy(item.base.sha, fd),
                    want,
                    sync=sync,
                )

    def _overwrites(self, finding: Finding) -> bool:
        """True for a file with several names: its inode is written, so that all names heal."""
        both = finding.item.base.kind == finding.now.kind == "file"
        return both and finding.item.in_place and finding.now.nlink > 1

    def _store_now(self, folder: int, name: bytes) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            self._vault.store.put_fd(fd)
        finally:
            os.close(fd)
        self._vault.store.sync()

    def _swap(self, finding: Finding) -> None:
        item, now = finding.item, finding.now
        with self._root.parent(item.path) as (folder, name):
            if self._overwrites(finding):
                self._overwrite(finding, folder, name)
                return
            temp = self._temp(item)
            if now.kind == "none":
                placed = place.put_new(folder, name, temp)
            else:
                placed = place.swap_in(folder, name, temp, item.base, now, self._keeper(item.path))
                if placed.ok:
                    self._discard(item, folder, temp, now)
            self._restored += item.base.size if placed.ok else 0

    def _relink(self, item: Item, folder: int) -> bool:
        """Bring back the very file that an edit displaced, when it has other names: they stay names of one file."""
        if item.base.nlink < 2:
            return False
        kept = self._vault.find_kept(self._task, item.base.identity)
        if kept is None:
            return self._link_sibling(item, folder)
        try:
            calls.link(*kept, folder, self._temp(item))
        except OSError:
            return self._link_sibling(item, folder)
        if self._heal(item, *kept):
            return True
        calls.unlink(folder, self._temp(item))
        return self._link_sibling(item, folder)

    def _heal(self, item: Item, folder: int, name: bytes) -> bool:
        """Give the file of an item its old bytes, for all its names; False when they are somebody else's now."""
        now = observe(folder, name)
        if same(now, item.base):
            self._rewrite(item, folder, name, now, data=None)
        elif item.in_place and is_written(self._vault.store, item, folder, name, now):
            self._store_now(folder, name)
            self._rewrite(item, folder, name, now, data=self._vault.store.get(item.base.sha))
        else:
            return False
        return True

    def _link_sibling(self, item: Item, folder: int) -> bool:
        """The displaced file is in another file system: join a name of it that is still in the workspace."""
        for path, info in scan(self._root).rows.items():
            if info[4] != item.base.ino:
                continue
            with suppress(OSError), self._root.parent(path) as (other, name):
                whole = os.stat(name, dir_fd=other, follow_symlinks=False)
                if (whole.st_dev, whole.st_ino) == item.base.identity and self._heal(item, other, name):
                    calls.link(other, name, folder, self._temp(item))
                    return True
        self._notes.append(f"{show(item.path)}: is a file of its own now, it had {item.base.nlink} names")
        return False

    def _overwrite(self, finding: Finding, folder: int, name: bytes) -> None:
        data = self._vault.store.get(finding.item.base.sha)
        self._rewrite(finding.item, folder, name, finding.now, data=data)
        self._restored += len(data)

    def _rewrite(self, item: Item, folder: int, name: bytes, expected: State, *, data: bytes | None) -> None:
        """Write a file's bytes (unless None) and time without making a new file."""
        flags = os.O_RDONLY if data is None else os.O_RDWR
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            now = make_state(os.fstat(fd), sha=hash_fd(fd)[0])
            if not same(now, expected) or now.identity != expected.identity:
                return  # saved by somebody else since: the proof will find a conflict
            if data is not None:
                place.overwrite(fd, data, os.fstat(fd).st_size)
            if os.fstat(fd).st_mtime_ns != item.base.mtime:
                calls.set_times(fd, item.base.mtime)
            calls.fsync(fd)
        finally:
            os.close(fd)

    def _finish_in_place(self, finding: Finding) -> None:
        """The bytes were back when a crash came; the time may not be."""
        item, now = finding.item, finding.now
        if now.kind != "file" or now.mtime == item.base.mtime or now.identity != item.base.identity:
            return
        with self._root.parent(item.path) as (folder, name):
            self._rewrite(item, folder, name, now, data=None)

    def _take_out(self, finding: Finding) -> None:
        item = finding.item
        with self._root.parent(item.path) as (folder, name):
            temp = self._temp(item)
            if place.take_out(folder, name, temp, finding.now, self._keeper(item.path)).ok:
                self._discard(item, folder, temp, finding.now)

    def _remove_folder(self, finding: Finding) -> None:
        with self._root.parent(finding.item.path) as (folder, name):
            try:
                calls.rmdir(folder, name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    # Displaced bytes

    def _keeper(self, path: bytes) -> place.Keep:
        def keep(folder: int, temp: bytes) -> None:
            self._keep(path, folder, temp, "saved", "saved meanwhile")

        return keep

    def _keep(self, path: bytes, folder: int, temp: bytes, label: str, why: str) -> None:
        trash, sha, state = self._vault.keep(self._task, folder, temp, label)
        self._note(Displaced(trash=trash, sha=sha, target=state.target, why=why).named(path))

    def _discard(self, item: Item, folder: int, temp: bytes, now: State) -> None:
        self._displaced += now.size
        try:
            self._keep(item.path, folder, temp, f"{item.seqs[0]}-after", "the task's")
        except (OSError, StoreFull):
            # Its bytes are a backup already, so the name can go.
            self._vault.store.check(now.sha)
            calls.unlink(folder, temp)

    def _note(self, *records: Record, sync: bool = False) -> None:
        # A journal that cannot be written must not stop a rollback: recovery would do it all again, and find it done.
        try:
            self._journal.append(*records, sync=sync)
        except StoreFull:
            if self._vault.drop_ballast():
                with suppress(StoreFull):
                    self._journal.append(*records, sync=sync)

    # Folder times and durability

    def _give_times_back(self, folders: dict[bytes, int]) -> None:
        for rel, mtime in sorted(folders.items(), key=lambda pair: -pair[0].count(b"/")):
            with suppress(OSError):
                fd = self._root.open_dir(rel)
                try:
                    if os.fstat(fd).st_mtime_ns != mtime:
                        calls.set_times(fd, mtime)
                finally:
                    os.close(fd)

    def _sync_all(self) -> None:
        if self._work:
            calls.syncfs(self._root.fd)


def _wanted(item: Item, now: State) -> State:
    """The state to write: the base, but a mode that somebody else set since stays theirs."""
    if now.kind == "file" and now.mode != item.newest.mode:
        return msgspec.structs.replace(item.base, mode=now.mode)
    return item.base
