"""A stop at each point of a tool call, over the real wire: the far end acts on nothing late, and the session lives.

The scripted server runs in strict mode: it answers 400 to a history in which one tool call has not its one result.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.cancel import CancelCause
from peri_tui.agent.history import History
from peri_tui.agent.models.registry import open_model
from peri_tui.agent.processes.spawn import Processes, child_env
from peri_tui.core.messages import Delta, ModelChoice, ToolStarted
from peri_tui.core.states import StopReason
from tests.doubles.body import TASK, Body
from tests.doubles.model_server import ModelServer

pytestmark = pytest.mark.contract

SLOW = {"tool": "shell", "args": {"command": "touch began; sleep 60"}}
MARK = {"tool": "shell", "args": {"command": "touch marker"}}
SCRIPT = [
    {"when": "name sent", "steps": [{"text": "I will"}, MARK | {"cut_at": 0}, {"stall": -1}]},
    {"when": "arguments half", "steps": [{"text": "I will"}, MARK | {"cut_at": 12, "split": 3}, {"stall": -1}]},
    {"when": "late call", "steps": [{"ignore_close": True}, {"text": "I will"}, {"stall": 0.4}, MARK]},
    {"when": "tool running", "steps": [{"text": "I will"}, SLOW]},
    {"when": "between two", "steps": [{"tools": [SLOW, MARK]}]},
    {"when": "result ready", "steps": [{"tool": "list_files", "args": {}}]},
    {"when": "goes on", "steps": [{"text": "fine"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(SCRIPT, strict=True) as running:
        yield running


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    registry = Processes()
    yield registry
    assert (await registry.close()).outcome == "empty"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.005)


def make(folder: Path, server: ModelServer, processes: Processes, **how: Any) -> Body:
    body = Body(folder, processes=processes, **how)
    choice = ModelChoice(provider="openai", base_url=server.base_url, model="m")
    body.context.model = open_model(choice, environ={})
    body.context.env = child_env(os.environ, TASK)
    # As the agent wires it: the token's listeners hang up and signal before the body is cancelled.
    body.token.on_set(lambda cause: hang_up(body, processes, cause))
    return body


def hang_up(body: Body, processes: Processes, _: CancelCause) -> None:
    body.context.model.shut()
    processes.interrupt(TASK)


@pytest.mark.parametrize(
    "point", ["name sent", "arguments half", "late call", "tool running", "between two", "result ready"]
)
async def test_a_stop_leaves_a_session_that_a_strict_server_takes(
    point: str, tmp_path: Path, server: ModelServer, processes: Processes
) -> None:
    body = make(tmp_path, server, processes, prompt=point)
    if point == "result ready":
        # The tool has ended, its result stands, the next request is about to go out.
        body.context.drain = stop_after_tool(body)
    task = body.start()
    if point in ("tool running", "between two"):
        await until((tmp_path / "began").exists)
    elif point != "result ready":
        await until(lambda: [d for d in body.of(Delta) if d.ch == "text"])
    body.stop()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await processes.stop(TASK)).outcome == "empty"
    asked = len(server.requests())
    if point == "late call":
        await asyncio.sleep(0.6)  # the server sends its call now, to nobody
    assert len(server.requests()) == asked
    assert not (tmp_path / "marker").exists()
    if point in ("name sent", "arguments half", "late call"):
        assert body.of(ToolStarted) == []
    await body.context.model.aclose()
    messages = body.history.close(StopReason.USER)
    body.close()
    await goes_on(tmp_path, server, processes, messages)


async def goes_on(
    folder: Path, server: ModelServer, processes: Processes, messages: list[dict[str, Any]]
) -> None:
    body = make(folder, server, processes, prompt="goes on", history=History(messages))
    outcome = await body.run()
    assert (outcome.kind, outcome.answer) == ("completed", "fine"), outcome.message
    assert server.events("violation") == []
    await body.context.model.aclose()
    body.close()


def stop_after_tool(body: Body) -> Callable[[], Any]:
    async def drain() -> None:
        if body.of(ToolStarted):
            body.stop()

    return drain
