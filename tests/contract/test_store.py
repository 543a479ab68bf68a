"""The contract of the state store; every implementation passes the same suite."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from peri_tui.agent.scheduler.store import CancelKind, InstanceRow, StateStore
from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.core.messages import Delta, TaskEnded, TaskEvent, TaskStateChanged
from peri_tui.core.states import LEGAL, StopReason, TaskState
from peri_tui.errors import (
    Conflict,
    IllegalTransition,
    StaleEpoch,
    StaleVersion,
    StateError,
    StoreUnavailable,
    UnknownTask,
)
from tests.contract.scheduling import bring, make_id, make_submit, step

pytestmark = pytest.mark.contract

MakeStore = Callable[[], StateStore]


@pytest.fixture(params=["sqlite"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Make further connections to the one store of the test."""
    return lambda: SqliteStore(tmp_path / "state.db", clock=itertools.count(1000.0).__next__)


@pytest.fixture
async def store(make_store: MakeStore) -> AsyncIterator[StateStore]:
    one = make_store()
    await one.open()
    yield one
    await one.close()


@pytest.fixture
async def other(make_store: MakeStore, store: StateStore) -> AsyncIterator[StateStore]:
    one = make_store()
    await one.open()
    yield one
    await one.close()


def delta(task: str, text: str, off: int = 0) -> Delta:
    return Delta(task=task, ch="text", part="p", text=text, off=off)


def instance(name: str) -> InstanceRow:
    return InstanceRow(name, 1, 2, "boot/ns", "/w", f"/run/{name}.sock", 5.0)


async def finish(store: StateStore, task: str, to: TaskState, **facts: object) -> None:
    row = await store.get(task)
    assert row is not None
    end = TaskEnded(task=task, state=to)
    await store.finish(task, to, end, version=row.version, epoch=row.epoch, **facts)


# --- transitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", TaskState)
async def test_exactly_the_legal_arrows_succeed(store: StateStore, origin: TaskState) -> None:
    for to in TaskState:
        row = await bring(store, origin)
        if to in LEGAL[origin]:
            moved = await step(store, row, to)
            assert (moved.state, moved.version, moved.epoch) == (to, row.version + 1, row.epoch)
        else:
            with pytest.raises(IllegalTransition, match=f"from {origin} to {to}"):
                await step(store, row, to)
            assert await store.get(row.task) == row


@pytest.mark.parametrize("origin", TaskState)
async def test_an_end_takes_legal_arrows_only(store: StateStore, origin: TaskState) -> None:
    for to in (TaskState.COMPLETED, TaskState.CANCELLED, TaskState.FAILED, TaskState.CANCEL_FAILED):
        row = await bring(store, origin)
        end = TaskEnded(task=row.task, state=to)
        work = store.finish(row.task, to, end, version=row.version, epoch=row.epoch)
        if to in LEGAL[origin]:
            done = await work
            assert (done.state, done.version, done.last_seq) == (to, row.version + 1, row.last_seq + 1)
        else:
            with pytest.raises(IllegalTransition):
                await work
            assert await store.get(row.task) == row


async def test_the_event_is_in_the_same_transaction(store: StateStore) -> None:
    row = await bring(store, TaskState.WAITING)
    events = await store.events(row.task)
    assert [event.seq for event in events] == [1, 2, 3] == list(range(1, row.last_seq + 1))
    assert [event.state for event in events if isinstance(event, TaskStateChanged)] == [
        "queued", "running", "waiting",
    ]  # fmt: skip
    assert all(event.ts for event in events)


async def test_older_versions_and_epochs_are_refused(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    await step(store, row, TaskState.WAITING)
    with pytest.raises(StaleVersion):
        await step(store, row, TaskState.COMPLETED)
    await store.take_over("A", "B")
    for work in (
        step(store, row, TaskState.COMPLETED),
        store.append(row.task, [delta(row.task, "x")], epoch=row.epoch),
    ):
        with pytest.raises(StaleEpoch):
            await work


async def test_unknown_tasks_are_named(store: StateStore) -> None:
    task = make_id()
    assert await store.get(task) is None
    with pytest.raises(UnknownTask, match=task):
        await store.append(task, [delta(task, "x")], epoch=1)
    with pytest.raises(UnknownTask, match=task):
        await store.transition(
            task, TaskState.RUNNING, version=1, epoch=1, event=TaskStateChanged(task=task, state="running")
        )


# --- submitting -----------------------------------------------------------------------------------------------------


async def test_the_same_submission_is_one_task(store: StateStore) -> None:
    submit = make_submit()
    first = await store.submit(submit, "A")
    again = make_submit(submit.task, session=submit.session)
    assert await store.submit(again, "B") == first
    assert (first.state, first.version, first.epoch, first.owner) == (TaskState.QUEUED, 1, 1, "A")
    assert len(await store.tasks()) == 1


async def test_the_same_id_with_other_content_is_a_conflict(store: StateStore) -> None:
    submit = make_submit()
    row = await store.submit(submit, "A")
    with pytest.raises(Conflict, match=submit.task):
        await store.submit(make_submit(submit.task, session=submit.session, prompt="else"), "A")
    assert await store.get(submit.task) == row


# --- cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "to"),
    [
        (TaskState.QUEUED, TaskState.CANCELLED),
        (TaskState.RUNNING, TaskState.CANCELLING),
        (TaskState.WAITING, TaskState.CANCELLING),
        (TaskState.CANCEL_FAILED, TaskState.CANCELLING),
    ],
)
async def test_a_cancel_moves_the_task(store: StateStore, origin: TaskState, to: TaskState) -> None:
    row = await bring(store, origin)
    result = await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C1")
    assert (result.kind, result.first, result.prev) == (CancelKind.ACCEPTED, True, origin)
    assert result.cut_seq == row.last_seq
    assert result.row is not None
    assert (result.row.state, result.row.version, result.row.cancel_id) == (to, row.version + 1, "C1")
    assert (await store.events(row.task))[-1] == result.events[0]


async def test_ten_cancels_are_one(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    results = await asyncio.gather(
        *(store.request_cancel(row.task, reason=StopReason.USER, cancel_id=f"C{n}") for n in range(10))
    )
    assert [result.first for result in results] == [True] + [False] * 9
    assert {result.row.cancel_id for result in results if result.row} == {"C0"}
    assert {result.cut_seq for result in results} == {row.last_seq}
    assert {result.row.version for result in results if result.row} == {row.version + 1}


async def test_the_first_reason_stays_and_force_is_remembered(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    await store.request_cancel(row.task, reason=StopReason.LIMIT_TURNS, cancel_id="C1")
    second = await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C2", mode="force")
    assert second.row is not None
    assert (second.row.stop_reason, second.row.cancel_id, second.row.mode) == ("limit_turns", "C1", "force")


@pytest.mark.parametrize("final", [TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED])
async def test_a_final_task_has_nothing_to_stop(store: StateStore, final: TaskState) -> None:
    row = await bring(store, final)
    result = await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C1")
    assert (result.kind, result.row, result.first) == (CancelKind.NOOP, row, False)


async def test_a_cancel_before_its_submit_wins(store: StateStore) -> None:
    submit = make_submit()
    early = await store.request_cancel(submit.task, reason=StopReason.USER, cancel_id="C1")
    assert (early.kind, early.row) == (CancelKind.TOMBSTONE, None)
    row = await store.submit(submit, "A")
    assert (row.state, row.cancel_id, row.stop_reason) == (TaskState.CANCELLED, "C1", "user")
    (end,) = await store.events(submit.task)
    assert isinstance(end, TaskEnded)
    assert (end.seq, end.state, end.verified, end.exit_code) == (1, "cancelled", True, 130)
    assert (await store.submit(submit, "A")).state is TaskState.CANCELLED


async def test_a_queued_task_is_cancelled_with_its_end(store: StateStore) -> None:
    row = await bring(store, TaskState.QUEUED)
    await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C1")
    end = (await store.events(row.task))[-1]
    assert isinstance(end, TaskEnded)
    assert [one.layer for one in end.evidence if one.ok] == [3, 4, 5]
    assert [one.task for one in await store.unacked_ends(row.session)] == [row.task]
    with pytest.raises(StaleVersion):
        await step(store, row, TaskState.RUNNING)


async def test_a_completion_after_the_cancel_is_refused(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    result = await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C1")
    with pytest.raises(StaleVersion):
        await step(store, row, TaskState.COMPLETED)
    assert result.row is not None
    with pytest.raises(IllegalTransition):
        await step(store, result.row, TaskState.COMPLETED)


async def test_cancel_against_completion_has_one_winner(store: StateStore, other: StateStore) -> None:
    chance = random.Random(7)
    wins = {"cancel": 0, "complete": 0}
    for _ in range(60):
        row = await bring(store, TaskState.RUNNING)
        end = TaskEnded(task=row.task, state="completed")
        work = [
            store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C"),
            other.finish(row.task, TaskState.COMPLETED, end, version=row.version, epoch=row.epoch),
        ]
        order = chance.sample([0, 1], 2)
        results = await asyncio.gather(*(work[n] for n in order), return_exceptions=True)
        done = dict(zip(order, results, strict=True))
        now = await store.get(row.task)
        assert now is not None
        assert now.version == row.version + 1
        if done[0].kind is CancelKind.ACCEPTED:
            wins["cancel"] += 1
            assert isinstance(done[1], StateError)
            assert now.state is TaskState.CANCELLING
        else:
            wins["complete"] += 1
            assert done[0].row.state is TaskState.COMPLETED
            assert now.state is TaskState.COMPLETED
    assert sum(wins.values()) == 60


# --- events, ends, conversations ------------------------------------------------------------------------------------


async def test_events_are_numbered_densely_by_two_writers(store: StateStore, other: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    batches = [
        one.append(row.task, [delta(row.task, f"{n}a"), delta(row.task, f"{n}b")], epoch=1)
        for n, one in enumerate([store, other] * 10)
    ]
    numbered: list[TaskEvent] = list(itertools.chain(*await asyncio.gather(*batches)))
    assert sorted(event.seq for event in numbered) == list(range(3, 43))
    stored = await store.events(row.task)
    assert [event.seq for event in stored] == list(range(1, 43))
    assert await store.events(row.task, after=40) == stored[40:]
    assert await store.events(row.task, after=2, limit=3) == stored[2:5]


@pytest.mark.parametrize("ended", [TaskState.COMPLETED, TaskState.CANCELLED, TaskState.CANCEL_FAILED])
async def test_nothing_follows_the_end(store: StateStore, ended: TaskState) -> None:
    row = await bring(store, ended)
    with pytest.raises(IllegalTransition, match="has ended"):
        await store.append(row.task, [delta(row.task, "late")], epoch=row.epoch)
    assert (await store.get(row.task)) == row


async def test_an_end_is_kept_until_it_is_acknowledged(store: StateStore) -> None:
    session = make_id()
    rows = [
        await bring(store, state, submit=make_submit(session=session))
        for state in (TaskState.COMPLETED, TaskState.RUNNING, TaskState.CANCEL_FAILED)
    ]
    assert [end.task for end in await store.unacked_ends(session)] == [rows[0].task, rows[2].task]
    await store.ack_end(rows[0].task)
    await store.ack_end(make_id())
    assert [end.state for end in await store.unacked_ends(session)] == ["cancel_failed"]
    await store.ack_end(rows[2].task)
    await store.request_cancel(rows[2].task, reason=StopReason.USER, cancel_id="C")
    await finish(store, rows[2].task, TaskState.CANCELLED)
    assert [end.state for end in await store.unacked_ends(session)] == ["cancelled"]


async def test_the_conversation_changes_only_with_an_end(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "n": 1}]
    assert await store.history(row.session) == []
    end = TaskEnded(task=row.task, state="completed")
    with pytest.raises(StaleVersion):
        await store.finish(row.task, TaskState.COMPLETED, end, version=99, epoch=1, history=talk)
    assert await store.history(row.session) == []
    await finish(store, row.task, TaskState.COMPLETED, history=talk)
    assert await store.history(row.session) == talk


async def test_lists_are_the_newest_oldest_first(store: StateStore) -> None:
    session = make_id()
    submits = [make_submit(session=session, workspace="/a" if n % 2 else "/b") for n in range(6)]
    for submit in submits:
        await store.submit(submit, "A")
    await store.submit(make_submit(workspace="/a"), "A")
    assert [row.task for row in await store.tasks(session=session, limit=2)] == [
        one.task for one in submits[-2:]
    ]
    assert [row.task for row in await store.tasks(workspace="/a", session=session)] == [
        one.task for one in submits[1::2]
    ]
    assert await store.last_session("/b") == session
    assert await store.last_session("/a") != session
    assert await store.last_session("/none") is None


# --- owners ---------------------------------------------------------------------------------------------------------


async def test_a_dead_agents_tasks_change_hands_once(store: StateStore, other: StateStore) -> None:
    rows = {state: await bring(store, state, owner="dead") for state in TaskState}
    stays = await bring(store, TaskState.RUNNING, owner="alive")
    await store.register(instance("dead"))
    both = await asyncio.gather(store.take_over("dead", "B"), other.take_over("dead", "C"))
    taken = {row.task: row for row in itertools.chain(*both)}
    assert sorted(map(len, both)) == [0, 5]
    for origin, to in {
        TaskState.QUEUED: TaskState.QUEUED,
        TaskState.RUNNING: TaskState.CANCELLING,
        TaskState.WAITING: TaskState.CANCELLING,
        TaskState.CANCELLING: TaskState.CANCELLING,
        TaskState.CANCEL_FAILED: TaskState.CANCEL_FAILED,
    }.items():
        row = taken[rows[origin].task]
        assert (row.state, row.epoch, row.version) == (to, 2, rows[origin].version + 1)
        assert row == await store.get(row.task)
    assert taken[rows[TaskState.RUNNING].task].stop_reason == "owner_lost"
    last = (await store.events(rows[TaskState.RUNNING].task))[-1]
    assert isinstance(last, TaskStateChanged)
    assert (last.state, last.prev, last.epoch, last.cause) == ("cancelling", "running", 2, "owner_lost")
    for final in (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED):
        assert await store.get(rows[final].task) == rows[final]
    assert await store.get(stays.task) == stays
    assert await store.instances() == []


async def test_a_users_reason_survives_the_death_of_the_owner(store: StateStore) -> None:
    row = await bring(store, TaskState.RUNNING, owner="dead")
    await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C1")
    (taken,) = await store.take_over("dead", "B")
    assert (taken.state, taken.stop_reason, taken.cancel_id) == (TaskState.CANCELLING, "user", "C1")
    assert [one.task for one in await store.cancelling_of("B")] == [row.task]
    assert await store.cancelling_of("dead") == []


async def test_agents_come_and_go(store: StateStore) -> None:
    await store.register(instance("A"))
    await store.register(instance("B"))
    await store.set_orphaned("B", True)
    assert [(one.instance, one.orphaned) for one in await store.instances()] == [("A", False), ("B", True)]
    row = await bring(store, TaskState.RUNNING, owner="A")
    assert not await store.unregister("A")
    await finish(store, row.task, TaskState.COMPLETED)
    assert await store.unregister("A")
    assert [one.instance for one in await store.instances()] == ["B"]


# --- durability -----------------------------------------------------------------------------------------------------


async def test_a_commit_survives_its_cancelled_awaiter(store: StateStore) -> None:
    for _ in range(20):
        row = await bring(store, TaskState.RUNNING)
        work = asyncio.create_task(store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C"))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        now = await store.get(row.task)
        assert now is not None
        assert now.state is TaskState.CANCELLING
        assert (await store.events(row.task))[-1].seq == now.last_seq == row.last_seq + 1


async def test_everything_is_there_after_reopening(make_store: MakeStore, store: StateStore) -> None:
    row = await bring(store, TaskState.CANCELLING)
    events = await store.events(row.task)
    await store.close()
    again = make_store()
    await again.open()
    assert await again.get(row.task) == row
    assert await again.events(row.task) == events
    await again.close()


async def test_a_closed_store_says_so(store: StateStore) -> None:
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.tasks()
