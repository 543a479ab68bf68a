"""``peri undo``: put back the files of a finished task."""

from __future__ import annotations

import sys
from pathlib import Path

from peri_tui.agent.rig import settle
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.journal import read
from peri_tui.agent.rollback.recover import undo
from peri_tui.agent.rollback.vault import Vault
from peri_tui.agent.stopping import describe_files
from peri_tui.config import Paths
from peri_tui.core.states import EXIT_DONE, EXIT_NOT_CLEAN
from peri_tui.errors import InputError


def undo_task(paths: Paths, workspace: Path, task: str | None) -> int:
    """Undo a task of a workspace (the last that changed something, when none is named) and print what was done.

    Returns:
        0 when every file is as it was or the user's own, 74 when something is left, which is listed.

    Raises:
        InputError: there is nothing to undo.
        WorkspaceBusy: another Peri is writing here.
    """
    wanted = task or last_task(paths, workspace)
    if wanted is None:
        raise InputError(f"{workspace}: no task to undo here")
    settled = settle(undo(paths, workspace, wanted))
    sys.stdout.write(f"{wanted}: {describe_files(settled.files)}\n")
    for path in settled.files.conflicts:
        sys.stdout.write(f"  {path}: changed since, left as it is\n")
    for line in settled.residue:
        sys.stdout.write(f"  {line}\n")
    return EXIT_NOT_CLEAN if settled.residue else EXIT_DONE


def last_task(paths: Paths, workspace: Path) -> str | None:
    """Return the newest task of a workspace whose files were kept, or None."""
    with Root(workspace) as root:
        journals = Vault(paths, root).journals
        stories = [read(file) for file in journals.glob("*.wal")] if journals.is_dir() else []
    kept = [story.begin for story in stories if story.ended == "committed" and story.begin is not None]
    return max(kept, key=lambda begin: begin.wall).task if kept else None
