"""The scheduler on a real store: order, stops from everywhere, ends that are told truthfully."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from peri_tui.agent.scheduler.ownership import Liveness
from peri_tui.agent.scheduler.run import Run
from peri_tui.agent.scheduler.scheduler import Scheduler
from peri_tui.agent.scheduler.store import InstanceRow
from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.core import faults
from peri_tui.core.messages import CancelAccepted, CancelNoop, Delta, TaskEnded, TaskStateChanged, Traced
from peri_tui.core.states import StopReason, TaskState
from peri_tui.core.trace import Ev, diagnose
from peri_tui.errors import Conflict, IllegalTransition, StoreUnavailable
from peri_tui.log import Log, read_trace
from tests.contract.scheduling import FakeExecutor, Seen, bring, make_id, make_submit

pytestmark = pytest.mark.contract


class Agent:
    """One agent without its server: store, executor, scheduler, and what its subscribers saw."""

    def __init__(self, folder: Path, name: str, **options: object) -> None:
        self.name = name
        self.store = SqliteStore(folder / "state.db", busy_ms=200)
        self.executor = FakeExecutor()
        self.log = Log(folder / "log", folder, name)
        self.nudged: list[tuple[str, str]] = []
        self.live = Liveness(folder / "instances")
        # A poll that a test does not ask for would hide which route did the work.
        defaults = {"poll_s": 3600.0, "patience_s": 0.02, "liveness": self.live, "route": self._route}
        self.scheduler = Scheduler(self.store, self.log, self.executor, instance=name, **defaults | options)
        self.seen = Seen()
        self.scheduler.events.subscribe(self.seen)

    async def _route(self, row: InstanceRow, task: str) -> None:
        self.nudged.append((row.instance, task))

    async def begin(self) -> None:
        await self.store.open()
        self.live.hold(self.name)
        await self.store.register(self.live.describe(self.name, workspace="/w", socket="/s"))
        self.scheduler.start()

    async def state(self, task: str) -> TaskState:
        row = await self.store.get(task)
        assert row is not None
        return row.state

    async def running(self, **facts: str) -> str:
        """Submit a task and wait until it runs."""
        row = await self.scheduler.submit(make_submit(**facts))
        await self.executor.until_started(row.task)
        return row.task

    async def end(self) -> None:
        for task in list(self.executor.release):
            self.executor.finish(task)
        await self.scheduler.stop_all(StopReason.SHUTDOWN)
        assert await self.scheduler.close(5)
        await self.store.close()
        self.live.release(self.name)


MakeAgent = Callable[..., Agent]


@pytest.fixture
async def make_agent(tmp_path: Path) -> AsyncIterator[MakeAgent]:
    agents: list[Agent] = []

    def make(name: str = "A", **options: object) -> Agent:
        agents.append(Agent(tmp_path, name, **options))
        return agents[-1]

    yield make
    faults.install([])
    for agent in agents:
        await agent.end()


@pytest.fixture
async def agent(make_agent: MakeAgent) -> Agent:
    one = make_agent()
    await one.begin()
    return one


@pytest.fixture
def refuse_cas() -> Iterator[None]:
    faults.install(["scheduler.refuse_cas"])
    yield
    faults.install([])


def delta(task: str, text: str, off: int = 0) -> Delta:
    return Delta(task=task, ch="text", part="p", text=text, off=off)


def traced(folder: Path, task: str, ev: Ev) -> list[dict[str, object]]:
    return [record.data for record in read_trace(folder, task) if record.ev == ev]


# --- starting and order ---------------------------------------------------------------------------------------------


async def test_a_task_runs_and_completes(agent: Agent) -> None:
    task = await agent.running()
    run = agent.executor.runs[0]
    run.history = [{"role": "user", "content": "do"}]
    run.emit(delta(task, "Hel"))
    run.emit(delta(task, "lo", 3))
    agent.executor.finish(task)
    end = await agent.seen.end_of(task)
    assert (end.state, end.answer, end.verified) == ("completed", "42", True)
    assert await agent.scheduler.idle(5)
    shown = agent.seen.of(task)
    assert [event.seq for event in shown] == list(range(1, len(shown) + 1))
    assert shown == await agent.store.events(task)
    assert [event.state for event in shown if isinstance(event, TaskStateChanged)] == ["queued", "running"]
    assert [event.text for event in shown if isinstance(event, Delta)] == ["Hello"]
    assert await agent.store.history(run.row.session) == [{"role": "user", "content": "do"}]


async def test_tasks_start_in_order_up_to_the_limit(make_agent: MakeAgent) -> None:
    agent = make_agent(concurrency=2)
    await agent.begin()
    tasks = [(await agent.scheduler.submit(make_submit())).task for _ in range(5)]
    await agent.executor.until_started(*tasks[:2])
    for n, task in enumerate(tasks):
        assert [run.task for run in agent.executor.runs] == tasks[: n + 2]
        agent.executor.finish(task)
        await agent.seen.end_of(task)
        if n + 2 < len(tasks):
            await agent.executor.until_started(tasks[n + 2])


async def test_tasks_of_one_session_run_one_after_the_other(agent: Agent) -> None:
    session = make_id()
    first = await agent.running(session=session)
    second = (await agent.scheduler.submit(make_submit(session=session))).task
    third = await agent.running()
    assert [run.task for run in agent.executor.runs] == [first, third]
    agent.executor.finish(first)
    await agent.executor.until_started(second)


async def test_the_same_submission_twice_runs_once(agent: Agent) -> None:
    submit = make_submit()
    rows = await asyncio.gather(*(agent.scheduler.submit(submit) for _ in range(5)))
    assert len({row.task for row in rows}) == 1
    await agent.executor.until_started(submit.task)
    assert (await agent.scheduler.submit(submit)).state is TaskState.RUNNING
    with pytest.raises(Conflict):
        await agent.scheduler.submit(make_submit(submit.task, prompt="other"))
    assert len(agent.executor.runs) == 1


async def test_a_submission_goes_on_when_its_awaiter_is_cancelled(agent: Agent) -> None:
    submit = make_submit()
    work = asyncio.create_task(agent.scheduler.submit(submit))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await agent.executor.until_started(submit.task)


async def test_the_next_task_gets_the_conversation(agent: Agent) -> None:
    session = make_id()
    first = await agent.running(session=session)
    agent.executor.runs[0].history = [{"role": "user", "content": "one"}]
    agent.executor.finish(first)
    await agent.seen.end_of(first)
    await agent.running(session=session)
    assert agent.executor.runs[1].history == [{"role": "user", "content": "one"}]


async def test_waiting_and_back(agent: Agent) -> None:
    task = await agent.running()
    run = agent.executor.runs[0]
    run.emit(delta(task, "question"))
    await run.set_state(TaskState.WAITING, "tool")
    assert await agent.state(task) is TaskState.WAITING
    await run.set_state(TaskState.RUNNING)
    kinds = [type(event).__name__ for event in agent.seen.of(task)]
    assert kinds == ["TaskStateChanged"] * 2 + ["Delta"] + ["TaskStateChanged"] * 2


# --- stopping -------------------------------------------------------------------------------------------------------


async def test_a_stop_sets_the_token_before_anything_is_awaited(agent: Agent) -> None:
    task = await agent.running()
    run = agent.executor.runs[0]
    seen: list[str] = []
    run.token.on_set(lambda cause: seen.append(cause.cancel_id))
    stop = agent.scheduler.cancel(task, source="control", cancel_id="C1", mono=5)
    stop.send(None)  # the first step only: no loop has run in between
    assert seen == ["C1"]
    assert run.token.cause is not None
    assert (run.token.cause.reason, run.token.cause.mono) == (StopReason.USER, 5)
    stop.close()
    assert (await agent.seen.end_of(task)).state == "cancelled"


async def test_a_stop_is_durable_when_it_is_acknowledged(agent: Agent, tmp_path: Path) -> None:
    task = await agent.running()
    agent.executor.swallow = False
    before = await agent.store.get(task)
    assert before is not None
    reply = await agent.scheduler.cancel(task, source="control")
    assert isinstance(reply, CancelAccepted)
    assert (reply.first, reply.durable, reply.routed, reply.mode) == (True, True, "", "graceful")
    now = await agent.store.get(task)
    assert now is not None
    assert now.state in (TaskState.CANCELLING, TaskState.CANCELLED)
    assert (now.cancel_id, reply.cut_seq) == (reply.cancel_id, now.cut_seq)
    end = await agent.seen.end_of(task)
    assert (end.state, end.stop_reason, end.cancel_id) == ("cancelled", "user", reply.cancel_id)
    assert [(one.layer, one.ok) for one in end.evidence] == [(3, True)]
    await agent.scheduler.idle(5)
    order = [record.ev for record in read_trace(tmp_path, task)]
    assert order == [Ev.RECEIVED, Ev.TOKEN_SET, Ev.CAS, Ev.ENDED]
    (cas,) = traced(tmp_path, task, Ev.CAS)
    assert cas == {
        "ok": True,
        "ver": before.version + 1,
        "durable": True,
        "to": "cancelling",
        "prev": "running",
    }
    shown = [event.ev for event in agent.seen.of(task) if isinstance(event, Traced)]
    assert shown[:2] == ["received", "token_set"]
    assert agent.seen.of(task)[-1] == end


async def test_ten_stops_have_one_effect(agent: Agent, tmp_path: Path) -> None:
    task = await agent.running()
    replies = await asyncio.gather(
        *(
            agent.scheduler.cancel(task, source=route, attempt=n)
            for n, route in enumerate(["control", "http"] * 5)
        )
    )
    assert len({reply.cancel_id for reply in replies}) == 1  # type: ignore[union-attr]
    assert [reply.first for reply in replies] == [True] + [False] * 9  # type: ignore[union-attr]
    end = await agent.seen.end_of(task)
    assert end.cancel_id == replies[0].cancel_id  # type: ignore[union-attr]
    assert len(traced(tmp_path, task, Ev.CAS)) == len(traced(tmp_path, task, Ev.TOKEN_SET)) == 1
    assert len(traced(tmp_path, task, Ev.RECEIVED)) == 10
    late = await agent.scheduler.cancel(task)
    assert late == CancelNoop(re="", task=task, state="cancelled", stop_reason="user")


async def test_force_is_a_second_mode_of_the_same_stop(agent: Agent) -> None:
    agent.executor.swallow = True
    task = await agent.running()
    run = agent.executor.runs[0]
    first = await agent.scheduler.cancel(task)
    assert not run.token.forced
    second = await agent.scheduler.cancel(task, mode="force")
    assert run.token.forced
    assert isinstance(first, CancelAccepted)
    assert isinstance(second, CancelAccepted)
    assert (second.cancel_id, second.first, second.mode) == (first.cancel_id, False, "force")


async def test_text_after_the_stop_is_dropped_and_counted(agent: Agent) -> None:
    agent.executor.swallow = True
    task = await agent.running()
    run = agent.executor.runs[0]
    run.emit(delta(task, "seen"))
    await agent.scheduler.events.flush(task)
    run.emit(delta(task, "not durable yet"))
    reply = await agent.scheduler.cancel(task)
    assert not run.emit(delta(task, "late"))
    agent.executor.finish(task)
    await agent.seen.end_of(task)
    texts = [event for event in await agent.store.events(task) if isinstance(event, Delta)]
    assert [event.text for event in texts] == ["seen"]
    assert isinstance(reply, CancelAccepted)
    assert texts[0].seq <= reply.cut_seq
    assert agent.scheduler.events.dropped(task) == 2
    assert not run.emit(Traced(task=task, layer=4, ev="far_end"))


async def test_a_queued_task_is_stopped_and_never_starts(make_agent: MakeAgent, tmp_path: Path) -> None:
    agent = make_agent(concurrency=1)
    await agent.begin()
    first = await agent.running()
    queued = [(await agent.scheduler.submit(make_submit())).task for _ in range(20)]
    replies = await asyncio.gather(*(agent.scheduler.cancel(task) for task in queued[:-1]))
    assert {reply.state for reply in replies} == {"cancelled"}
    end = await agent.seen.end_of(queued[0])
    assert (end.state, end.exit_code, end.verified) == ("cancelled", 130, True)
    lamps = diagnose(read_trace(tmp_path, queued[0]), headless=True).layers
    assert [lamp.layer for lamp in lamps if lamp.ok] == [3, 4, 5]
    agent.executor.finish(first)
    await agent.executor.until_started(queued[-1])
    assert [run.task for run in agent.executor.runs] == [first, queued[-1]]


async def test_a_stop_that_overtakes_its_submit_wins(agent: Agent) -> None:
    submit = make_submit()
    early = await agent.scheduler.cancel(submit.task)
    assert early == CancelNoop(re="", task=submit.task, state="tombstone")
    row = await agent.scheduler.submit(submit)
    assert row.state is TaskState.CANCELLED
    assert (await agent.seen.end_of(submit.task)).state == "cancelled"
    assert agent.executor.runs == []


async def test_a_stop_in_the_moment_of_starting_leaves_nothing_running(make_agent: MakeAgent) -> None:
    agent = make_agent(concurrency=50)
    await agent.begin()
    for ticks in range(25):
        row = await agent.scheduler.submit(make_submit())
        for _ in range(ticks):
            await asyncio.sleep(0)
        await agent.scheduler.cancel(row.task)
        end = await agent.seen.end_of(row.task)
        assert end.state == "cancelled"
        started = [run for run in agent.executor.runs if run.task == row.task]
        assert all(run.token.is_set for run in started)
    assert await agent.scheduler.idle(5)


async def test_a_completion_after_the_stop_is_refused_and_rolled_back(agent: Agent, tmp_path: Path) -> None:
    agent.executor.swallow = True
    task = await agent.running()
    await agent.scheduler.cancel(task)
    agent.executor.finish(task)
    end = await agent.seen.end_of(task)
    assert (end.state, end.answer) == ("cancelled", "")
    assert [row.task for row in agent.executor.recovered] == [task]
    assert len(traced(tmp_path, task, Ev.LATE)) == 1


async def test_an_executor_can_complete_while_it_can_still_undo(agent: Agent) -> None:
    agent.executor.swallow = True
    good, late = await agent.running(), await agent.running()
    runs = {run.task: run for run in agent.executor.runs}
    assert await runs[good].complete(TaskEnded(task=good, state="completed", answer="ok"))
    assert await agent.scheduler.cancel(good) == CancelNoop(re="", task=good, state="completed")
    await agent.scheduler.cancel(late)
    assert not await runs[late].complete(TaskEnded(task=late, state="completed"))
    agent.executor.finish(good)
    assert (await agent.seen.end_of(good)).answer == "ok"
    with pytest.raises(IllegalTransition):
        await runs[late].set_state(TaskState.WAITING)


async def test_a_stop_against_completion_ends_each_task_once(make_agent: MakeAgent) -> None:
    agent = make_agent(concurrency=100)
    await agent.begin()
    outcomes = set()
    for ticks in range(40):
        task = await agent.running()
        agent.executor.finish(task)
        for _ in range(ticks // 2):
            await asyncio.sleep(0)
        if ticks == 39:
            # However slow the disk is, the completion has been first at least once.
            await agent.seen.end_of(task)
        reply = await agent.scheduler.cancel(task)
        end = await agent.seen.end_of(task)
        assert reply.state in ("completed", "cancelling")
        assert end.state == ("completed" if isinstance(reply, CancelNoop) else "cancelled")
        assert await agent.state(task) == end.state
        outcomes.add(end.state)
    assert await agent.scheduler.idle(5)
    assert outcomes == {"completed", "cancelled"}
    assert all(isinstance(agent.seen.of(run.task)[-1], TaskEnded) for run in agent.executor.runs)


async def test_an_internal_stop_passes_cancelling(agent: Agent) -> None:
    task = await agent.running()
    await agent.executor.runs[0].stop(StopReason.LIMIT_TURNS, "limits")
    end = await agent.seen.end_of(task)
    assert end.stop_reason == "limit_turns"
    states = [event.state for event in await agent.store.events(task) if isinstance(event, TaskStateChanged)]
    assert states == ["queued", "running", "cancelling"]


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.CANCELLED, TaskState.CANCEL_FAILED])
async def test_every_abnormal_end_passes_cancelling(agent: Agent, state: TaskState) -> None:
    async def execute(run: Run) -> TaskEnded:
        return TaskEnded(task=run.task, state=state, stop_reason="model_error")

    agent.executor.execute = execute  # type: ignore[method-assign]
    task = (await agent.scheduler.submit(make_submit())).task
    assert (await agent.seen.end_of(task)).state == state
    row = await agent.store.get(task)
    assert row is not None
    assert (row.state, row.stop_reason, row.version) == (state, "model_error", 4)


@pytest.mark.parametrize("boom", [ValueError("bug"), asyncio.CancelledError()])
async def test_an_executor_that_fails_is_rolled_back(agent: Agent, boom: Exception) -> None:
    agent.executor.boom = boom
    task = await agent.running()
    end = await agent.seen.end_of(task)
    assert (end.state, end.stop_reason) == ("cancelled", "internal_error")
    assert [row.task for row in agent.executor.recovered] == [task]
    agent.executor.boom = None
    await agent.running()


async def test_a_recovery_that_fails_is_a_failed_stop_and_frees_the_queue(make_agent: MakeAgent) -> None:
    agent = make_agent(concurrency=1)
    await agent.begin()
    agent.executor.boom, agent.executor.recover_boom = ValueError("bug"), OSError("disk")
    task = await agent.running()
    end = await agent.seen.end_of(task)
    assert (end.state, end.verified, end.exit_code) == ("cancel_failed", False, 74)
    assert "bug" in end.message
    assert "disk" in end.residue[0]
    agent.executor.boom = agent.executor.recover_boom = None
    await agent.running()


async def test_a_failed_stop_can_be_tried_again(agent: Agent) -> None:
    agent.executor.boom, agent.executor.recover_boom = ValueError("bug"), OSError("disk")
    task = await agent.running()
    await agent.seen.end_of(task)
    assert await agent.scheduler.idle(5)
    agent.executor.recover_boom = None
    reply = await agent.scheduler.cancel(task, mode="force")
    assert isinstance(reply, CancelAccepted)
    end = await agent.seen.end_of(task, 2)
    assert (end.state, end.cancel_id) == ("cancelled", reply.cancel_id)
    assert await agent.state(task) is TaskState.CANCELLED
    assert len(agent.executor.runs) == 1


async def test_stop_all_stops_what_runs_and_what_waits(make_agent: MakeAgent) -> None:
    agent = make_agent(concurrency=2)
    await agent.begin()
    tasks = [(await agent.scheduler.submit(make_submit())).task for _ in range(6)]
    await agent.executor.until_started(*tasks[:2])
    replies = await agent.scheduler.stop_all(StopReason.SHUTDOWN, source="shutdown")
    assert len(replies) == 6
    assert await agent.scheduler.idle(5)
    assert {(await agent.seen.end_of(task)).stop_reason for task in tasks} == {"shutdown"}
    assert len(agent.executor.runs) == 2
    await agent.scheduler.close(1)
    with pytest.raises(StoreUnavailable, match="closing"):
        await agent.scheduler.submit(make_submit())


# --- a store that refuses -------------------------------------------------------------------------------------------


async def test_a_refused_compare_and_set_stops_the_task_and_is_told(
    agent: Agent, tmp_path: Path, refuse_cas: None
) -> None:
    task = await agent.running()
    reply = await agent.scheduler.cancel(task)
    assert isinstance(reply, CancelAccepted)
    assert not reply.durable
    assert agent.executor.runs[0].token.is_set
    end = await agent.seen.end_of(task)
    assert (end.state, end.verified, end.exit_code) == ("cancel_failed", False, 74)
    (scheduler,) = [one for one in end.evidence if one.layer == 3]
    assert not scheduler.ok
    assert "refuse_cas" in scheduler.missing
    assert await agent.scheduler.idle(5)
    assert [record["ok"] for record in traced(tmp_path, task, Ev.CAS)] == [False]
    assert diagnose(read_trace(tmp_path, task), headless=True).layers[2].ok is False
    with pytest.raises(StoreUnavailable):
        await agent.scheduler.check()
    assert await agent.state(task) is TaskState.RUNNING


async def test_a_refused_stop_is_recorded_when_the_store_is_back(agent: Agent, refuse_cas: None) -> None:
    task = await agent.running()
    await agent.scheduler.cancel(task)
    await agent.seen.end_of(task)
    assert await agent.scheduler.idle(5)
    faults.install([])
    await agent.scheduler.check()
    assert await agent.state(task) is TaskState.CANCEL_FAILED


async def test_a_refusal_that_heals_in_time_is_a_good_stop(
    agent: Agent, tmp_path: Path, refuse_cas: None
) -> None:
    agent.executor.swallow = True
    task = await agent.running()
    run = agent.executor.runs[0]
    await agent.scheduler.cancel(task)
    assert not run.durable
    faults.install([])
    await agent.scheduler.check()
    assert run.durable
    assert await agent.state(task) is TaskState.CANCELLING
    agent.executor.finish(task)
    assert (await agent.seen.end_of(task)).state == "cancelled"
    assert [record["ok"] for record in traced(tmp_path, task, Ev.CAS)] == [False, True]


async def test_a_refused_stop_of_a_queued_task_keeps_it_from_starting(
    make_agent: MakeAgent, refuse_cas: None
) -> None:
    agent = make_agent(concurrency=1)
    await agent.begin()
    first = await agent.running()
    queued = (await agent.scheduler.submit(make_submit())).task
    reply = await agent.scheduler.cancel(queued)
    assert isinstance(reply, CancelAccepted)
    assert not reply.durable
    assert (await agent.seen.end_of(queued)).state == "cancel_failed"
    agent.executor.finish(first)
    await agent.seen.end_of(first)
    assert await agent.scheduler.idle(5)
    assert [run.task for run in agent.executor.runs] == [first]
    faults.install([])
    await agent.scheduler.check()
    assert await agent.state(queued) is TaskState.CANCELLED


async def test_a_stop_without_store_and_without_task_is_refused(agent: Agent, refuse_cas: None) -> None:
    with pytest.raises(StoreUnavailable):
        await agent.scheduler.cancel(make_id())


async def test_a_store_that_goes_away_does_not_keep_a_task_from_stopping(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent()
    await agent.begin()
    task = await agent.running()

    async def gone(*args: object, **facts: object) -> None:
        raise StoreUnavailable("state.db: disk I/O error")

    with monkeypatch.context() as away:
        for name in ("request_cancel", "append", "finish", "transition"):
            away.setattr(agent.store, name, gone)
        reply = await agent.scheduler.cancel(task)
        assert isinstance(reply, CancelAccepted)
        assert not reply.durable
        end = await agent.seen.end_of(task)
        assert (end.state, end.verified) == ("cancel_failed", False)
        assert agent.seen.of(task)[-1] is end
    assert await agent.scheduler.idle(5)
    await agent.scheduler.check()
    assert await agent.state(task) is TaskState.CANCEL_FAILED


async def test_a_task_that_cannot_start_starts_when_the_store_is_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*args: object, **facts: object) -> None:
        raise StoreUnavailable("locked")

    with monkeypatch.context() as away:
        away.setattr(agent.store, "transition", gone)
        row = await agent.scheduler.submit(make_submit())
        while not agent.scheduler._table.queued():
            await asyncio.sleep(0)
    assert agent.executor.runs == []
    await agent.scheduler.check()
    await agent.executor.until_started(row.task)


# --- several agents -------------------------------------------------------------------------------------------------


async def test_a_stop_through_another_living_agent(
    agent: Agent, make_agent: MakeAgent, tmp_path: Path
) -> None:
    other = make_agent("B")
    await other.begin()
    task = await agent.running()
    reply = await other.scheduler.cancel(task, source="http")
    assert isinstance(reply, CancelAccepted)
    assert (reply.routed, reply.durable, reply.state) == ("A", True, "cancelling")
    assert not agent.executor.runs[0].token.is_set
    # The nudge is lost here: the owner's next look at the store finds the stop.
    await agent.scheduler.check()
    end = await agent.seen.end_of(task)
    assert (end.state, end.cancel_id) == ("cancelled", reply.cancel_id)
    assert other.nudged == [("A", task)]
    assert other.executor.recovered == []
    shown = agent.seen.of(task)
    assert [event.seq for event in shown] == list(range(1, len(shown) + 1))
    assert [data["owner"] for data in traced(tmp_path, task, Ev.ROUTED)] == ["A"]


async def test_a_queued_task_of_another_agent_never_starts(make_agent: MakeAgent) -> None:
    agent, other = make_agent("A", concurrency=1), make_agent("B")
    await agent.begin()
    await other.begin()
    first = await agent.running()
    queued = [(await agent.scheduler.submit(make_submit())).task for _ in range(2)]
    for task in queued:
        assert (await other.scheduler.cancel(task)).state == "cancelled"
    agent.executor.finish(first)
    for task in queued:
        assert (await agent.seen.end_of(task)).state == "cancelled"
    assert [run.task for run in agent.executor.runs] == [first]


async def test_a_living_agents_tasks_are_left_alone(agent: Agent, make_agent: MakeAgent) -> None:
    task = await agent.running()
    other = make_agent("B")
    await other.begin()
    assert await other.scheduler.recover_dead() == []
    assert await agent.state(task) is TaskState.RUNNING


async def leave_behind(agent: Agent, state: TaskState) -> str:
    """Leave a task in a state that a dead agent had."""
    dead = InstanceRow("dead", 1, 1, "another boot/ns", "/w", "/s", 1.0)
    await agent.store.register(dead)
    return (await bring(agent.store, state, owner="dead")).task


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.WAITING, TaskState.CANCELLING])
async def test_a_dead_agents_task_is_rolled_back_not_run(agent: Agent, state: TaskState) -> None:
    task = await leave_behind(agent, state)
    (taken,) = await agent.scheduler.recover_dead()
    assert (taken.task, taken.state, taken.epoch, taken.owner) == (task, TaskState.CANCELLING, 2, "A")
    end = await agent.seen.end_of(task)
    assert end.state == "cancelled"
    assert agent.executor.runs == []
    assert [row.task for row in agent.executor.recovered] == [task]
    assert [one.instance for one in await agent.store.instances()] == ["A"]
    assert await agent.scheduler.recover_dead() == []


async def test_a_dead_agents_queued_task_is_held_until_it_is_asked_for(agent: Agent) -> None:
    await agent.store.register(InstanceRow("dead", 1, 1, "another boot/ns", "/w", "/s", 1.0))
    submit = make_submit()
    await bring(agent.store, TaskState.QUEUED, owner="dead", submit=submit)
    (taken,) = await agent.scheduler.recover_dead()
    assert taken.state is TaskState.QUEUED
    await agent.scheduler.check()
    other = await agent.running()
    assert [run.task for run in agent.executor.runs] == [other]
    await agent.scheduler.submit(submit)
    await agent.executor.until_started(submit.task)
    assert agent.executor.runs[1].epoch == 2


async def test_a_stop_of_a_dead_agents_task_takes_it_over(agent: Agent) -> None:
    task = await leave_behind(agent, TaskState.RUNNING)
    reply = await agent.scheduler.cancel(task)
    assert isinstance(reply, CancelAccepted)
    assert (reply.routed, reply.reason) == ("", "user")
    end = await agent.seen.end_of(task)
    assert (end.state, end.stop_reason, end.cancel_id) == ("cancelled", "user", reply.cancel_id)
    assert [row.task for row in agent.executor.recovered] == [task]


async def test_two_successors_recover_a_task_once(make_agent: MakeAgent) -> None:
    agents = [make_agent(name) for name in "BCD"]
    for agent in agents:
        await agent.begin()
    tasks = {await leave_behind(agents[0], TaskState.RUNNING) for _ in range(5)}
    await asyncio.gather(*(agent.scheduler.recover_dead() for agent in agents))
    for agent in agents:
        assert await agent.scheduler.idle(5)
    recovered = [row.task for agent in agents for row in agent.executor.recovered]
    assert sorted(recovered) == sorted(tasks)


async def test_an_owner_that_was_replaced_stops_its_run(agent: Agent) -> None:
    task = await agent.running()
    other = SqliteStore(agent.store._file.path)
    await other.open()
    await other.take_over("A", "B")
    await other.close()
    run = agent.executor.runs[0]
    run.emit(delta(task, "still here"))
    async with asyncio.timeout(10):
        cause = await run.token.wait()
    assert cause.reason is StopReason.OWNER_LOST
    assert await agent.state(task) is TaskState.CANCELLING


async def test_a_stop_of_a_recovering_task_changes_nothing(agent: Agent) -> None:
    agent.executor.hold_recovery = asyncio.Event()
    task = await leave_behind(agent, TaskState.CANCELLING)
    await agent.scheduler.recover_dead()
    reply = await agent.scheduler.cancel(task)
    assert isinstance(reply, CancelAccepted)
    assert not reply.first
    await agent.scheduler.check()
    agent.executor.hold_recovery.set()
    await agent.seen.end_of(task)
    assert await agent.scheduler.idle(5)
    assert len(agent.executor.recovered) == 1


async def test_a_held_task_does_not_keep_an_agent_busy(agent: Agent) -> None:
    await agent.store.register(InstanceRow("dead", 1, 1, "another boot/ns", "/w", "/s", 1.0))
    submit = make_submit()
    await bring(agent.store, TaskState.QUEUED, owner="dead", submit=submit)
    await agent.scheduler.recover_dead()
    assert await agent.scheduler.idle(0.1)
    assert agent.scheduler.running() == []
    await agent.scheduler.submit(submit)
    assert not await agent.scheduler.idle(0.01)
    assert [row.task for row in agent.scheduler.running()] == [submit.task]


async def test_a_completion_waits_a_moment_for_the_store(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await agent.running()
    finish, failures = agent.store.finish, 2

    async def lose_the_answer(*args: object, **facts: object) -> object:
        nonlocal failures
        row = await finish(*args, **facts)  # type: ignore[arg-type]
        failures -= 1
        if failures:
            raise StoreUnavailable("done, but the answer is lost")
        return row

    monkeypatch.setattr(agent.store, "finish", lose_the_answer)
    agent.executor.finish(task)
    end = await agent.seen.end_of(task)
    assert (end.state, end.verified) == ("completed", True)
    assert agent.executor.recovered == []


async def test_the_look_at_the_store_goes_on_after_any_error(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent(poll_s=0.01)
    await agent.begin()
    task = await agent.running()
    looked, failed = agent.store.cancelling_of, asyncio.Event()

    async def broken(owner: str) -> object:
        failed.set()
        raise ValueError("what no one thought of")

    monkeypatch.setattr(agent.store, "cancelling_of", broken)
    async with asyncio.timeout(5):
        await failed.wait()
    monkeypatch.setattr(agent.store, "cancelling_of", looked)
    await agent.store.request_cancel(task, reason=StopReason.USER, cancel_id="C1")
    assert (await agent.seen.end_of(task)).cancel_id == "C1"
