"""SIGKILL before any file-changing call of a task or of its recovery, torn and damaged journals, races with a saver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.journal import read, refuse_damaged
from peri_tui.agent.rollback.recover import recover, show
from peri_tui.agent.rollback.transaction import Transaction
from peri_tui.errors import FileChanged, JournalDamaged, ToolError
from tests.doubles.workspace import CONTENTS, build_workspace, differences, paths_in, survey

pytestmark = pytest.mark.crash

ROOT = Path(__file__).parents[2]


def sweep(tmp_path: Path, scenario: str, first: int, step: int, limit: int) -> int:
    words = [sys.executable, "-m", "tests.doubles.rollback_driver", scenario, str(tmp_path / "sweep")]
    words += [str(number) for number in (first, step, limit)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    return result["points"]


@pytest.mark.parametrize(
    ("scenario", "step", "least"),
    [("work", 5, 25), ("user", 7, 12), ("store", 11, 8), ("undo", 9, 12), ("recovery", 41, 20)],
)
def test_killed_anywhere_then_recovered(tmp_path: Path, scenario: str, step: int, least: int) -> None:
    assert sweep(tmp_path, scenario, 1, step, 2000) >= least


def test_killed_four_times_in_a_row(tmp_path: Path) -> None:
    assert sweep(tmp_path, "many", 1, 1, 20) == 20


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["work", "user", "store", "undo", "recovery"])
def test_killed_at_every_point(tmp_path: Path, scenario: str) -> None:
    assert sweep(tmp_path, scenario, 1, 1, 2000) > 100


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_killed_four_times_in_a_row_five_hundred_times(tmp_path: Path) -> None:
    assert sweep(tmp_path, "many", 1, 1, 500) == 500


# Journals that a crash or a disk damaged


def left_task(tmp_path: Path):
    """Return (workspace, paths, survey before, journal file) of a task whose process is gone."""
    ws, paths = build_workspace(tmp_path / "ws"), paths_in(tmp_path / "home")
    before = survey(ws)
    task = Transaction.open(paths, ws, "LEFT")
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.edit("bom.txt", b"agent", expected_sha=None)
    task._end("left")
    (file,) = paths.journal.glob("*/*.wal")
    return ws, paths, before, file


def test_last_line_torn_at_each_byte_is_absent(tmp_path: Path) -> None:
    ws, paths, before, file = left_task(tmp_path)
    data = file.read_bytes()
    records = read(file).records
    last = data[:-1].rfind(b"\n") + 1
    for cut in range(last, len(data)):
        file.write_bytes(data[:cut])
        story = read(file)
        assert (story.damage, story.records) == (None, records[:-1])
    file.write_bytes(data[:-3])
    (found,) = recover(paths)
    assert found.complete
    assert differences(before, survey(ws)) == []


def test_torn_intent_was_never_acted_on(tmp_path: Path) -> None:
    """A process that dies while it writes an intent has changed nothing for it."""
    ws, paths = build_workspace(tmp_path / "ws"), paths_in(tmp_path / "home")
    before = survey(ws)
    task = Transaction.open(paths, ws, "LEFT")
    task.edit("crlf.txt", b"agent", expected_sha=None)

    class Died(Exception):
        pass

    def die(name: str, args: tuple) -> None:
        if name == "write" and b'"k":"intent"' in bytes(args[1]):
            os.write(args[0], bytes(args[1])[:60])
            raise Died

    calls.set_probe(die)
    with pytest.raises(Died):
        task.edit("bom.txt", b"agent", expected_sha=None)
    calls.set_probe(None)
    task._end("left")
    assert (ws / "bom.txt").read_bytes() == CONTENTS[b"bom.txt"]
    assert recover(paths)[0].complete
    assert differences(before, survey(ws)) == []


def test_damage_in_the_middle_names_the_byte_and_restores_only_what_is_proven(tmp_path: Path) -> None:
    ws, paths, _, file = left_task(tmp_path)
    data = file.read_bytes()
    at = data.index(b"bom.txt")
    line = data[:at].rfind(b"\n") + 1
    file.write_bytes(data[:at] + b"B" + data[at + 1 :])
    with pytest.raises(JournalDamaged) as raised:
        refuse_damaged(file, read(file))
    assert raised.value.evidence["offset"] == line
    (found,) = recover(paths)
    assert not found.complete
    assert f"damaged at byte {line}" in found.evidence.blocked[0]
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]
    assert (ws / "bom.txt").read_bytes() == b"agent"
    assert file.read_bytes().startswith(data[:at])


def test_every_flipped_byte_is_noticed_and_never_makes_a_wrong_file(tmp_path: Path) -> None:
    ws, paths, _, file = left_task(tmp_path)
    data = file.read_bytes()
    good = {b"crlf.txt": (CONTENTS[b"crlf.txt"], b"agent"), b"bom.txt": (CONTENTS[b"bom.txt"], b"agent")}
    for at in range(0, len(data), 97):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert [one.complete for one in recover(paths)] == [False]
        for name, allowed in good.items():
            assert (ws / os.fsdecode(name)).read_bytes() in allowed


def test_flipped_byte_in_a_backup_is_blocked(tmp_path: Path) -> None:
    ws, paths, _, _ = left_task(tmp_path)
    (segment,) = paths.store.glob("*/seg/*.seg")
    data = segment.read_bytes()
    at = data.index(CONTENTS[b"bom.txt"])
    segment.write_bytes(data[:at] + b"!" + data[at + 1 :])
    (found,) = recover(paths)
    assert not found.complete
    assert len(found.evidence.blocked) == 1
    assert (ws / "bom.txt").read_bytes() == b"agent"
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]


# Recovery


def test_user_edit_between_crash_and_recovery_stays(tmp_path: Path) -> None:
    ws, paths, _, _ = left_task(tmp_path)
    (ws / "crlf.txt").write_bytes(b"user")
    (found,) = recover(paths)
    assert found.complete
    assert found.evidence.conflicts == ["crlf.txt"]
    assert (ws / "crlf.txt").read_bytes() == b"user"
    assert show(paths, "LEFT", "crlf.txt") == CONTENTS[b"crlf.txt"]


def test_recovery_leaves_a_living_owner_alone(tmp_path: Path) -> None:
    ws, paths = build_workspace(tmp_path / "ws"), paths_in(tmp_path / "home")
    task = Transaction.open(paths, ws, "LIVES")
    task.edit("crlf.txt", b"agent", expected_sha=None)
    assert recover(paths, is_owner_dead=lambda owner: True) == []
    assert (ws / "crlf.txt").read_bytes() == b"agent"
    task.rollback()


def test_recovery_waits_for_proof_of_death(tmp_path: Path) -> None:
    ws, paths, before, file = left_task(tmp_path)
    data = file.read_bytes()
    import zlib

    lines = [line[9:] for line in data.splitlines()]
    lines[0] = lines[0].replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % os.getppid())
    file.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines))
    assert recover(paths, is_owner_dead=lambda owner: False) == []
    assert recover(paths, only_task="OTHER", is_owner_dead=lambda owner: True) == []
    assert recover(paths, only_task="LEFT", is_owner_dead=lambda owner: True)[0].complete
    assert differences(before, survey(ws)) == []


def test_missing_workspace_is_named(tmp_path: Path) -> None:
    ws, paths, _, _ = left_task(tmp_path)
    ws.rename(tmp_path / "moved")
    (found,) = recover(paths)
    assert found.evidence is None
    assert str(ws) in found.error
    assert "\n" not in found.error


def test_command_cut_off_by_a_crash_is_listed(tmp_path: Path) -> None:
    ws, paths = build_workspace(tmp_path / "ws"), paths_in(tmp_path / "home")
    # What changed within one timer tick before the command is listed too: let the clock go past the files' stamps.
    newest = max(path.lstat().st_ctime_ns for path in ws.rglob("*"))
    while time.time_ns() < newest + 20_000_000:
        time.sleep(0.001)
    task = Transaction.open(paths, ws, "LEFT")
    task.edit("crlf.txt", b"agent", expected_sha=None)
    task.window_open()
    (ws / "by command").write_bytes(b"x")
    task._end("left")
    (found,) = recover(paths)
    assert found.evidence.not_restored == ["by command"]
    assert any("cannot be listed" in note for note in found.evidence.notes)
    assert (ws / "crlf.txt").read_bytes() == CONTENTS[b"crlf.txt"]


# Races


SAVER = """
import os, sys, time, random
folder, trials, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
for trial in range(trials):
    sys.stdin.readline()
    end = time.perf_counter() + rng.random() * 0.0015
    new = os.path.join(folder, "file.new")
    with open(new, "wb") as file:
        file.write(b"user %d" % trial)
    while time.perf_counter() < end:
        pass
    os.rename(new, os.path.join(folder, "file"))
    sys.stdout.write("saved\\n")
    sys.stdout.flush()
"""


def race(
    folder: Path, trials: int, seed: int, act: Callable[[int], None], judge: Callable[[int], None]
) -> None:
    """Let another process save ``folder/file`` by rename while ``act`` runs, then ``judge``."""
    words = [sys.executable, "-c", SAVER, str(folder), str(trials), str(seed)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as saver:
        for trial in range(trials):
            saver.stdin.write(b"go\n")
            saver.stdin.flush()
            act(trial)
            assert saver.stdout.readline() == b"saved\n"
            judge(trial)


@pytest.mark.parametrize("operation", ["edit", "rollback"])
def test_users_save_during_an_exchange_is_never_lost(tmp_path: Path, operation: str) -> None:
    ws, paths = tmp_path / "ws", paths_in(tmp_path / "home")
    ws.mkdir()
    file = ws / "file"
    state: dict[str, Transaction] = {}
    seen = {"before": 0, "after": 0, "met": 0}

    def prepare(trial: int) -> None:
        file.write_bytes(b"old")
        state["task"] = Transaction.open(paths, ws, f"T{trial}")
        if operation == "rollback":
            state["task"].edit("file", b"agent", expected_sha=None)

    def act(trial: int) -> None:
        if operation == "rollback":
            state["task"].rollback()
            return
        try:
            state["task"].edit("file", b"agent", expected_sha=None)
        except FileChanged:
            seen["met"] += 1

    def judge(trial: int) -> None:
        wanted = b"user %d" % trial
        now = file.read_bytes()
        seen["after" if now == wanted else "before"] += 1
        # Either theirs is in place, or the edit came after it and gave it back at the end of the task.
        if operation == "edit":
            state["task"].rollback()
        assert file.read_bytes() == wanted
        assert os.listdir(ws) == ["file"]
        if trial + 1 < 150:
            prepare(trial + 1)

    prepare(0)
    race(ws, 150, 7, act, judge)
    assert seen["after"] > 0


SWAPPER = """
import os, sys
ws, outside = sys.argv[1], sys.argv[2]
inner, aside, link = os.path.join(ws, "d"), os.path.join(ws, "aside"), os.path.join(ws, "link")
os.symlink(outside, link)
number = 0
def move(source, target):
    global number
    try:
        os.rename(source, target)
    except OSError:
        # An edit made the folder anew while it was away; put that one aside for good.
        number += 1
        os.rename(target, "%s.%d" % (target, number))
        os.rename(source, target)
print("ready", flush=True)
while os.getppid() == int(sys.argv[3]):
    move(inner, aside)
    move(link, inner)
    move(inner, link)
    move(aside, inner)
"""


def test_no_write_follows_a_link_swapped_in(tmp_path: Path) -> None:
    ws, outside, paths = tmp_path / "ws", tmp_path / "outside", paths_in(tmp_path / "home")
    (ws / "d").mkdir(parents=True)
    outside.mkdir()
    (outside / "f").write_bytes(b"canary")
    words = [sys.executable, "-c", SWAPPER, str(ws), str(outside), str(os.getpid())]
    refused = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout.readline() == b"ready\n"
        try:
            task = Transaction.open(paths, ws, "RACE")
            for number in range(300):
                try:
                    task.edit("d/f", b"agent %d" % number, expected_sha=None)
                except ToolError:
                    refused += 1
                with suppress(ToolError):
                    assert task.root.read("d/f", 100).data != b"canary"
        finally:
            swapper.kill()
    assert refused > 0
    assert os.listdir(outside) == ["f"]
    assert (outside / "f").read_bytes() == b"canary"
    task.rollback()
    assert (outside / "f").read_bytes() == b"canary"
