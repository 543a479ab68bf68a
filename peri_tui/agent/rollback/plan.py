"""What a journal says of each path, and what is there now: from the two follows what to do. Changes nothing.

Per path the journal is reduced to its state before the task (``base``) and the states that are the task's own. A
path that holds one of the latter is put back; one that holds ``base`` is done; anything else is somebody's and stays.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peri_tui.agent.rollback import place
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.edits import IN_MEMORY
from peri_tui.agent.rollback.journal import AnyRecord, Done, Intent, RollbackBegun, Seen, Void, of_kind
from peri_tui.agent.rollback.node import NONE, State, observe_path, open_file, same
from peri_tui.agent.rollback.segments import BadBlob, SegmentStore

AS_BEFORE, OURS, THEIRS, BLOCKED = "as_before", "ours", "theirs", "blocked"


@dataclass(slots=True)
class Item:
    """One path of a task.

    ``base``: before the task, or the last state that somebody else gave it in between. ``newest``: what the task
    put there last. ``former``: what may still be there if the task died in its last step. ``written``: hashes of all
    contents that the task wrote into the file itself (``in_place``), so that its other names hold them too.
    """

    path: bytes
    base: State
    newest: State
    seqs: list[int]
    former: State | None = None
    in_place: bool = False
    settled: bool = False
    written: set[str] = field(default_factory=set)

    @property
    def ours(self) -> list[State]:
        """The states that are the task's own."""
        return [self.newest] if self.former is None else [self.newest, self.former]


@dataclass(slots=True)
class Finding:
    """An item and what is there now: ``verdict`` is as_before, ours, theirs or blocked (then ``why``)."""

    item: Item
    now: State
    verdict: str
    why: str = ""


@dataclass(slots=True)
class Plan:
    """All items by path, and the folder times to give back."""

    items: list[Item] = field(default_factory=list)
    folders: dict[bytes, int] = field(default_factory=dict)


def reduce(records: Sequence[AnyRecord]) -> list[Item]:
    """Return the items of a journal, sorted by path."""
    void = {record.seq for record in of_kind(records, Void)}
    done = {record.seq for record in of_kind(records, Done)}
    items: dict[bytes, Item] = {}
    names: dict[tuple[int, int], list[Item]] = {}
    for record in records:
        if isinstance(record, Seen) and record.path in items:
            item = items[record.path]
            item.newest, item.former, item.settled = record.state, None, True
        elif isinstance(record, Intent) and record.seq not in void:
            others = names.get(record.pre.identity, []) if record.pre.kind == "file" else []
            items[record.path] = _add(items.get(record.path), others, record, record.seq in done)
            if record.in_place:
                sharing = names.setdefault(record.pre.identity, [])
                sharing.append(items[record.path])
                for item in sharing:
                    item.written.add(record.post.sha)
    return [items[path] for path in sorted(items)]


def _add(item: Item | None, others: list[Item], intent: Intent, done: bool) -> Item:
    """Return the item of a path with one more intent; ``others`` were written in place through the same inode."""
    others = [other for other in others if other is not item and intent.pre.sha in other.written]
    for other in others if intent.in_place else []:
        if same(other.newest, intent.pre) and other.newest.identity == intent.pre.identity:
            other.former, other.newest = None if done else other.newest, intent.post
    if item is None or not _follows(item, intent):
        # First touch, or somebody else gave it other bytes since: those are what a rollback must return to. Unless
        # the task wrote them itself, through another name of the same file.
        base = others[-1].base if others else intent.pre
        seqs = [*(item.seqs if item else []), intent.seq]
        former = intent.pre if others and not done else None
        written = set(others[-1].written) if others else set()
        in_place = intent.in_place or bool(others)
        return Item(intent.path, base, intent.post, seqs, former, in_place, done, written)
    item.former = None if done else item.newest
    item.newest, item.settled = intent.post, done
    item.in_place = item.in_place or intent.in_place
    item.seqs.append(intent.seq)
    return item


def _follows(item: Item, intent: Intent) -> bool:
    own = item.ours if item.settled else [*item.ours, item.base]
    return any(same(intent.pre, state) for state in own)


def classify(root: Root, store: SegmentStore, item: Item) -> Finding:
    """Look at a path and say whose its state is."""
    try:
        now = observe_path(root, item.path)
    except OSError as error:
        return Finding(item, NONE, BLOCKED, str(error.strerror).lower())
    if same(now, item.base):
        return Finding(item, now, OURS if _rewritten(item, now) else AS_BEFORE)
    if any(same(now, state) for state in item.ours):
        return Finding(item, now, OURS)
    if item.in_place and _half_written(root, store, item, now):
        return Finding(item, now, OURS, "half written")
    return Finding(item, now, THEIRS, "deleted since" if now.kind == "none" else "changed since")


def _rewritten(item: Item, now: State) -> bool:
    """Tell whether the task itself gave a file its old bytes again, but not its old time or mode."""
    if now.kind != "file" or not same(item.newest, item.base):
        return False
    return now.mtime != item.base.mtime or (now.mode != item.base.mode and now.mode == item.newest.mode)


def _half_written(root: Root, store: SegmentStore, item: Item, now: State) -> bool:
    try:
        with root.parent(item.path) as (folder, name):
            return now.identity == item.base.identity and is_written(store, item, folder, name, now)
    except OSError:
        return False


def is_written(store: SegmentStore, item: Item, folder: int, name: bytes, now: State) -> bool:
    """Tell whether a file (any name of it) holds what the task wrote in place, or what a crash in between left."""
    if now.kind != "file" or now.sha in item.written:
        return now.kind == "file"
    if now.size > IN_MEMORY or item.base.kind != "file":
        return False
    try:
        contents = [store.get(sha) for sha in {item.base.sha, *item.written}]
        fd = open_file(folder, name)
    except (BadBlob, OSError):
        return False
    try:
        data = os.pread(fd, now.size + 1, 0)
    finally:
        os.close(fd)
    return any(place.is_mixture(data, one, other) for one in contents for other in contents if one != other)


def folder_times(root: Root, records: Sequence[AnyRecord]) -> dict[bytes, int]:
    """Return the modification times that folders had before the task, where only the task moved them since.

    A rollback that was cut off has moved them too; what it had planned then stands in its record.
    """
    void = {record.seq for record in of_kind(records, Void)}
    after = {record.seq: record.folder for record in of_kind(records, Done)}
    first: dict[bytes, int] = {}
    last: dict[bytes, int | None] = {}
    foreign: set[bytes] = set()
    for record in records:
        if isinstance(record, Seen):
            last[record.path.rpartition(b"/")[0]] = record.folder
        if not isinstance(record, Intent) or record.in_place:
            continue
        folder = record.path.rpartition(b"/")[0]
        known = last.get(folder)
        if record.seq in void and folder not in first:
            continue
        if folder in first and known is not None and known != record.folder:
            foreign.add(folder)
        first.setdefault(folder, record.folder)
        last[folder] = after.get(record.seq)
    found = {folder: mtime for folder, mtime in first.items() if folder not in foreign}
    found = {folder: mtime for folder, mtime in found.items() if _unmoved(root, folder, last[folder])}
    for begun in of_kind(records, RollbackBegun):
        found |= dict(begun.folders)
    return found


def _unmoved(root: Root, folder: bytes, mtime: int | None) -> bool:
    try:
        fd = root.open_dir(folder)
    except OSError:
        return False
    try:
        return mtime is None or os.fstat(fd).st_mtime_ns == mtime
    finally:
        os.close(fd)


def digest(states: Iterable[tuple[bytes, State]]) -> str:
    """Return one SHA-256 over paths and their types, bytes or link texts: equal digests, equal files."""
    whole = hashlib.sha256()
    for path, state in sorted(states, key=lambda pair: pair[0]):
        whole.update(b"%d:%s" % (len(path), path))
        whole.update(f" {state.kind} {state.sha} ".encode() + state.target + b"\n")
    return whole.hexdigest()
