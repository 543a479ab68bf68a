"""Own edits and their rollback, on a real disk: what was before is there again, and nobody else's bytes are lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.journal import read
from peri_tui.agent.rollback.recover import pending, recover, show, undo
from peri_tui.agent.rollback.transaction import Transaction
from peri_tui.config import Paths
from peri_tui.core import faults
from peri_tui.errors import (
    FileChanged,
    InputError,
    OutsideWorkspace,
    RollbackError,
    StoreFull,
    ToolError,
    WorkspaceBusy,
)
from tests.doubles.workspace import CONTENTS, build_workspace, differences, paths_in, survey

pytestmark = pytest.mark.contract


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    return build_workspace(tmp_path / "ws")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return paths_in(tmp_path / "home")


@pytest.fixture
def task(paths: Paths, ws: Path):
    transaction = Transaction.open(paths, ws, "TASK1")
    yield transaction
    if not transaction._ended:
        transaction.rollback()


def trash(paths: Paths) -> list[bytes]:
    return [file.read_bytes() for file in paths.store.glob("*/trash/*/*") if file.is_file()]


# A task that writes nothing


def test_a_task_without_a_write_leaves_nothing_anywhere(paths: Paths, ws: Path) -> None:
    before = survey(ws)
    for end in ("rollback", "keep"):
        task = Transaction.open(paths, ws, "QUIET")
        assert task.root.read("plain.txt", 100).data == CONTENTS[b"plain.txt"]
        getattr(task, end)()
        assert not paths.data.exists()
        assert not paths.state.exists()
    assert differences(before, survey(ws)) == []


def git(ws: Path, *words: str) -> bytes:
    env = {"PATH": os.environ["PATH"], "HOME": str(ws.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.fsmonitor=false"]
    return subprocess.run(
        ["git", *who, *words], cwd=ws, env=env, check=True, capture_output=True, timeout=30
    ).stdout


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def make_dirty(ws: Path) -> None:
    git(ws, "init", "-q")
    git(ws, "add", "plain.txt", "crlf.txt")
    git(ws, "commit", "-qm", "first")
    (ws / "crlf.txt").write_bytes(b"stashed\r\n")
    git(ws, "stash", "-q")
    (ws / "plain.txt").write_bytes(b"staged\n")
    git(ws, "add", "plain.txt")
    (ws / "plain.txt").write_bytes(b"unstaged\n")


@needs_git
def test_dirty_git_tree_is_byte_equal_after_a_task_without_writes(paths: Paths, ws: Path) -> None:
    make_dirty(ws)
    status = git(ws, "status", "--porcelain=2", "-z")
    before = survey(ws)
    task = Transaction.open(paths, ws, "QUIET")
    task.root.listdir()
    evidence = task.rollback()
    assert (evidence.restored, evidence.complete) == ([], True)
    assert differences(before, survey(ws)) == []
    assert git(ws, "status", "--porcelain=2", "-z") == status
    assert not paths.data.exists()


@needs_git
def test_dirty_git_tree_is_back_after_edits(paths: Paths, ws: Path) -> None:
    make_dirty(ws)
    status = git(ws, "status", "--porcelain=2", "-z")
    before = survey(ws)
    task = Transaction.open(paths, ws, "TASK")
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.edit("new/file", b"agent", expected_sha=None)
    task.rollback()
    assert differences(before, survey(ws)) == []
    assert git(ws, "status", "--porcelain=2", "-z") == status


# Exactness


def test_every_file_changed_then_rolled_back_is_equal(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    for name, data in CONTENTS.items():
        task.edit(name, data.replace(b"one", b"ONE") + b"more", expected_sha=sha(data))
    task.edit("link", b"through the link", expected_sha=None)
    task.edit("sub/deep/new/er/file", b"new", expected_sha="")
    assert os.readlink(ws / "link") == "plain.txt"
    evidence = task.rollback()
    assert differences(before, survey(ws)) == []
    assert evidence.complete
    assert evidence.digest_ok
    assert sorted(map(os.fsencode, evidence.restored)) == sorted({*CONTENTS, b"sub/deep/new/er/file"})


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_only_the_wanted_bytes_differ_before_and_none_after(task: Transaction, ws: Path, name: bytes) -> None:
    before = survey(ws)
    old = CONTENTS[name]
    path = os.fsencode(ws) + b"/" + name
    mode = os.stat(path).st_mode
    task.edit(name, old[:3] + b"X" + old[3:], expected_sha=sha(old))
    with open(path, "rb") as file:
        assert file.read() == old[:3] + b"X" + old[3:]
    assert os.stat(path).st_mode == mode
    task.rollback()
    assert differences(before, survey(ws)) == []


def test_delete_file_and_link_come_back(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    assert task.edit("crlf.txt", None, expected_sha=None).kind == "deleted"
    task.edit("dangling", None, expected_sha=None)
    task.edit("link", None, expected_sha=None)
    assert not os.path.lexists(ws / "link")
    assert (ws / "plain.txt").exists()
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


def test_hard_linked_file_is_written_in_place(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    task.edit("plain.txt", b"short", expected_sha=None)
    assert (ws / "sub/second name").read_bytes() == b"short"
    assert os.stat(ws / "plain.txt").st_nlink == 2
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


def test_attributes_and_mode_survive_an_edit(task: Transaction, ws: Path) -> None:
    task.edit("attr.txt", b"new", expected_sha=None)
    assert os.getxattr(ws / "attr.txt", "user.k") == b"v\0\xff"
    task.edit("script.sh", b"new", expected_sha=None)
    assert os.stat(ws / "script.sh").st_mode & 0o777 == 0o755


def test_three_versions_go_back_to_the_first(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    for text in (b"1", b"2", b"3"):
        task.edit("crlf.txt", text, expected_sha=None)
    task.edit("crlf.txt", None, expected_sha=None)
    task.edit("crlf.txt", b"4", expected_sha="")
    assert task.rollback().restored == ["crlf.txt"]
    assert differences(before, survey(ws)) == []


def test_create_then_delete_leaves_nothing(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    task.edit("a/b", b"1", expected_sha="")
    task.edit("a/b", None, expected_sha=None)
    evidence = task.rollback()
    assert differences(before, survey(ws)) == []
    assert evidence.conflicts == []


def test_hundreds_of_files_come_back_in_batches_with_progress(task: Transaction, ws: Path) -> None:
    for number in range(300):
        (ws / f"f{number}").write_bytes(b"%d" % number)
    before = survey(ws)
    for number in range(300):
        task.edit(f"f{number}", b"agent", expected_sha=None)
    seen: list[tuple[int, int]] = []
    evidence = task.rollback(lambda done, total: seen.append((done, total)))
    assert differences(before, survey(ws)) == []
    assert len(evidence.restored) == 300
    assert seen[-1] == (300, 300)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


NAMES = [
    "sub/second name",
    "crlf.txt",
    "empty",
    "plain.txt",
    "new",
    "deep/er/new",
    "private",
    "link",
    "sub/deep/inner.txt",
]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(st.none(), st.binary(max_size=20))), max_size=12)


@settings(max_examples=60)
@given(steps=STEPS, end=st.sampled_from(["rollback", "undo", "recover"]))
def test_any_sequence_of_edits_is_put_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list, end: str
) -> None:
    base = tmp_path_factory.mktemp("any")
    ws, paths = build_workspace(base / "ws"), paths_in(base / "home")
    before = survey(ws)
    task = Transaction.open(paths, ws, "ANY")
    for name, data in steps:
        try:
            task.edit(name, data, expected_sha=None)
        except ToolError:
            assert data is None
    if end == "rollback":
        evidence = [task.rollback()]
    elif end == "undo":
        touched = task.touched()
        task.keep()
        evidence = [undo(paths, ws, "ANY")] if touched else []
    else:
        task._end("left")
        evidence = [one.evidence for one in recover(paths)]
    assert all(one is not None and one.complete for one in evidence)
    assert differences(before, survey(ws)) == []


# Changes are described


def test_change_counts_lines_and_shows_a_diff(task: Transaction) -> None:
    change = task.edit("crlf.txt", b"one\r\nTWO\r\nthree\r\nfour\r\n", expected_sha=None)
    assert (change.kind, change.added_lines, change.removed_lines) == ("modified", 2, 1)
    assert "-two\r\n" in change.diff
    assert "+TWO\r\n" in change.diff
    assert task.edit("new", b"a\n", expected_sha="").kind == "added"
    assert task.edit("new", b"a\n", expected_sha=None).kind == "unchanged"
    assert task.touched() == ["crlf.txt", "new"]


# Other people's bytes


def test_file_that_is_not_what_was_read_is_refused(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    with pytest.raises(FileChanged, match=r"crlf\.txt: changed since"):
        task.edit("crlf.txt", b"x", expected_sha=sha(b"other"))
    with pytest.raises(FileChanged, match="exists already"):
        task.edit("crlf.txt", b"x", expected_sha="")
    with pytest.raises(FileChanged, match="does not exist"):
        task.edit("gone", b"x", expected_sha=sha(b"other"))
    assert differences(before, survey(ws)) == []


def test_users_edit_after_the_agents_write_stays(task: Transaction, paths: Paths, ws: Path) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.edit("bom.txt", b"agent", expected_sha=None)
    (ws / "crlf.txt").write_bytes(b"user")
    evidence = task.rollback()
    assert (evidence.conflicts, evidence.restored, evidence.complete) == (["crlf.txt"], ["bom.txt"], True)
    assert (ws / "crlf.txt").read_bytes() == b"user"
    assert show(paths, "TASK1", "crlf.txt") == CONTENTS[b"crlf.txt"]
    assert (ws / "bom.txt").read_bytes() == CONTENTS[b"bom.txt"]


def test_users_delete_stays(task: Transaction, ws: Path) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    (ws / "crlf.txt").unlink()
    evidence = task.rollback()
    assert evidence.conflicts == ["crlf.txt"]
    assert not (ws / "crlf.txt").exists()


def test_users_revert_by_hand_is_no_conflict_and_not_written(task: Transaction, ws: Path) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    (ws / "crlf.txt").write_bytes(CONTENTS[b"crlf.txt"])
    info = os.stat(ws / "crlf.txt")
    evidence = task.rollback()
    assert (evidence.conflicts, evidence.restored) == ([], ["crlf.txt"])
    again = os.stat(ws / "crlf.txt")
    assert (again.st_ino, again.st_ctime_ns) == (info.st_ino, info.st_ctime_ns)


def test_users_version_between_two_edits_is_what_comes_back(task: Transaction, ws: Path) -> None:
    task.edit("crlf.txt", b"agent 1", expected_sha=None)
    (ws / "crlf.txt").write_bytes(b"user")
    task.edit("crlf.txt", b"agent 2", expected_sha=sha(b"user"))
    assert task.rollback().restored == ["crlf.txt"]
    assert (ws / "crlf.txt").read_bytes() == b"user"


def test_users_mode_stays(task: Transaction, ws: Path) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    (ws / "crlf.txt").chmod(0o600)
    assert task.rollback().complete
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]
    assert os.stat(ws / "crlf.txt").st_mode & 0o777 == 0o600


def test_users_file_in_the_agents_folder_stays(task: Transaction, ws: Path) -> None:
    task.edit("made/by/agent", b"x", expected_sha="")
    (ws / "made/user.txt").write_bytes(b"user")
    evidence = task.rollback()
    assert (ws / "made/user.txt").read_bytes() == b"user"
    assert not (ws / "made/by").exists()
    assert evidence.kept == ["made"]
    assert evidence.complete


def test_users_folder_in_place_of_a_file_stays(task: Transaction, ws: Path) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    (ws / "crlf.txt").unlink()
    (ws / "crlf.txt").mkdir()
    assert task.rollback().conflicts == ["crlf.txt"]
    assert (ws / "crlf.txt").is_dir()


def test_folder_replaced_by_a_link_out_is_not_followed(task: Transaction, ws: Path, tmp_path: Path) -> None:
    task.edit("sub/deep/inner.txt", b"agent", expected_sha=None)
    outside = tmp_path / "outside"
    (ws / "sub/deep").rename(tmp_path / "moved")
    outside.mkdir()
    (outside / "inner.txt").write_bytes(b"agent")
    (ws / "sub/deep").symlink_to(outside)
    evidence = task.rollback()
    assert (outside / "inner.txt").read_bytes() == b"agent"
    assert evidence.conflicts == ["sub/deep/inner.txt"]


def test_displaced_bytes_are_kept(task: Transaction, paths: Paths) -> None:
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.rollback()
    assert b"agent" in trash(paths)


# Undo


def test_undo_of_a_kept_task(task: Transaction, paths: Paths, ws: Path) -> None:
    before = survey(ws)
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.edit("a/b", b"agent", expected_sha="")
    task.keep()
    assert recover(paths) == []
    assert undo(paths, ws, "TASK1").complete
    assert differences(before, survey(ws)) == []
    assert b"agent" in trash(paths)
    with pytest.raises(RollbackError, match="undone already"):
        undo(paths, ws, "TASK1")


def test_undo_leaves_what_a_later_task_changed(paths: Paths, ws: Path) -> None:
    for number in (1, 2):
        task = Transaction.open(paths, ws, f"T{number}")
        task.edit("crlf.txt", b"agent %d" % number, expected_sha=None)
        task.edit(f"own{number}", b"x", expected_sha="")
        task.keep()
    evidence = undo(paths, ws, "T1")
    assert evidence.conflicts == ["crlf.txt"]
    assert any("changed by task T2" in note for note in evidence.notes)
    assert (ws / "crlf.txt").read_bytes() == b"agent 2"
    assert not (ws / "own1").exists()
    assert undo(paths, ws, "T2").complete
    assert (ws / "crlf.txt").read_bytes() == b"agent 1"


def test_rollback_goes_back_to_the_end_of_the_task_before(paths: Paths, ws: Path) -> None:
    first = Transaction.open(paths, ws, "T1")
    first.edit("crlf.txt", b"kept", expected_sha=None)
    first.keep()
    before = survey(ws)
    second = Transaction.open(paths, ws, "T2")
    second.edit("crlf.txt", b"gone", expected_sha=None)
    second.rollback()
    assert differences(before, survey(ws)) == []


def test_undo_refuses_with_a_reason(task: Transaction, paths: Paths, ws: Path) -> None:
    with pytest.raises(RollbackError, match="NONE"):
        undo(paths, ws, "NONE")
    task.edit("crlf.txt", b"agent", expected_sha=None)
    with pytest.raises(RollbackError, match="not finished"):
        undo(paths, ws, "TASK1")
    task.rollback()
    with pytest.raises(RollbackError, match="restored already"):
        undo(paths, ws, "TASK1")


# A store in another file system


@pytest.fixture
def far(tmp_path: Path):
    """A workspace in another file system than Peri's folders."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system to write in")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        try:
            yield build_workspace(Path(folder) / "ws")
        except OSError as error:
            pytest.skip(f"the second file system lacks something: {error}")


def test_store_in_another_file_system_puts_back_too(far: Path, paths: Paths) -> None:
    before = survey(far)
    task = Transaction.open(paths, far, "FAR")
    for name in CONTENTS:
        task.edit(name, b"agent", expected_sha=None)
    task.edit("crlf.txt", None, expected_sha=None)
    task.edit("link", None, expected_sha=None)
    task.edit("plain.txt", None, expected_sha=None)
    task.edit("a/b", b"agent", expected_sha="")
    assert task.rollback().complete
    assert differences(before, survey(far)) == []


def test_last_name_of_a_file_in_another_file_system_is_noted(far: Path, paths: Paths) -> None:
    task = Transaction.open(paths, far, "FAR")
    task.edit("plain.txt", None, expected_sha=None)
    task.edit("sub/second name", None, expected_sha=None)
    evidence = task.rollback()
    assert evidence.complete
    assert (
        (far / "plain.txt").read_bytes() == (far / "sub/second name").read_bytes() == CONTENTS[b"plain.txt"]
    )
    assert any("had 2 names" in note for note in evidence.notes)


# Commands


def test_window_lists_what_a_command_changed(task: Transaction, ws: Path) -> None:
    task.window_open()
    with open(ws / "crlf.txt", "ab") as file:
        file.write(b"x")
    (ws / "bom.txt").unlink()
    (ws / "made").mkdir()
    (ws / "made/x").write_bytes(b"")
    (ws / "private").chmod(0o600)
    found = {change.path: change.kind for change in task.window_close()}
    assert found == {
        "crlf.txt": "modified", "bom.txt": "deleted", "made": "added", "made/x": "added", "private": "modified",
    }  # fmt: skip
    evidence = task.rollback()
    assert evidence.not_restored == sorted(found)
    assert (ws / "made/x").exists()


def test_window_without_a_change_leaves_no_journal(task: Transaction, paths: Paths) -> None:
    task.window_open()
    assert task.window_close() == []
    task.keep()
    assert not list(paths.journal.glob("*/*"))


def test_own_edit_inside_a_window_is_not_listed(task: Transaction) -> None:
    task.window_open()
    task.edit("crlf.txt", b"agent", expected_sha=None)
    assert task.window_close() == []


def test_own_file_that_a_command_changed_again_is_put_back(task: Transaction, ws: Path) -> None:
    before = survey(ws)
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.edit("private", b"agent", expected_sha=None)
    task.window_open()
    (ws / "crlf.txt").write_bytes(b"formatted")
    (ws / "private").unlink()
    task.window_close()
    evidence = task.rollback()
    assert (evidence.complete, evidence.not_restored) == (True, [])
    assert differences(before, survey(ws)) == []


def test_rollback_closes_an_open_window(task: Transaction, ws: Path) -> None:
    task.window_open()
    (ws / "made").write_bytes(b"")
    assert task.rollback().not_restored == ["made"]


# Refusals


@pytest.mark.parametrize("path", ["../x", "/etc/x", "sub/../../x", "a\0b", "", "out/x", "file-out", "later"])
def test_no_write_leaves_the_workspace(task: Transaction, ws: Path, tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"canary")
    (ws / "out").symlink_to(outside)
    (ws / "file-out").symlink_to(outside / "f")
    (ws / "later").symlink_to("../outside/not-yet")
    with pytest.raises(ToolError):
        task.edit(path, b"evil", expected_sha=None)
    assert os.listdir(outside) == ["f"]
    assert (outside / "f").read_bytes() == b"canary"


def test_sibling_with_the_same_prefix_is_outside(task: Transaction, ws: Path, tmp_path: Path) -> None:
    (tmp_path / "ws-evil").mkdir()
    with pytest.raises(OutsideWorkspace):
        task.edit(f"{ws}-evil/x", b"evil", expected_sha=None)
    assert not os.listdir(tmp_path / "ws-evil")


@pytest.mark.parametrize("path", ["pipe", "sub", ".", "plain.txt/x", ".peri-x-1"])
def test_what_is_no_file_is_refused(task: Transaction, path: str) -> None:
    with pytest.raises(ToolError):
        task.edit(path, b"x", expected_sha=None)
    assert task.touched() == []


def test_closed_gate_refuses(task: Transaction, ws: Path) -> None:
    task.close_gate()
    with pytest.raises(ToolError, match="being stopped"):
        task.edit("crlf.txt", b"x", expected_sha=None)


def test_state_folder_inside_the_workspace_is_refused(ws: Path) -> None:
    with pytest.raises(RollbackError, match="inside the workspace"):
        Transaction.open(paths_in(ws / ".peri"), ws, "T")
    (ws.parent / "home").symlink_to(ws / "sub")
    with pytest.raises(RollbackError, match="inside the workspace"):
        Transaction.open(paths_in(ws.parent / "home"), ws, "T")


def test_task_id_cannot_be_a_path(paths: Paths, ws: Path) -> None:
    with pytest.raises(InputError):
        Transaction.open(paths, ws, "../x")


def test_second_writer_is_told_who_has_the_workspace(task: Transaction, paths: Paths, ws: Path) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    other = Transaction.open(paths, ws, "TASK2")
    assert other.root.read("bom.txt", 99).data == CONTENTS[b"bom.txt"]
    with pytest.raises(WorkspaceBusy) as raised:
        other.edit("bom.txt", b"x", expected_sha=None)
    assert raised.value.evidence["pid"] == os.getpid()
    other.rollback()
    assert (ws / "bom.txt").read_bytes() == CONTENTS[b"bom.txt"]
    task.rollback()
    third = Transaction.open(paths, ws, "TASK3")
    third.edit("bom.txt", b"x", expected_sha=None)
    assert third.rollback().complete


def test_journal_of_another_workspace_is_refused(task: Transaction, paths: Paths, ws: Path) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    task._end("left")
    ws.rename(ws.parent / "old")
    build_workspace(ws)
    (found,) = recover(paths)
    assert found.evidence is None
    assert "belongs to" in found.error
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]


@pytest.mark.parametrize("bad", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_journal_that_names_a_path_outside_is_refused(
    task: Transaction, paths: Paths, ws: Path, bad: str
) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    task._end("left")
    (file,) = paths.journal.glob("*/*.wal")
    import zlib

    lines = file.read_bytes().splitlines()
    lines = [line[9:].replace(b'"p":"crlf.txt"', b'"p":' + json.dumps(bad).encode()) for line in lines]
    file.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines))
    (found,) = recover(paths)
    assert "not inside the workspace" in found.error
    assert (ws / "crlf.txt").read_bytes() == b"x"


# Faults


class Fail:
    """Raises an error at the n-th call of a kind."""

    def __init__(self, number: int, *names: str, count: int = 1) -> None:
        self.number, self.names, self.left = number, names, count

    def __call__(self, name: str, args: tuple) -> None:
        if self.left and (not self.names or name in self.names):
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def probe():
    yield calls.set_probe
    calls.set_probe(None)


@pytest.mark.parametrize("name", ["open", "write", "fdatasync", "fsync"])
def test_full_store_changes_nothing(task: Transaction, paths: Paths, ws: Path, probe, name: str) -> None:
    before = survey(ws)
    probe(Fail(errno.ENOSPC, name, count=99))
    with pytest.raises(StoreFull):
        task.edit("crlf.txt", b"x", expected_sha=None)
    probe(None)
    assert differences(before, survey(ws)) == []
    task.edit("crlf.txt", b"y", expected_sha=None)
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


@pytest.mark.parametrize("skip", range(12))
def test_disk_error_at_any_write_leaves_old_or_is_put_back(
    task: Transaction, ws: Path, probe, skip: int
) -> None:
    before = survey(ws)
    seen = 0

    def fail(name: str, args: tuple) -> None:
        nonlocal seen
        seen += 1
        if seen > skip:
            raise OSError(errno.EIO, "Input/output error")

    probe(fail)
    for name in ("crlf.txt", "plain.txt", "new/one"):
        with suppress(StoreFull, ToolError):
            task.edit(name, b"x", expected_sha=None)
    probe(None)
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


def test_folder_that_cannot_be_written_is_blocked_and_the_rest_restored(
    task: Transaction, paths: Paths, ws: Path, probe
) -> None:
    before = survey(ws)
    task.edit("sub/deep/inner.txt", b"x", expected_sha=None)
    task.edit("crlf.txt", b"x", expected_sha=None)

    def refuse(name: str, args: tuple) -> None:
        if name == "create" and os.readlink(f"/proc/self/fd/{args[0]}").endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied")

    probe(refuse)
    evidence = task.rollback()
    probe(None)
    assert evidence.blocked == ["sub/deep/inner.txt: permission denied"]
    assert not evidence.complete
    assert not evidence.digest_ok
    assert evidence.restored == ["crlf.txt"]
    assert [one.task for one in pending(paths)] == ["TASK1"]
    (again,) = recover(paths)
    assert again.complete
    assert differences(before, survey(ws)) == []
    assert recover(paths) == []


def make_read_only(folder: Path) -> None:
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write read-only folders")


def test_read_only_folder_is_refused_at_the_edit(task: Transaction, ws: Path) -> None:
    make_read_only(ws / "hollow")
    with pytest.raises(ToolError, match="permission denied"):
        task.edit("hollow/x", b"x", expected_sha=None)
    assert task.touched() == []


def test_folder_made_read_only_since_is_blocked_then_recovered(
    task: Transaction, paths: Paths, ws: Path
) -> None:
    before = survey(ws)
    task.edit("sub/deep/inner.txt", b"x", expected_sha=None)
    task.edit("crlf.txt", b"x", expected_sha=None)
    make_read_only(ws / "sub/deep")
    evidence = task.rollback()
    (ws / "sub/deep").chmod(0o755)
    assert evidence.blocked == ["sub/deep/inner.txt: permission denied"]
    assert evidence.restored == ["crlf.txt"]
    assert recover(paths)[0].complete
    assert differences(before, survey(ws)) == []


def test_unreadable_file_is_refused_and_named(task: Transaction, ws: Path) -> None:
    (ws / "crlf.txt").chmod(0)
    if os.access(ws / "crlf.txt", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ToolError, match=r"crlf\.txt: cannot be changed: permission denied"):
        task.edit("crlf.txt", b"x", expected_sha=None)
    (ws / "crlf.txt").chmod(0o644)


def test_full_disk_while_restoring_uses_the_ballast(task: Transaction, paths: Paths, ws: Path, probe) -> None:
    before = survey(ws)
    task.edit("crlf.txt", b"x", expected_sha=None)
    assert list(paths.store.glob("*/ballast"))
    probe(Fail(errno.ENOSPC, "create"))
    assert task.rollback().complete
    assert not list(paths.store.glob("*/ballast"))
    assert differences(before, survey(ws)) == []


def test_skipped_restore_is_caught_by_the_proof(task: Transaction, ws: Path, paths: Paths) -> None:
    before = survey(ws)
    task.edit("crlf.txt", b"x", expected_sha=None)
    task.edit("bom.txt", b"x", expected_sha=None)
    faults.install(["rollback.skip_restore"])
    try:
        evidence = task.rollback()
    finally:
        faults.install([])
    assert not evidence.complete
    assert not evidence.digest_ok
    assert len(evidence.blocked) == 1
    assert recover(paths)[0].complete
    assert differences(before, survey(ws)) == []


def test_damaged_backup_is_reported_and_never_written(task: Transaction, paths: Paths, ws: Path) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    task.edit("bom.txt", b"x", expected_sha=None)
    (segment,) = paths.store.glob("*/seg/*.seg")
    data = segment.read_bytes()
    at = data.index(CONTENTS[b"crlf.txt"])
    segment.write_bytes(data[:at] + b"!" + data[at + 1 :])
    evidence = task.rollback()
    assert (ws / "crlf.txt").read_bytes() == b"x"
    assert (ws / "bom.txt").read_bytes() == CONTENTS[b"bom.txt"]
    assert len(evidence.blocked) == 1
    assert "damaged" in evidence.blocked[0]
    assert not evidence.complete


def test_journal_holds_the_whole_story(task: Transaction, paths: Paths, ws: Path) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    (file,) = paths.journal.glob("*/*.wal")
    story = read(file)
    assert story.begin is not None
    assert story.begin.owner.pid == os.getpid()
    assert story.begin.path == os.fsencode(ws)
    assert story.ended == ""
    task.rollback()
    assert read(file).ended == "restored"


def test_rollback_that_the_disk_broke_off_can_be_called_again(task: Transaction, ws: Path, probe) -> None:
    before = survey(ws)
    task.edit("crlf.txt", b"x", expected_sha=None)
    probe(Fail(errno.EIO, "syncfs"))
    with pytest.raises(OSError, match="Input/output error"):
        task.rollback()
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


def test_end_is_recorded_on_a_full_disk_by_giving_up_the_ballast(
    task: Transaction, paths: Paths, ws: Path, probe
) -> None:
    task.edit("crlf.txt", b"x", expected_sha=None)
    probe(Fail(errno.ENOSPC, "write"))
    task.keep()
    assert recover(paths) == []
    assert (ws / "crlf.txt").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (("plain.txt",), b"user"),
        (("plain.txt", "sub/second name"), b"user"),
    ],
)
def test_users_bytes_in_a_file_with_two_names_stay(
    task: Transaction, ws: Path, names: tuple, change: bytes
) -> None:
    """The agent takes one name away; the user writes through the other: that stays, the taken name comes back."""
    task.edit(names[0], None, expected_sha=None)
    (ws / "sub/second name").write_bytes(change)
    if len(names) > 1:
        task.edit("sub/second name", b"agent", expected_sha=None)
    evidence = task.rollback()
    assert evidence.complete
    assert (ws / "sub/second name").read_bytes() == change
    assert (ws / "plain.txt").read_bytes() == CONTENTS[b"plain.txt"]


def test_what_an_editor_writes_into_the_displaced_file_is_kept(
    task: Transaction, paths: Paths, ws: Path
) -> None:
    with open(ws / "crlf.txt", "r+b") as editor:
        task.edit("crlf.txt", b"agent", expected_sha=None)
        editor.write(b"late words")
    assert any(data.startswith(b"late words") for data in trash(paths))
    task.rollback()
    assert any(data.startswith(b"late words") for data in trash(paths))
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]


def test_file_system_without_exchange_puts_back_too(
    task: Transaction, ws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_renameat2", lambda *_: False)
    before = survey(ws)
    for name in ("crlf.txt", "plain.txt", "private", "new/one"):
        task.edit(name, b"agent", expected_sha=None)
    task.edit("bom.txt", None, expected_sha=None)
    (ws / "new/two").write_bytes(b"user")
    with pytest.raises(FileChanged):
        task.edit("new/two", b"agent", expected_sha="")
    (ws / "new/two").unlink()
    assert task.rollback().complete
    assert differences(before, survey(ws)) == []


@pytest.mark.parametrize("call", ["exchange", "move_new"])
def test_edit_that_fails_leaves_no_temporary_file(task: Transaction, ws: Path, probe, call: str) -> None:
    before = survey(ws, times=False)
    for name in ("crlf.txt", "new.txt"):
        probe(Fail(errno.EPERM, call))
        with suppress(ToolError):
            task.edit(name, b"x", expected_sha=None)
        probe(None)
        assert not list(ws.glob(".peri-*"))
    task.rollback()
    assert differences(before, survey(ws, times=False)) == []
