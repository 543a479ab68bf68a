"""The embedded agent: deaf ones are asked, warned about and killed; dead ones are replaced; orphans are adopted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.client.launcher import AgentHandle, find_or_start, listening_pid, read_records, start
from peri_tui.client.session import AgentSession, LinkNews
from peri_tui.config import Paths, Settings, find_paths
from peri_tui.core import messages as m
from peri_tui.core import stop_plan
from peri_tui.core.trace import Ev
from peri_tui.errors import AgentUnreachable, PeriError
from peri_tui.log import Log, read_trace
from tests.doubles.fake_agent import FakeAgent

pytestmark = pytest.mark.contract

TASK = "01J0000000000000000000000A"
OTHER = "01J0000000000000000000000B"
DIES = "import time; time.sleep(60)"
STAYS = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path / "home")})
    found.make()
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SIGNAL_AFTER", 0.5), ("WARN_AFTER", 0.9), ("DECLINE_WITHIN", 0.4)):
        monkeypatch.setattr(stop_plan, name, seconds)


class Body:
    """A scripted agent with a process of its own that can be killed; both end together, as they do in life."""

    def __init__(self, paths: Paths, instance: str, code: str = STAYS, session: str = "") -> None:
        self.agent = FakeAgent(paths.socket(instance), session=session)
        self.agent.__enter__()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        if code == STAYS:
            self.process.stdout.readline()
        self.handle = AgentHandle(instance, self.process.pid, self.agent.path, process=self.process)
        threading.Thread(target=self._die_together, daemon=True).start()

    def _die_together(self) -> None:
        self.handle._gone.wait()
        self.agent.__exit__()

    def close(self) -> None:
        self.handle.kill_session()
        self.handle._gone.wait(5)
        self.agent._thread.join(5)
        self.process.stdout.close()
        self.handle.close()


@pytest.fixture
def bodies(paths: Paths) -> Iterator[Callable[..., Body]]:
    made: list[Body] = []

    def make(code: str = STAYS, session: str = "") -> Body:
        made.append(Body(paths, f"01J0000000000000000000000{len(made)}", code, session))
        return made[-1]

    yield make
    for body in made:
        body.close()


class Client:
    def __init__(self, paths: Paths, agent: AgentHandle, next_agent: AgentHandle | None = None) -> None:
        self.events: list[m.TaskEvent] = []
        self.news: list[LinkNews] = []

        async def launch(*_: Any) -> AgentHandle:
            if next_agent is None:
                raise AgentUnreachable("no other agent here")
            return next_agent

        self.session = AgentSession(
            agent, paths=paths, log=Log(paths.log / "c.jsonl", paths.trace, "c"), workspace=paths.data,
            settings=Settings(provider="offline"), on_event=self.events.append, on_link=self.news.append,
            launch=launch,
        )  # fmt: skip

    def states(self) -> list[str]:
        return [news.state for news in self.news]


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def escalations(paths: Paths, task: str = TASK) -> list[str]:
    return [record.data["route"] for record in read_trace(paths.trace, task) if record.ev == Ev.ESCALATED]


def make_deaf(agent: FakeAgent) -> None:
    agent.script.drop_cancels = 1_000_000
    agent.script.http_deaf = True


async def test_a_deaf_agent_is_asked_to_shut_down_and_its_successor_answers(
    paths: Paths, bodies: Callable[..., Body], quick: None
) -> None:
    first = bodies(DIES)
    second = bodies(session=first.agent.session)
    client = Client(paths, first.handle, second.handle)
    await client.session.connect()
    task = await client.session.submit("go")
    make_deaf(first.agent)
    answer = await client.session.cancel(task)
    assert isinstance(answer, m.CancelAccepted)
    assert [seen.request.task for seen in second.agent.cancels] == [task]
    assert escalations(paths, task) == ["sigterm"]
    second.agent.publish(m.TaskEnded(task=task, state="cancelled", exit_code=130))
    await until(lambda: bool(client.events))
    assert {"escalated", "restarting", "restarted"} <= set(client.states())
    assert client.session.socket == second.agent.path
    await client.session.close()


async def test_an_agent_that_ignores_the_signal_is_killed(
    paths: Paths, bodies: Callable[..., Body], quick: None
) -> None:
    first = bodies()
    second = bodies(session=first.agent.session)
    client = Client(paths, first.handle, second.handle)
    await client.session.connect()
    make_deaf(first.agent)
    await client.session.cancel(TASK)
    assert escalations(paths) == ["sigterm", "sigkill"]
    assert not first.handle.is_alive()
    assert "killing" not in client.states()
    await client.session.close()


async def test_before_a_kill_the_other_tasks_are_named_and_the_user_may_decline(
    paths: Paths, bodies: Callable[..., Body], quick: None
) -> None:
    first = bodies()
    client = Client(paths, first.handle)
    await client.session.connect()
    await client.session.submit("the other", task=OTHER)
    make_deaf(first.agent)
    stop = asyncio.create_task(client.session.cancel(TASK))
    await until(lambda: "killing" in client.states())
    assert next(news for news in client.news if news.state == "killing").tasks == (OTHER,)
    client.session.decline_kill(TASK)
    await asyncio.sleep(0.8)
    assert first.handle.is_alive()
    assert escalations(paths) == ["sigterm", "warning"]
    stop.cancel()
    await client.session.close()


async def test_a_killed_agent_is_replaced_and_the_stream_goes_on_where_it_was(
    paths: Paths, bodies: Callable[..., Body]
) -> None:
    first = bodies()
    second = bodies(session=first.agent.session)
    client = Client(paths, first.handle, second.handle)
    await client.session.connect()
    task = await client.session.submit("talk")
    said = [m.Delta(task=task, ch="text", part="p", text=f"{n} ") for n in range(40)]
    first.agent.publish(*said)
    second.agent.publish(*said, m.TaskEnded(task=task, state="cancelled", stop_reason="owner_lost"))
    await until(lambda: len(client.events) == 40)
    first.handle.kill_session()
    await until(lambda: isinstance(client.events[-1], m.TaskEnded))
    assert [event.seq for event in client.events] == list(range(1, 42))
    assert client.states().count("restarted") == 1
    await client.session.close()


async def test_an_agent_that_cannot_be_replaced_is_said_to_be_gone(
    paths: Paths, bodies: Callable[..., Body]
) -> None:
    first = bodies()
    client = Client(paths, first.handle)
    await client.session.connect()
    first.handle.kill_session()
    await until(lambda: "failed" in client.states())
    with pytest.raises(AgentUnreachable):
        await client.session.submit("go")
    await client.session.close()


# --- a real agent process -------------------------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PERI_HOME": str(tmp_path / "home"), "PERI_FAULTS": ""}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("Basket\n")
    return folder


class RealClient(Client):
    async def leave(self) -> None:
        agent = self.session.agent
        await self.session.close()
        assert await agent.wait_gone(10)


async def real_client(paths: Paths, workspace: Path, environ: dict[str, str]) -> RealClient:
    client = RealClient(paths, await find_or_start(paths, workspace, environ=environ))
    client.session._workspace = client.session._keeper._workspace = workspace
    client.session._keeper._launch = lambda paths, workspace: start(paths, workspace, environ=environ)
    await client.session.connect()
    return client


async def test_a_real_agent_starts_listens_and_leaves_with_us(
    paths: Paths, workspace: Path, environ: dict[str, str]
) -> None:
    handle = await find_or_start(paths, workspace, environ=environ)
    assert handle.is_alive()
    assert not handle.adopted
    assert listening_pid(handle.socket) == handle.pid
    assert paths.token(handle.instance).stat().st_mode & 0o777 == 0o600
    token = paths.token(handle.instance).read_text()
    assert token not in Path(f"/proc/{handle.pid}/cmdline").read_text()
    handle.close()
    assert await handle.wait_gone(10)


async def test_an_agent_that_refuses_says_why_in_one_line(
    paths: Paths, workspace: Path, environ: dict[str, str]
) -> None:
    paths.db.mkdir()
    with pytest.raises(PeriError) as caught:
        await find_or_start(paths, workspace, environ=environ)
    assert "state.db" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_running_task_of_an_orphan_is_adopted(
    paths: Paths, workspace: Path, environ: dict[str, str]
) -> None:
    first = await find_or_start(paths, workspace, environ=environ)
    client = Client(paths, first)
    client.session._workspace = workspace
    await client.session.connect()
    task = await client.session.submit("rehearse", approve="all")
    await client.session.close()
    await until(lambda: any(record.orphaned for record in read_records(paths)))
    second = await find_or_start(paths, workspace, environ=environ)
    assert (second.pid, second.adopted, second.parent_fd) == (first.pid, True, None)
    heir = Client(paths, second)
    heir.session._workspace, heir.session._session = workspace, "last"
    welcome = await heir.session.connect()
    assert [summary.task for summary in welcome.tasks] == [task]
    answer = await heir.session.cancel(task, pressed_mono=time.monotonic_ns())
    assert isinstance(answer, m.CancelAccepted)
    await until(lambda: any(isinstance(event, m.TaskEnded) for event in heir.events), 20)
    await heir.session.close()
    assert await second.wait_gone(10)
    assert await first.wait_gone(10)


async def test_a_real_agent_killed_in_mid_task_is_replaced_and_the_end_arrives(
    paths: Paths, workspace: Path, environ: dict[str, str]
) -> None:
    client = await real_client(paths, workspace, environ)
    task = await client.session.submit("rehearse", approve="all")
    await until(lambda: any(isinstance(event, m.Delta) for event in client.events))
    os.kill(client.session.agent.pid, signal.SIGKILL)
    await until(lambda: any(isinstance(event, m.TaskEnded) for event in client.events), 20)
    end = client.events[-1]
    assert (end.task, end.stop_reason) == (task, "owner_lost")
    assert [event.seq for event in client.events] == list(range(1, len(client.events) + 1))
    assert client.states().count("restarted") == 1
    await client.leave()


async def test_a_real_agent_that_froze_is_killed_and_the_stop_still_ends(
    paths: Paths, workspace: Path, environ: dict[str, str], quick: None
) -> None:
    client = await real_client(paths, workspace, environ)
    frozen = client.session.agent
    task = await client.session.submit("rehearse", approve="all")
    await until(lambda: any(isinstance(event, m.Delta) for event in client.events))
    os.kill(frozen.pid, signal.SIGSTOP)
    answer = await client.session.cancel(task, pressed_mono=time.monotonic_ns())
    assert answer.task == task
    assert escalations(paths, task) == ["sigterm", "sigkill"]
    await until(lambda: any(isinstance(event, m.TaskEnded) for event in client.events), 20)
    assert not frozen.is_alive()
    await client.leave()
