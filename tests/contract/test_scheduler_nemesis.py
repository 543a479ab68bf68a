"""Three agents on one store, while a seeded nemesis drops the store's answers, before or after the deed.

What must hold whatever happens is checked on the store and on what each subscriber saw, in the manner of Jepsen's
checkers: one end a task, legal arrows only, dense numbers, nothing after the end, no acknowledged stop without effect.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peri_tui.core.messages import CancelAccepted, TaskEnded, TaskEvent, TaskStateChanged
from peri_tui.core.states import LEGAL, StopReason, TaskState
from peri_tui.errors import StoreUnavailable
from tests.contract.scheduling import make_submit
from tests.contract.test_scheduler import Agent, delta

pytestmark = pytest.mark.contract

# An append whose answer was lost would be written twice; inside one process SQLite's answers are not lost.
ONLY_BEFORE = {"append"}
STRUCK = ("submit", "transition", "request_cancel", "finish", "append", "get", "events", "cancelling_of")


class Nemesis:
    """Makes operations of stores fail: before they happen, or after, when only the answer is lost."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rate = 0.15
        self.struck = 0

    def haunt(self, store: Any) -> None:
        for name in STRUCK:
            setattr(store, name, self._struck(name, getattr(store, name)))

    def _struck(self, name: str, operation: Any) -> Any:
        async def call(*args: Any, **facts: Any) -> Any:
            before, after = self.chance.random(), self.chance.random()
            if before < self.rate:
                self.struck += 1
                raise StoreUnavailable(f"{name}: not done")
            result = await operation(*args, **facts)
            if after < self.rate and name not in ONLY_BEFORE:
                self.struck += 1
                raise StoreUnavailable(f"{name}: done, but the answer is lost")
            return result

        return call


async def one_task(
    agents: Sequence[Agent], chance: random.Random, acknowledged: set[str], tasks: list[str]
) -> None:
    """Submit a task somewhere, then let it complete, or stop it once or several times from anywhere."""
    home, submit = chance.choice(agents), make_submit()
    for _ in range(20):
        try:
            await home.scheduler.submit(submit)
            break
        except StoreUnavailable:
            await asyncio.sleep(0)
    else:
        return
    tasks.append(submit.task)
    for _ in range(chance.randrange(60)):
        await asyncio.sleep(0)
    run = home.scheduler._table.get(submit.task)
    if run is not None:
        run.emit(delta(submit.task, "text"))
    if chance.random() < 0.5:
        home.executor.finish(submit.task)
    for _ in range(chance.randrange(40)):
        try:
            reply = await chance.choice(agents).scheduler.cancel(submit.task, source="nemesis")
        except StoreUnavailable:
            continue
        if isinstance(reply, CancelAccepted) and reply.durable:
            acknowledged.add(submit.task)
    home.executor.finish(submit.task)


def check_log(task: str, events: Sequence[TaskEvent], version: int) -> None:
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), task
    states = [TaskState(event.state) for event in events if isinstance(event, TaskStateChanged | TaskEnded)]
    assert states[0] is TaskState.QUEUED
    assert all(after in LEGAL[before] for before, after in itertools.pairwise(states)), states
    assert version == len(states), states
    assert isinstance(events[-1], TaskEnded)
    assert sum(isinstance(event, TaskEnded) for event in events) == 1


def check_seen(task: str, seen: Sequence[TaskEvent]) -> None:
    numbers = [event.seq for event in seen]
    assert numbers == sorted(set(numbers)), (task, numbers)
    ends = [event for event in seen if isinstance(event, TaskEnded)]
    assert ends, (task, seen)
    assert seen[-1] is ends[-1], (task, seen)
    # Told before it was durable, an end says that it is not verified; the true one may follow.
    assert not any(end.verified for end in ends[:-1]), (task, seen)


async def settle(agents: Sequence[Agent]) -> None:
    """Let every agent look at the store until nothing is left to do."""
    async with asyncio.timeout(20):
        busy = True
        while busy:
            busy = False
            for agent in agents:
                await agent.scheduler.check()
                busy = not await agent.scheduler.idle(0.05) or busy
                busy = bool(agent.scheduler._supervisor.unrecorded) or busy
                busy = bool(await agent.store.cancelling_of(agent.name)) or busy


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_store_drops_every_task_ends_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    nemesis = Nemesis(chance)
    agents = [Agent(tmp_path, name, concurrency=4) for name in "ABC"]
    for agent in agents:
        await agent.begin()
        nemesis.haunt(agent.store)
    tasks: list[str] = []
    acknowledged: set[str] = set()
    await asyncio.gather(*(one_task(agents, chance, acknowledged, tasks) for _ in range(40)))
    nemesis.rate = 0.0
    await settle(agents)
    assert nemesis.struck > 20
    for task in tasks:
        row = await agents[0].store.get(task)
        assert row is not None
        assert row.state.is_final or row.state is TaskState.CANCEL_FAILED, (task, row.state)
        check_log(task, await agents[0].store.events(task), row.version)
        if task in acknowledged:
            assert row.state in (TaskState.CANCELLED, TaskState.CANCEL_FAILED)
            assert row.stop_reason == StopReason.USER
        for agent in agents:
            if row.owner == agent.name:
                await agent.scheduler.events.filled(task)
                check_seen(task, agent.seen.of(task))
    for agent in agents:
        await agent.end()
