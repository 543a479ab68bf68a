"""Layer 2 against a scripted agent over real sockets: one effect a stop, nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.client.session import AgentSession, LinkNews
from peri_tui.config import Paths, Settings, find_paths
from peri_tui.core import messages as m
from peri_tui.core import stop_plan
from peri_tui.core.trace import Ev
from peri_tui.errors import VersionMismatch
from peri_tui.log import Log, read_trace
from tests.doubles.fake_agent import FakeAgent

pytestmark = pytest.mark.contract

TASK = "01J0000000000000000000000A"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path)})
    found.make()
    return found


@pytest.fixture
def agent(paths: Paths) -> Iterator[FakeAgent]:
    paths.token("01J00000000000000000000000").write_text("sesame")
    with FakeAgent(paths.socket("01J00000000000000000000000")) as agent:
        yield agent


class Client:
    def __init__(self, session: AgentSession) -> None:
        self.session = session
        self.events: list[m.TaskEvent] = []
        self.news: list[LinkNews] = []

    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, m.Delta))


def make_client(agent: FakeAgent, paths: Paths, **options: Any) -> Client:
    log = Log(paths.log / "client.jsonl", paths.trace, "client")
    session = AgentSession(
        agent.path, paths=paths, log=log, workspace=paths.data, settings=Settings(provider="offline"),
        on_event=lambda event: client.events.append(event), on_link=lambda news: client.news.append(news), **options,
    )  # fmt: skip
    client = Client(session)
    return client


@pytest.fixture
async def client(agent: FakeAgent, paths: Paths) -> AsyncIterator[Client]:
    client = make_client(agent, paths)
    await client.session.connect()
    yield client
    await client.session.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def trace(paths: Paths, ev: Ev) -> list[Any]:
    return [record for record in read_trace(paths.trace, TASK) if record.ev == ev]


async def test_connect_says_hello_with_the_token(client: Client, agent: FakeAgent) -> None:
    assert client.session.id == agent.session
    assert agent.authorizations[0] == "Bearer sesame"


async def test_submit_then_events_then_end_is_acknowledged(client: Client, agent: FakeAgent) -> None:
    task = await client.session.submit("do it")
    agent.publish(
        m.TaskStateChanged(task=task, state="running"),
        m.Delta(task=task, ch="text", part="p", text="hello"),
        m.TaskEnded(task=task, state="completed"),
    )
    await until(lambda: len(client.events) == 3)
    client.session.acknowledge_end(task)
    await until(lambda: agent.acked_ends == [task])
    assert [event.seq for event in client.events] == [1, 2, 3]
    submit = next(request for request in agent.requests if isinstance(request, m.Submit))
    assert (submit.session, submit.prompt, submit.model.provider) == (agent.session, "do it", "offline")


async def test_cancel_on_an_idle_link_is_acknowledged_once(
    client: Client, agent: FakeAgent, paths: Paths
) -> None:
    answer = await client.session.cancel(TASK)
    assert isinstance(answer, m.CancelAccepted)
    assert answer.first
    assert len(agent.cancels) == 1
    assert [record.data["route"] for record in trace(paths, Ev.SENT)] == ["control"]
    assert len(trace(paths, Ev.ACKED)) == 1


async def test_many_cancels_at_once_are_one(client: Client, agent: FakeAgent) -> None:
    answers = await asyncio.gather(*(client.session.cancel(TASK) for _ in range(10)))
    assert {answer.cancel_id for answer in answers} == {agent.effects[TASK]}
    assert len(agent.effects) == 1


async def test_a_lost_acknowledgement_is_asked_for_again_with_the_same_id(
    client: Client, agent: FakeAgent, paths: Paths
) -> None:
    agent.script.drop_acks = 1
    answer = await client.session.cancel(TASK)
    assert isinstance(answer, m.CancelAccepted)
    assert not answer.first
    assert len({seen.request.id for seen in agent.cancels}) == 1
    assert agent.cancels[1].request.attempt == 2
    assert trace(paths, Ev.ACKED)[0].data["attempts"] == 2


async def test_control_cut_right_after_the_cancel_reconnects_and_repeats(
    client: Client, agent: FakeAgent, paths: Paths
) -> None:
    agent.script.cut_after_cancel = 1
    async with asyncio.timeout(1.0):
        answer = await client.session.cancel(TASK)
    assert answer.re == agent.cancels[0].request.id
    assert agent.control_connections == 2
    assert len(agent.effects) == 1
    assert trace(paths, Ev.RECONNECTED)


async def test_http_carries_the_cancel_when_control_is_deaf(
    client: Client, agent: FakeAgent, paths: Paths
) -> None:
    agent.script.drop_cancels = 1000
    answer = await client.session.cancel(TASK)
    assert isinstance(answer, m.CancelAccepted)
    assert [seen.route for seen in agent.cancels] == ["http"]
    assert trace(paths, Ev.ACKED)[0].data["route"] == "http"
    routes = [record.data["route"] for record in trace(paths, Ev.RETRIED)]
    assert "http" in routes


async def test_a_stop_that_nobody_answers_is_reported_and_never_signals_a_served_agent(
    agent: FakeAgent, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_plan, "SIGNAL_AFTER", 0.3)
    monkeypatch.setattr(stop_plan, "WARN_AFTER", 0.5)

    def refuse(*_: object, **__: object) -> dict[str, Any]:
        return {"t": "error", "code": "E_STORE", "msg": "no"}

    client = make_client(agent, paths, post=refuse)
    await client.session.connect()
    agent.script.drop_cancels = 1000
    stop = asyncio.create_task(client.session.cancel(TASK))
    await until(lambda: any(news.state == "unanswered" for news in client.news), 8)
    assert not any(record.data["route"].startswith("sig") for record in trace(paths, Ev.ESCALATED))
    stop.cancel()
    await client.session.close()


async def test_an_end_that_overtakes_the_acknowledgement_waits_for_it(
    client: Client, agent: FakeAgent, paths: Paths
) -> None:
    task = await client.session.submit("go")
    agent.script.drop_acks = 1
    stop = asyncio.create_task(client.session.cancel(task))
    await until(lambda: bool(agent.cancels))
    agent.publish(m.TaskEnded(task=task, state="cancelled", exit_code=130))
    await until(lambda: bool(client.events))
    agent.tell(m.CancelNoop(re=agent.cancels[0].request.id, task=task, state="cancelled"))
    assert isinstance(await stop, m.CancelNoop)
    assert any(record.ev == Ev.ACKED for record in read_trace(paths.trace, task))


async def test_a_screen_that_chokes_on_an_event_gets_the_next_ones(agent: FakeAgent, paths: Paths) -> None:
    client = make_client(agent, paths)
    seen: list[int] = []

    def choke(event: m.TaskEvent) -> None:
        seen.append(event.seq)
        if event.seq == 1:
            raise OSError("a widget is gone")

    client.session._on_event = choke
    await client.session.connect()
    task = await client.session.submit("go")
    agent.publish(*(m.Delta(task=task, ch="text", part="p", text="x") for _ in range(3)))
    await until(lambda: seen == [1, 2, 3])
    assert agent.stream_connections == 1
    await client.session.close()


async def test_resume_at_random_points_gives_the_same_text_and_no_event_twice(
    client: Client, agent: FakeAgent
) -> None:
    rng = random.Random(7)
    task = await client.session.submit("flood")
    pieces = [f"<{n}>" for n in range(2000)]
    agent.publish(*(m.Delta(task=task, ch="text", part="p", text=piece) for piece in pieces))
    cuts = sorted(rng.sample(range(2000), 12))
    for cut in cuts:
        await until(lambda cut=cut: len(client.events) >= cut)
        agent.cut_streams()
    await until(lambda: len(client.events) == 2000, 20)
    assert client.text() == "".join(pieces)
    assert [event.seq for event in client.events] == list(range(1, 2001))
    assert agent.stream_connections > 3


async def test_the_credit_window_holds_the_agent_back(agent: FakeAgent, paths: Paths) -> None:
    gate = asyncio.Event()
    taken: list[m.TaskEvent] = []

    async def slow(event: m.TaskEvent) -> None:
        taken.append(event)
        await gate.wait()

    client = make_client(agent, paths)
    client.session._on_event = slow
    await client.session.connect()
    task = await client.session.submit("flood")
    agent.publish(*(m.Delta(task=task, ch="text", part="p", text="x") for _ in range(1000)))
    await until(lambda: agent.frames_sent == m.CREDIT_WINDOW)
    await asyncio.sleep(0.05)
    assert (agent.frames_sent, len(taken)) == (m.CREDIT_WINDOW, 1)
    answer = await client.session.cancel(TASK)
    assert isinstance(answer, m.CancelAccepted)
    gate.set()
    await until(lambda: len(taken) == 1000)
    await client.session.close()


async def test_text_after_the_cut_is_dropped_and_counted(client: Client, agent: FakeAgent) -> None:
    task = await client.session.submit("talk")
    agent.publish(m.Delta(task=task, ch="text", part="p", text="before"))
    await until(lambda: len(client.events) == 1)
    await client.session.cancel(task)
    agent.publish(
        m.Delta(task=task, ch="text", part="p", text="after"),
        m.TaskEnded(task=task, state="cancelled", exit_code=130),
    )
    await until(lambda: isinstance(client.events[-1], m.TaskEnded))
    assert client.text() == "before"
    assert client.session.link.cut_deltas == 1


async def test_unknown_messages_are_ignored_and_counted(agent: FakeAgent, paths: Paths) -> None:
    agent.script.extra_frames = ['{"t":"hologram","x":1}', "not json"]
    client = make_client(agent, paths)
    await client.session.connect()
    task = await client.session.submit("go")
    agent.publish(m.TaskStateChanged(task=task, state="running"))
    await until(lambda: len(client.events) == 1)
    assert client.session.link.unknown == 4
    await client.session.close()


async def test_a_version_mismatch_is_explained(agent: FakeAgent, paths: Paths) -> None:
    agent.script.refuse_proto = True
    client = make_client(agent, paths)
    with pytest.raises(VersionMismatch, match=r"speaks peri\.v9.*update the older"):
        await client.session.connect()
    agent.script.refuse_proto = False
    agent.script.proto = 9
    client = make_client(agent, paths)
    with pytest.raises(VersionMismatch, match=r"peri\.v9"):
        await client.session.connect()


async def test_a_missing_number_makes_the_client_resume(client: Client, agent: FakeAgent) -> None:
    task = await client.session.submit("go")
    agent.publish(m.TaskStateChanged(task=task, state="running", seq=1))
    await until(lambda: len(client.events) == 1)
    agent.publish(m.Delta(task=task, ch="text", part="p", text="late", seq=3))
    await until(lambda: agent.stream_connections >= 2)
    agent.call(
        lambda: agent.logs[task].insert(1, m.Delta(task=task, ch="text", part="p", text="first ", seq=2))
    )
    await until(lambda: client.text() == "first late")


async def test_the_end_is_acknowledged_again_when_the_agent_repeats_it(
    client: Client, agent: FakeAgent
) -> None:
    task = await client.session.submit("go")
    agent.publish(m.TaskEnded(task=task, state="completed", seq=1))
    await until(lambda: len(client.events) == 1)
    client.session.acknowledge_end(task)
    await until(lambda: agent.acked_ends == [task])
    agent.cut_streams()
    agent.publish(m.TaskEnded(task=task, state="completed", seq=1))
    await until(lambda: len(agent.acked_ends) >= 2)
    assert len(client.events) == 1


async def test_questions_are_answered(client: Client, agent: FakeAgent) -> None:
    assert await client.session.answer(TASK, "q1", "deny", "no \ud800")
    await client.session.trust(False)
    answer = next(request for request in agent.requests if isinstance(request, m.Answer))
    assert (answer.qid, answer.outcome, answer.text) == ("q1", "deny", "no �")
