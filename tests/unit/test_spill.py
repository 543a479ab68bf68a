"""The file of long output: bounded, private, never waited for, gone after a week; and the text that is shown."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.processes.shown import ShownText
from peri_tui.agent.processes.spill import Spill, SpillWriter, spill_path, sweep_spill

pytestmark = pytest.mark.unit


@pytest.fixture
def writer() -> Iterator[SpillWriter]:
    found = SpillWriter()
    yield found
    found.close()


def test_everything_is_kept_in_a_private_file(tmp_path: Path, writer: SpillWriter) -> None:
    spill = Spill(tmp_path / "spill" / "T" / "c.log", writer)
    assert not spill.begun
    for _ in range(10):
        spill.add(b"x" * 1000)
    spill.close()
    writer.close()
    assert spill.path.read_bytes() == b"x" * 10_000
    assert stat.S_IMODE(spill.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spill.path.parent.stat().st_mode) == 0o700
    assert (spill.kept, spill.dropped, spill.failure) == (10_000, 0, "")
    assert not open_files(spill.path)


def open_files(path: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [one for one in found if one == str(path)]


def test_beyond_the_cap_bytes_are_counted_not_kept(tmp_path: Path, writer: SpillWriter) -> None:
    spill = Spill(tmp_path / "T" / "c.log", writer, cap=15)
    for _ in range(4):
        spill.add(b"12345 7890")
    spill.close()
    writer.close()
    assert spill.path.read_bytes() == b"12345 789012345"
    assert (spill.kept, spill.dropped) == (15, 25)


class SlowDisk(SpillWriter):
    """A writer whose thread does nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__(length=2)
        self.go = threading.Event()

    def _run(self) -> None:
        self.go.wait(10)
        super()._run()


def test_a_slow_disk_drops_and_counts_and_marks_the_gap(tmp_path: Path) -> None:
    writer = SlowDisk()
    spill = Spill(tmp_path / "T" / "c.log", writer)
    began = time.monotonic()
    for piece in (b"one ", b"two ", b"lost ", b"lost too "):
        spill.add(piece)
    assert time.monotonic() - began < 1
    assert (spill.kept, spill.dropped) == (8, 14)
    writer.go.set()
    deadline = time.monotonic() + 10
    while not spill.all_written and time.monotonic() < deadline:
        time.sleep(0.001)
    spill.add(b"three")
    spill.close()
    writer.close()
    assert spill.path.read_bytes() == b"one two \n[14 bytes not kept]\nthree"


def test_a_file_that_is_closed_while_the_queue_is_full_is_closed_all_the_same(tmp_path: Path) -> None:
    writer = SlowDisk()
    spill = Spill(tmp_path / "T" / "c.log", writer)
    spill.add(b"one ")
    spill.add(b"two ")
    spill.close()
    writer.go.set()
    deadline = time.monotonic() + 10
    while (not spill.all_written or open_files(spill.path)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert spill.path.read_bytes() == b"one two "
    assert not open_files(spill.path)
    writer.close()


def test_a_disk_that_refuses_is_remembered_not_raised(tmp_path: Path, writer: SpillWriter) -> None:
    (tmp_path / "file").write_text("")
    spill = Spill(tmp_path / "file" / "T" / "c.log", writer)
    spill.add(b"x")
    spill.close()
    writer.close()
    assert spill.failure == "File exists"


def test_a_planted_link_is_not_followed(tmp_path: Path, writer: SpillWriter) -> None:
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "c.log").symlink_to(tmp_path / "precious")
    spill = Spill(tmp_path / "T" / "c.log", writer)
    spill.add(b"x")
    spill.close()
    writer.close()
    assert spill.failure == "File exists"
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("call", "name"),
    [("call_1", "call_1.log"), ("../../etc/passwd", "etcpasswd.log"), ("", "7.log"), ("ü/\0", "7.log"), ("x" * 999, "x" * 80 + ".log")],
)  # fmt: skip
def test_a_name_from_a_model_stays_in_the_folder(tmp_path: Path, call: str, name: str) -> None:
    assert spill_path(tmp_path, "../T", call, 7) == tmp_path / "T" / name


def test_a_name_that_is_taken_gets_the_number(tmp_path: Path) -> None:
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "c.log").write_text("")
    assert spill_path(tmp_path, "T", "c", 7).name == "c-7.log"


def test_after_a_week_files_and_empty_folders_go_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "spill"
    now = time.time()
    for task, age in (("old", 8), ("new", 6)):
        (root / task).mkdir(parents=True)
        (root / task / "c.log").write_text("x")
        os.utime(root / task / "c.log", (now - age * 86400,) * 2)
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "c.log").write_text("x")
    os.utime(outside / "c.log", (0, 0))
    (root / "link").symlink_to(outside)
    assert sweep_spill(root, now) == 1
    assert sorted(path.name for path in root.iterdir()) == ["link", "new"]
    assert (outside / "c.log").exists()
    assert sweep_spill(tmp_path / "none", now) == 0


# --- what is shown ----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60), st.integers(1, 7))
def test_any_cut_of_the_bytes_gives_the_same_text(text: str, size: int) -> None:
    data = text.encode()
    shown = ShownText()
    parts = [shown.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert "".join(parts) == text


@given(st.lists(st.text("ab\n\r", max_size=30), max_size=10), st.integers(1, 8))
def test_no_line_is_longer_than_the_width(parts: list[str], width: int) -> None:
    shown = ShownText(width)
    text = "".join(shown.feed(part.encode()) for part in parts)
    for line in text.replace("\r", "\n").split("\n"):
        assert len(line.partition(" … [")[0]) <= width


def test_a_line_without_end_says_how_much_of_it_is_hidden() -> None:
    shown = ShownText(5)
    assert shown.feed(b"abcdefgh") == "abcde"
    assert shown.feed(b"ijk") == ""
    assert shown.feed(b"l\nnext\n") == " … [7 characters of this line not shown]\nnext\n"


def test_a_gap_ends_a_character_that_was_cut_and_is_said() -> None:
    shown = ShownText()
    assert shown.feed("ä".encode()[:1]) == ""
    assert shown.feed(b"x", 1000) == "\n[1000 bytes not shown]\nx"
