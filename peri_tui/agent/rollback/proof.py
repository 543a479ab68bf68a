"""The proof of a rollback: every path of the journal looked at afresh. It does not ask what the steps did."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.rollback.journal import (
    AnyRecord,
    Changed,
    Intent,
    RollbackEnded,
    Story,
    WindowClosed,
    WindowOpened,
    of_kind,
)
from peri_tui.agent.rollback.node import observe, same
from peri_tui.agent.rollback.plan import (
    AS_BEFORE,
    OURS,
    THEIRS,
    Finding,
    Item,
    classify,
    digest,
    is_written,
    reduce,
)
from peri_tui.agent.rollback.scan import scan
from peri_tui.agent.rollback.vault import Vault
from peri_tui.agent.rollback.window import changed_since

_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Record = Callable[[WindowClosed], None]


@dataclass(frozen=True, slots=True)
class RollbackEvidence:
    """What was found when every path was read again after a rollback.

    ``restored``: files as before the task. ``kept``: folders of the task that hold somebody else's files. ``conflicts``:
    somebody else changed them since; theirs is in place, ours is in the store. ``not_restored``: changed by
    commands. ``blocked``: "path: reason", could not be put back. ``digest_ok``: one digest over all paths that are
    nobody else's equals the one from before. ``complete``: nothing is blocked and the digest agrees.
    """

    restored: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    digest_ok: bool = True
    complete: bool = True
    bytes_restored: int = 0
    bytes_displaced: int = 0


def prove(vault: Vault, story: Story, reasons: Mapping[bytes, str], record: Record) -> RollbackEvidence:
    """Return what is there now, path by path.

    Args:
        vault: the workspace and its backups.
        story: the journal, just read from the disk.
        reasons: what stopped a step, by path; used for words only, never for the verdict.
        record: takes what is found of a command that a crash cut off.
    """
    findings = [classify(vault.root, vault.store, item) for item in reduce(story.records)]
    evidence = RollbackEvidence()
    for finding in findings:
        _judge(vault.root, finding, reasons, evidence)
    for finding in findings:
        _judge_other_names(vault, finding, evidence)
    known = {finding.item.path for finding in findings}
    evidence.blocked.extend(f"{show(path)}: {why}" for path, why in reasons.items() if path not in known)
    if story.damage is not None:
        evidence.blocked.append(f"journal: damaged at byte {story.damage}; what came after is not known")
    _list_commands(vault.root, story.records, evidence, record)
    theirs = set(evidence.conflicts + evidence.kept)
    mine = [one for one in findings if os.fsdecode(one.item.path) not in theirs]
    wanted = digest((one.item.path, one.item.base) for one in mine)
    found = digest((one.item.path, one.now) for one in mine)
    right = wanted == found
    return replace(evidence, digest=found, digest_ok=right, complete=right and not evidence.blocked)


def ending(evidence: RollbackEvidence) -> RollbackEnded:
    """Return the journal's record of a proof."""
    return RollbackEnded(
        complete=evidence.complete,
        digest=evidence.digest,
        restored=len(evidence.restored),
        conflicts=[show(path) for path in evidence.conflicts],
        blocked=evidence.blocked,
    )


def _judge(root: Root, finding: Finding, reasons: Mapping[bytes, str], evidence: RollbackEvidence) -> None:
    item, path = finding.item, os.fsdecode(finding.item.path)
    why = reasons.get(item.path, finding.why)
    if finding.verdict == AS_BEFORE and not _mode_left(finding):
        if item.newest.kind != "dir":
            evidence.restored.append(path)
    elif finding.verdict == AS_BEFORE:
        evidence.blocked.append(f"{show(path)}: the mode is not back")
    elif finding.verdict == THEIRS or _folder_gone(root, item):
        evidence.conflicts.append(path)
        evidence.notes.append(f"{show(path)}: {why or 'its folder is gone'}; left as it is")
    elif finding.verdict == OURS and finding.now.kind == "dir" and root.listdir(item.path):
        evidence.kept.append(path)
        evidence.notes.append(f"{show(path)}: kept, it holds files that are not the task's")
    else:
        evidence.blocked.append(f"{show(path)}: {why or 'not as it was'}")


def _judge_other_names(vault: Vault, finding: Finding, evidence: RollbackEvidence) -> None:
    """The task wrote into a file with several names, and this name is another file now: look at the others."""
    item = finding.item
    if not item.in_place or finding.now.identity == item.base.identity:
        return
    for path, info in scan(vault.root).rows.items():
        if info[4] == item.base.ino and path != item.path:
            with suppress(OSError), vault.root.parent(path) as (folder, name):
                now = observe(folder, name)
                if not same(now, item.base) and is_written(vault.store, item, folder, name, now):
                    evidence.blocked.append(
                        f"{show(path)}: not as it was, through its other name {show(item.path)}"
                    )


def _mode_left(finding: Finding) -> bool:
    item, now = finding.item, finding.now
    if now.kind != "file" or now.mode == item.base.mode:
        return False
    return now.mode == item.newest.mode


def _folder_gone(root: Root, item: Item) -> bool:
    try:
        with root.parent(item.path):
            return False
    except OSError as error:
        return error.errno in _GONE


def _list_commands(
    root: Root, records: Sequence[AnyRecord], evidence: RollbackEvidence, record: Record
) -> None:
    windows = of_kind(records, WindowClosed)
    found = {os.fsdecode(change.path) for window in windows for change in window.changes}
    cut_off = {window.seq: window.wall for window in of_kind(records, WindowOpened)}
    for window in windows:
        cut_off.pop(window.seq, None)
        evidence.notes.extend(note for note in window.notes if note not in evidence.notes)
    if cut_off:
        found |= _close_windows(root, cut_off, records, evidence, record)
    evidence.not_restored.extend(sorted(found - set(evidence.restored)))


def _close_windows(
    root: Root,
    windows: dict[int, int],
    records: Sequence[AnyRecord],
    evidence: RollbackEvidence,
    record: Record,
) -> set[str]:
    """Look for what a command did that a crash cut off, and have it recorded."""
    own = [intent.path for intent in of_kind(records, Intent)]
    changes, notes = changed_since(root, min(windows.values()), own)
    listed = [Changed(change=change.kind).named(change.raw) for change in changes]
    for seq in windows:
        record(WindowClosed(seq=seq, changes=listed, notes=notes))
    evidence.notes.extend(notes)
    return {change.path for change in changes}
