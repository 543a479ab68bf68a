"""Agents in processes of their own: a stop finds its way to a living owner, a killed owner is replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from peri_tui.core.messages import CancelAccepted
from peri_tui.core.states import StopReason, TaskState
from peri_tui.errors import StoreUnavailable
from tests.contract.test_scheduler import Agent

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.agent_child", str(tmp_path), "other", "3"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    one = Agent(tmp_path, "A")
    await one.begin()
    yield one
    await one.end()


async def test_a_stop_reaches_the_process_that_runs_the_task(
    agent: Agent, other: subprocess.Popen[str]
) -> None:
    assert other.stdout
    first, second, _ = other.stdout.readline().split()
    for task in (first, second):
        reply = await agent.scheduler.cancel(task, source="http")
        assert isinstance(reply, CancelAccepted)
        assert (reply.routed, reply.durable) == ("other", True)
        assert other.stdout.readline().split() == ["stopped", task]


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_killed_agent_is_replaced_and_only_then(
    agent: Agent, other: subprocess.Popen[str], frozen: bool
) -> None:
    assert other.stdout
    first, second, queued = other.stdout.readline().split()
    if frozen:
        other.send_signal(signal.SIGSTOP)
    assert await agent.scheduler.recover_dead() == []
    assert await agent.state(first) is TaskState.RUNNING
    other.send_signal(signal.SIGKILL)
    other.wait()
    taken = await agent.scheduler.recover_dead()
    assert [(row.task, row.state) for row in taken] == [
        (first, TaskState.CANCELLING), (second, TaskState.CANCELLING), (queued, TaskState.QUEUED),
    ]  # fmt: skip
    for task in (first, second):
        end = await agent.seen.end_of(task)
        assert (end.state, end.stop_reason) == ("cancelled", StopReason.OWNER_LOST)
    assert agent.executor.runs == []
    assert (await agent.scheduler.cancel(queued)).state == "cancelled"


async def test_a_stop_of_a_killed_agents_task_needs_no_restart(
    agent: Agent, other: subprocess.Popen[str]
) -> None:
    assert other.stdout
    first, second, queued = other.stdout.readline().split()
    other.send_signal(signal.SIGKILL)
    other.wait()
    reply = await agent.scheduler.cancel(first)
    assert isinstance(reply, CancelAccepted)
    assert reply.routed == ""
    assert (await agent.seen.end_of(first)).stop_reason == "user"
    assert (await agent.seen.end_of(second)).stop_reason == "owner_lost"
    assert await agent.state(queued) is TaskState.QUEUED
    with pytest.raises(StoreUnavailable):
        agent.live.hold("A")
