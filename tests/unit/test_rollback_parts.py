"""The parts of the rollback layer alone: store, journal, cleanups, diff, stat tables, who is dead."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.rollback import place, vault
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.cleanup import Cleanups
from peri_tui.agent.rollback.diff import describe
from peri_tui.agent.rollback.journal import (
    Begin,
    Committed,
    Displaced,
    Done,
    Intent,
    Journal,
    Owner,
    RollbackBegun,
    RollbackEnded,
    Void,
    encode,
    read,
)
from peri_tui.agent.rollback.node import NONE, State
from peri_tui.agent.rollback.plan import digest, reduce
from peri_tui.agent.rollback.scan import scan
from peri_tui.agent.rollback.segments import BadBlob, SegmentStore
from peri_tui.agent.rollback.window import Window
from peri_tui.errors import StoreFull

pytestmark = pytest.mark.unit


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Segments


def test_store_gives_back_what_it_got_also_after_opening_again(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "seg")
    assert not (tmp_path / "seg").exists()
    contents = [b"", b"a", b"a" * 3_000_000, b"\0\xff"]
    names = [store.put(data) for data in contents]
    store.sync()
    for opened in (store, SegmentStore(tmp_path / "seg")):
        assert [opened.get(name) for name in names] == contents
        opened.close()
    assert os.listdir(tmp_path / "seg") == ["0000.seg"]


def test_segment_format_is_as_documented(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "seg")
    store.put(b"hello")
    store.close()
    digest_ = hashlib.sha256(b"hello").digest()
    wanted = b"PSEG" + struct.pack("<I", 1) + struct.pack("<IB", 5, 0) + digest_ + b"hello"
    assert (tmp_path / "seg/0000.seg").read_bytes() == wanted


def test_same_content_is_stored_once(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "seg")
    for _ in range(3):
        store.put(b"x" * 1000)
    store.close()
    assert (tmp_path / "seg/0000.seg").stat().st_size < 1100


@pytest.mark.parametrize("cut", [1, 10, 36, 37, 40, 41])
def test_torn_tail_is_absent_and_the_store_goes_on(tmp_path: Path, cut: int) -> None:
    store = SegmentStore(tmp_path / "seg")
    first, second = store.put(b"first"), store.put(b"second")
    store.close()
    file = tmp_path / "seg/0000.seg"
    file.write_bytes(file.read_bytes()[:-cut])
    store = SegmentStore(tmp_path / "seg")
    assert store.get(first) == b"first"
    with pytest.raises(BadBlob, match="missing"):
        store.get(second)
    again = store.put(b"second")
    store.close()
    store = SegmentStore(tmp_path / "seg")
    assert [store.get(name) for name in (first, again)] == [b"first", b"second"]
    store.close()


def test_damaged_content_is_reported_and_stored_anew(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "seg")
    name = store.put(b"precious")
    store.close()
    file = tmp_path / "seg/0000.seg"
    file.write_bytes(file.read_bytes().replace(b"precious", b"preciouS"))
    store = SegmentStore(tmp_path / "seg")
    with pytest.raises(BadBlob, match="damaged"):
        store.get(name)
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    with pytest.raises(BadBlob):
        store.copy(name, out)
    assert os.fstat(out).st_size == 0
    assert store.put(b"precious") == name
    assert store.get(name) == b"precious"
    store.copy(name, out)
    assert (tmp_path / "out").read_bytes() == b"precious"
    os.close(out)
    store.close()


def test_damaged_length_loses_no_byte_of_the_file(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "seg")
    store.put(b"one")
    store.close()
    file = tmp_path / "seg/0000.seg"
    data = bytearray(file.read_bytes())
    data[11] = 0x7F
    file.write_bytes(data)
    store = SegmentStore(tmp_path / "seg")
    name = store.put(b"two")
    store.sync()
    assert store.get(name) == b"two"
    assert file.read_bytes() == bytes(data)
    store.close()


def test_large_file_is_streamed(tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    (tmp_path / "big").write_bytes(data)
    store = SegmentStore(tmp_path / "seg")
    fd = os.open(tmp_path / "big", os.O_RDONLY)
    assert store.put_fd(fd) == (sha(data), len(data))
    os.close(fd)
    assert store.get(sha(data)) == data
    store.close()


# Journal


def begin() -> Begin:
    return Begin(dev=1, ino=2, task="T", owner=Owner(3, 4, "boot"), wall=5).named(b"/ws\xff")


def test_line_is_crc_space_json(tmp_path: Path) -> None:
    line = encode(Done(seq=7))
    assert line == b"%08x %s\n" % (zlib.crc32(line[9:-1]), line[9:-1])
    assert line[9:-1] == b'{"k":"done","seq":7}'


def test_journal_reads_what_was_written_and_odd_names(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "T.wal", begin())
    record = Displaced(trash="1", why="x").named(b"a\xff\nb")
    journal.append(record, Committed(), sync=True)
    story = journal.story()
    assert story.begin == begin()
    assert story.begin.path == b"/ws\xff"
    assert [getattr(one, "path", None) for one in story.records[1:]] == [b"a\xff\nb", None]
    assert story.ended == "committed"
    journal.close()


def test_open_journal_is_locked(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "T.wal", begin())
    assert Journal.resume(tmp_path / "T.wal") is None
    journal.close()
    again, story = Journal.resume(tmp_path / "T.wal") or pytest.fail("locked")
    assert story.ended == ""
    again.close()


def test_second_journal_of_a_task_is_refused(tmp_path: Path) -> None:
    Journal.create(tmp_path / "T.wal", begin()).close()
    with pytest.raises(StoreFull):
        Journal.create(tmp_path / "T.wal", begin())
    assert read(tmp_path / "T.wal").begin == begin()


def test_torn_line_is_cut_before_the_next_is_written(tmp_path: Path) -> None:
    Journal.create(tmp_path / "T.wal", begin()).close()
    with (tmp_path / "T.wal").open("ab") as file:
        file.write(encode(Done(seq=1))[:-4])
    journal, _ = Journal.resume(tmp_path / "T.wal") or pytest.fail("locked")
    journal.append(Done(seq=2), sync=False)
    assert journal.story().damage is None
    assert journal.story().records[1:] == [Done(seq=2)]
    journal.close()


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_damage_or_a_torn_end(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    data = encode(begin()) + encode(Done(seq=1)) + encode(Committed())
    at %= len(data)
    file = tmp_path_factory.mktemp("flip") / "T.wal"
    file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
    story = read(file)
    assert len(story.records) < 3
    assert story.damage is not None or at == len(data) - 1
    assert story.ended == ""


def test_how_a_journal_ended() -> None:
    from peri_tui.agent.rollback.journal import Story

    def ended(*records: object) -> str:
        return Story([begin(), *records], 0).ended

    assert ended() == ""
    assert ended(Committed()) == "committed"
    assert ended(RollbackBegun(mode="rollback")) == ""
    assert ended(RollbackBegun(mode="rollback"), RollbackEnded(complete=False)) == ""
    assert ended(RollbackBegun(mode="recover"), RollbackEnded(complete=True)) == "restored"
    assert ended(Committed(), RollbackBegun(mode="undo")) == ""
    assert ended(Committed(), RollbackBegun(mode="undo"), RollbackEnded(complete=True)) == "undone"


# Reducing


def file_state(text: str) -> State:
    return State(kind="file", sha=text, ino=9)


def intent(seq: int, path: bytes, pre: State, post: State, **more: object) -> Intent:
    return Intent(seq=seq, pre=pre, post=post, **more).named(path)


def test_reduce_takes_oldest_before_and_newest_after() -> None:
    a, b, c = map(file_state, "abc")
    (item,) = reduce([begin(), intent(1, b"f", a, b), Done(seq=1), intent(2, b"f", b, c), Done(seq=2)])
    assert (item.base, item.ours) == (a, [c])
    (item,) = reduce([begin(), intent(1, b"f", a, b), Done(seq=1), intent(2, b"f", b, c)])
    assert (item.base, item.ours) == (a, [c, b])
    (item,) = reduce([begin(), intent(1, b"f", a, b), Done(seq=1), intent(2, b"f", b, c), Void(seq=2)])
    assert (item.base, item.ours) == (a, [b])
    assert reduce([begin(), intent(1, b"f", NONE, b), Void(seq=1)]) == []


def test_reduce_goes_back_to_somebody_elses_version() -> None:
    a, b, user, c = map(file_state, "abuc")
    (item,) = reduce([begin(), intent(1, b"f", a, b), Done(seq=1), intent(2, b"f", user, c), Done(seq=2)])
    assert (item.base, item.ours) == (user, [c])


def test_reduce_follows_names_of_one_inode() -> None:
    a, b, c = map(file_state, "abc")
    records = [begin(), intent(1, b"f", a, b, in_place=True), Done(seq=1)]
    one, two = reduce([*records, intent(2, b"g", b, c, in_place=True), Done(seq=2)])
    assert (one.base, one.newest, two.base, two.newest) == (a, c, a, c)


def test_digest_tells_any_difference() -> None:
    a, b = file_state("a"), file_state("b")
    assert digest([(b"f", a), (b"g", b)]) == digest([(b"g", b), (b"f", a)])
    assert (
        len(
            {
                digest([(b"f", a)]),
                digest([(b"f", b)]),
                digest([(b"g", a)]),
                digest([(b"f", NONE)]),
                digest([]),
            }
        )
        == 5
    )


# A write in place that was cut off


@given(
    old=st.binary(max_size=30), new=st.binary(max_size=30), at=st.integers(0, 30), again=st.integers(0, 30)
)
def test_mixtures_of_two_contents_are_recognised(old: bytes, new: bytes, at: int, again: int) -> None:
    def cut(data: bytes, by: bytes, upto: int) -> bytes:
        return by[:upto] + data[len(by[:upto]) :]

    half = cut(old, new, at)
    assert place.is_mixture(half, old, new)
    assert place.is_mixture(cut(half, old, again), old, new)


def test_other_contents_are_no_mixture() -> None:
    assert not place.is_mixture(b"user", b"old text", b"new text")
    assert not place.is_mixture(b"longer than both of them", b"old", b"new")


# Cleanups


async def test_cleanups_run_newest_first_and_one_that_fails_stops_none() -> None:
    order: list[str] = []
    cleanups = Cleanups()

    async def note(name: str) -> None:
        order.append(name)
        if name == "b":
            raise ValueError("broken\nbadly")

    for name in "abc":
        cleanups.register(name, lambda name=name: note(name), 1.0)
    results = await cleanups.run()
    assert order == ["c", "b", "a"]
    assert [(one.name, one.ok, one.error) for one in results] == [
        ("c", True, ""), ("b", False, "ValueError: broken"), ("a", True, ""),
    ]  # fmt: skip
    assert await cleanups.run() == []


async def test_cleanup_over_its_deadline_is_cancelled_and_named() -> None:
    cleanups = Cleanups()
    cleanups.register("after", lambda: asyncio.sleep(0), 1.0)
    cleanups.register("slow", lambda: asyncio.sleep(3600), 0.02)
    slow, after = await cleanups.run()
    assert (slow.ok, after.ok) == (False, True)
    assert "did not end within 0.02 s" in slow.error
    assert not cleanups.abandoned


async def test_cleanup_that_ignores_its_cancellation_is_left_behind() -> None:
    cleanups = Cleanups()
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    cleanups.register("after", lambda: asyncio.sleep(0), 1.0)
    cleanups.register("stubborn", stubborn, 0.02)
    stuck, after = await cleanups.run()
    assert "ignores its cancellation" in stuck.error
    assert after.ok
    (left,) = cleanups.abandoned
    release.set()
    await asyncio.wait({left})
    await asyncio.sleep(0)
    assert not cleanups.abandoned


async def test_cleanup_that_cannot_even_start_is_reported() -> None:
    cleanups = Cleanups()

    def broken() -> None:
        raise OSError("no")

    cleanups.register("broken", broken, 1.0)  # type: ignore[arg-type]
    (result,) = await cleanups.run()
    assert (result.ok, result.error) == (False, "OSError: no")


# Diffs


LINES = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=12).map("\n".join).map(str.encode)


@given(old=LINES, new=LINES)
def test_counts_agree_with_the_lines_of_the_diff(old: bytes, new: bytes) -> None:
    change = describe("f", "modified", old, new)
    rows = [row for row in change.diff.splitlines() if not row.startswith("\\")]
    assert change.added_lines == sum(row.startswith("+") for row in rows)
    assert change.removed_lines == sum(row.startswith("-") for row in rows)
    assert (change.diff == "") == (old == new)


def test_huge_and_binary_changes_are_described_quickly() -> None:
    old = b"".join(b"old %d\n" % number for number in range(20_000))
    new = b"".join(b"new %d\n" % number for number in range(20_000))
    assert describe("f", "modified", old, new).added_lines == 20_000
    assert describe("f", "modified", b"\0", b"x").diff == "binary file\n"
    assert describe("f", "modified", b"x" * 3_000_000, b"x").diff == "too large to show\n"


def test_missing_newline_at_the_end_is_shown() -> None:
    assert describe("f", "modified", b"a\n", b"a").diff == "@@ -1 +1 @@\n-a\n+a\n\\ no newline at the end\n"


# Stat tables


def test_scan_over_its_budget_says_so(tmp_path: Path) -> None:
    for folder in range(3):
        (tmp_path / f"d{folder}").mkdir()
        for number in range(5):
            (tmp_path / f"d{folder}/{number}").write_bytes(b"")
    with Root(tmp_path) as root:
        table = scan(root, budget=5)
        assert table.cut
        assert "more than 5 files" in table.notes[0]
        window = Window(1, table)
        (tmp_path / "d0/new").write_bytes(b"")
        changes, notes = window.compare(root)
        assert all(change.kind == "modified" for change in changes)
        assert notes
        assert len(scan(root).rows) == 19


def test_touch_back_is_still_seen(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with Root(tmp_path) as root:
        window = Window(1, scan(root))
        info = os.stat(tmp_path / "f")
        (tmp_path / "f").write_bytes(b"new")
        os.utime(tmp_path / "f", ns=(info.st_atime_ns, info.st_mtime_ns))
        changes, _ = window.compare(root)
    assert [(change.path, change.kind) for change in changes] == [("f", "modified")]


# Owners


def test_only_a_proven_death_counts() -> None:
    me = vault.this_process("i")
    assert not vault.owner_is_dead(me)
    assert vault.owner_is_dead(Owner(me.pid, me.start, "another boot"))
    assert vault.owner_is_dead(Owner(me.pid, me.start + 1, me.boot))
    assert vault.owner_is_dead(Owner(2**22 + 1, 1, me.boot))
    assert not vault.owner_is_dead(Owner(1, 0, me.boot))
