"""The event log: merged, numbered, in order, bounded; and what it does when the store does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.scheduler import events as events_module
from peri_tui.agent.scheduler.events import HIGH_EVENTS, MERGED_CHARS, EventLog, merge
from peri_tui.agent.scheduler.store import StateStore, TaskRow
from peri_tui.core.messages import Delta, TaskEnded, TaskEvent, ToolStarted, encode
from peri_tui.core.states import TaskState
from peri_tui.errors import IllegalTransition, StaleEpoch, StoreUnavailable
from peri_tui.log import Log

pytestmark = pytest.mark.unit

TASK = "T1"


def delta(text: str, off: int = 0, part: str = "p", ch: str = "text") -> Delta:
    return Delta(task=TASK, ch=ch, part=part, text=text, off=off)


def tool(call: str) -> ToolStarted:
    return ToolStarted(task=TASK, call=call, name="shell")


def row(last_seq: int = 0) -> TaskRow:
    return TaskRow(
        TASK, "S", "/w", "p", TaskState.RUNNING, 2, 1, "A", "", "", b"{}", 0, 0, 0, last_seq, False
    )


class FakeStore:
    """Numbers events in memory; ``gate`` holds appends back, ``failures`` are raised one by one."""

    def __init__(self) -> None:
        self.kept: list[TaskEvent] = []
        self.batches: list[int] = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, task: str, events: Sequence[TaskEvent], *, epoch: int) -> list[TaskEvent]:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        for event in events:
            encode(event)
        return self.write(events)

    def write(self, events: Sequence[TaskEvent]) -> list[TaskEvent]:
        first = len(self.kept) + 1
        numbered = [msgspec.structs.replace(event, seq=first + n) for n, event in enumerate(events)]
        self.kept += numbered
        self.batches.append(len(numbered))
        return numbered

    async def events(self, task: str, after: int = 0, limit: int = 1000) -> list[TaskEvent]:
        await asyncio.sleep(0)
        return self.kept[after : after + limit]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.store = FakeStore()
        self.fenced: list[str] = []
        self.seen: list[TaskEvent] = []
        self.log = EventLog(
            cast("StateStore", self.store), Log(folder / "log", folder, "A"), on_fenced=self.fenced.append,
            wall=lambda: 1.0,
        )  # fmt: skip
        self.log.subscribe(self.seen.extend)
        self.log.open(row())


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(events_module, "RETRY_S", (0.001,))
    one = Bench(tmp_path)
    yield one
    await one.log.stop()


# --- merging --------------------------------------------------------------------------------------------------------

PIECES = st.lists(
    st.one_of(
        st.builds(lambda text, part: ("text", part, text), st.text(max_size=4), st.sampled_from("ab")),
        st.just(("tool", "", "")),
    ),
    max_size=40,
)


def as_events(pieces: Sequence[tuple[str, str, str]]) -> list[TaskEvent]:
    ends: dict[str, int] = {}
    made: list[TaskEvent] = []
    for kind, part, text in pieces:
        made.append(delta(text, ends.get(part, 0), part) if kind == "text" else tool("c"))
        ends[part] = ends.get(part, 0) + len(text)
    return made


@given(PIECES)
def test_merging_keeps_the_text_and_the_order(pieces: list[tuple[str, str, str]]) -> None:
    before, after = as_events(pieces), list(merge(as_events(pieces)))
    for part in "ab":
        texts = [[e for e in some if isinstance(e, Delta) and e.part == part] for some in (before, after)]
        assert "".join(e.text for e in texts[0]) == "".join(e.text for e in texts[1])
        off = 0
        for event in texts[1]:
            assert event.off == off
            off += len(event.text)
    assert sum(isinstance(e, ToolStarted) for e in before) == sum(isinstance(e, ToolStarted) for e in after)
    assert all(
        not (isinstance(x, Delta) and isinstance(y, Delta) and x.part == y.part) for x, y in pairwise(after)
    )


def test_a_merged_piece_stays_small() -> None:
    size = MERGED_CHARS // 3
    merged = list(merge([delta("x" * size, n * size) for n in range(10)]))
    assert [len(event.text) for event in merged if isinstance(event, Delta)] == [size * 3] * 3 + [size]


def test_pieces_with_a_hole_between_are_not_merged() -> None:
    assert len(list(merge([delta("ab"), delta("cd", 2), delta("ef", 9)]))) == 2
    assert len(list(merge([delta("ab"), delta("cd", 2, ch="thinking")]))) == 2


# --- the writer -----------------------------------------------------------------------------------------------------


async def test_events_are_seen_only_when_they_are_durable(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.log.emit(TASK, delta("a"))
    bench.log.emit(TASK, tool("c"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.seen == []
    bench.store.gate.set()
    await bench.log.flush(TASK)
    assert [event.seq for event in bench.seen] == [1, 2]
    assert bench.seen == bench.store.kept
    assert {event.ts for event in bench.seen} == {1.0}


async def test_a_flood_is_written_in_few_batches_and_loses_nothing(bench: Bench) -> None:
    for n in range(5000):
        bench.log.emit(TASK, delta("x", n))
        await bench.log.drain(TASK)
    await bench.log.flush(TASK)
    assert "".join(event.text for event in bench.seen if isinstance(event, Delta)) == "x" * 5000
    assert len(bench.store.batches) < 50


async def test_a_runner_that_is_too_fast_waits_for_the_disk(bench: Bench) -> None:
    bench.store.gate.clear()
    for n in range(HIGH_EVENTS + 1):
        bench.log.emit(TASK, tool(str(n)))
    waiting = asyncio.create_task(bench.log.drain(TASK))
    for _ in range(20):
        await asyncio.sleep(0)
    for n in range(HIGH_EVENTS + 1):
        bench.log.emit(TASK, tool(str(n)))
    blocked = asyncio.create_task(bench.log.drain(TASK))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not blocked.done()
    bench.store.gate.set()
    async with asyncio.timeout(5):
        await asyncio.gather(waiting, blocked)


async def test_a_stop_frees_a_runner_that_waits(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.log.emit(TASK, tool("first"))
    for _ in range(20):
        await asyncio.sleep(0)
    for n in range(HIGH_EVENTS * 2):
        bench.log.emit(TASK, delta("x", n))
    waiting = asyncio.create_task(bench.log.drain(TASK))
    await asyncio.sleep(0)
    assert bench.log.cut(TASK) == HIGH_EVENTS * 2
    async with asyncio.timeout(5):
        await waiting
    assert bench.log.cut(TASK) == 0
    bench.store.gate.set()


async def test_what_the_store_refuses_is_written_when_it_is_back(bench: Bench) -> None:
    bench.store.failures = [StoreUnavailable("locked")] * 3
    bench.log.emit(TASK, tool("a"))
    with pytest.raises(StoreUnavailable, match="locked"):
        await bench.log.flush(TASK)
    bench.log.emit(TASK, tool("b"))
    async with asyncio.timeout(5):
        while len(bench.seen) < 2:
            await asyncio.sleep(0.001)
    await bench.log.flush(TASK)
    assert [event.call for event in bench.seen if isinstance(event, ToolStarted)] == ["a", "b"]


async def test_one_event_that_cannot_be_written_does_not_take_others_along(bench: Bench) -> None:
    for event in (tool("a"), tool("lone \ud800 surrogate"), tool("b")):
        bench.log.emit(TASK, event)
    await bench.log.flush(TASK)
    assert [event.call for event in bench.seen if isinstance(event, ToolStarted)] == ["a", "b"]
    assert bench.log.dropped(TASK) == 1


@pytest.mark.parametrize(
    ("error", "fenced"), [(StaleEpoch("taken"), [TASK]), (IllegalTransition("ended"), [])]
)
async def test_events_of_a_task_that_is_not_ours_are_counted(
    bench: Bench, error: Exception, fenced: list[str]
) -> None:
    bench.store.failures = [error]
    bench.log.emit(TASK, tool("a"))
    await bench.log.flush(TASK)
    assert not bench.log.emit(TASK, tool("b"))
    assert bench.fenced == fenced
    assert (bench.seen, bench.log.dropped(TASK)) == ([], 2)


async def test_a_subscriber_that_fails_does_not_harm_the_others(bench: Bench) -> None:
    def fail(events: Sequence[TaskEvent]) -> None:
        raise ValueError("broken pipe")

    later: list[TaskEvent] = []
    end = bench.log.subscribe(fail)
    bench.log.subscribe(later.extend)
    bench.log.emit(TASK, tool("a"))
    await bench.log.flush(TASK)
    assert later == bench.seen != []
    end()
    end()


# --- order and the end ----------------------------------------------------------------------------------------------


async def test_a_gap_is_filled_before_what_follows_is_seen(bench: Bench) -> None:
    for call in "abc":
        bench.store.write([tool(call)])
    bench.log.publish(TASK, bench.store.kept[2:])
    assert bench.seen == []
    await bench.log.filled(TASK)
    bench.log.publish(TASK, bench.store.kept[1:])
    assert bench.seen == bench.store.kept


async def test_what_comes_while_a_gap_is_filled_is_not_lost(bench: Bench) -> None:
    bench.store.write([tool("a"), tool("b")])
    bench.log.publish(TASK, bench.store.kept[1:])
    await asyncio.sleep(0)
    bench.store.write([tool("c"), tool("d")])
    bench.log.publish(TASK, bench.store.kept[3:])
    await bench.log.filled(TASK)
    assert [event.seq for event in bench.seen] == [1, 2, 3, 4]


async def test_nothing_follows_the_end(bench: Bench) -> None:
    bench.log.publish(TASK, bench.store.write([TaskEnded(task=TASK, state="completed")]))
    assert not bench.log.emit(TASK, delta("late"))
    assert not bench.log.emit(TASK, tool("late"))
    assert bench.log.dropped(TASK) == 2
    assert len(bench.seen) == 1


async def test_an_end_that_is_not_durable_comes_after_what_was_pending(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.log.emit(TASK, tool("in flight"))
    while bench.log._channels[TASK].pending:
        await asyncio.sleep(0)
    bench.log.emit(TASK, tool("a"))
    bench.log.publish_undurable(TASK, TaskEnded(task=TASK, state="cancel_failed", verified=False))
    assert [(event.seq, type(event)) for event in bench.seen] == [(1, ToolStarted), (2, TaskEnded)]
    assert not bench.log.emit(TASK, tool("late"))
    bench.store.gate.set()
    while bench.log._channels[TASK].writing:
        await asyncio.sleep(0)
    assert len(bench.seen) == 2


async def test_unknown_tasks_are_ignored(bench: Bench) -> None:
    assert not bench.log.emit("none", tool("a"))
    assert (bench.log.cut("none"), bench.log.dropped("none")) == (0, 0)
    await bench.log.drain("none")
    await bench.log.flush("none")
    bench.log.close("none")
    bench.log.refresh("none")
    end = TaskEnded(task="none", state="completed", seq=9)
    bench.log.publish("none", [end])
    bench.log.publish_undurable("none", end)
    assert bench.seen == [end, end]


async def test_replay_gives_all_that_is_stored(bench: Bench) -> None:
    bench.store.write([tool(str(n)) for n in range(1200)])
    assert await bench.log.replay(TASK) == bench.store.kept
    assert await bench.log.replay(TASK, 1199) == bench.store.kept[1199:]
