"""A stop in each phase of a model call: nothing is open, the server saw the end, nothing is asked or yielded later.

Evidence comes from the kernel's tables and from the server's log, never from the model alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from peri_tui.agent.models.call import Clocks, ModelEvent, TextDelta, ToolCall
from peri_tui.agent.models.openai import OpenAiModel
from peri_tui.core import faults
from peri_tui.errors import ModelError
from peri_tui.net import ModelTransport
from peri_tui.sockets import open_by_handle, release_kept
from tests.doubles.model_calls import collect, open_fds, open_model, open_to, request, until
from tests.doubles.model_server import ModelServer

pytestmark = pytest.mark.contract

SCRIPT = [
    {"when": "headers", "steps": [{"headers_delay": -1}]},
    {"when": "first_token", "steps": [{"stall": -1}]},
    {"when": "streaming", "steps": [{"text": "word " * 2000, "rate": 300}]},
    {"when": "mid_event", "steps": [{"text": "word"}, {"raw": 'data: {"choices": [{"del'}, {"stall": -1}]},
    {"when": "flood", "steps": [{"flood": 0}]},
    {"when": "retrying", "steps": [{"status": 429, "retry_after": 30}]},
    {"when": "late", "steps": [
        {"ignore_close": True}, {"text": "a"}, {"stall": 0.3},
        {"tool": "shell", "args": {"command": "touch marker"}}, {"text": "b"},
    ]},
    [{"text": "fine"}],
]  # fmt: skip
PRESSES = [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
# Unread bytes turn our end of file into a reset, and a flooding server may see that in its write first.
ENDS = ("fin", "rst", "write_failed")
CONNECTED = ["headers", "first_token", "streaming", "mid_event", "flood", "retrying"]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(SCRIPT) as running:
        yield running


@pytest.fixture(scope="module")
def full() -> Iterator[ModelServer]:
    with ModelServer(backlog_full=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """What only the collector closes was leaked."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def stop(
    model: OpenAiModel, task: asyncio.Task[Any], presses: int, ticks: int, *, shut: bool = True
) -> None:
    """Stop as the cancel token does, and as often as an impatient user would."""
    if shut:
        model.shut()
    for press in range(presses):
        task.cancel()
        for _ in range(ticks if press < presses - 1 else 0):
            await asyncio.sleep(0)
    await asyncio.wait([task], timeout=5)
    assert task.done()


async def start(model: OpenAiModel, phase: str, got: list[ModelEvent]) -> asyncio.Task[Any]:
    task = asyncio.create_task(collect(model, request(phase), got))
    if phase in ("streaming", "mid_event", "flood"):
        await until(lambda: model.phase == "streaming" and got)
    else:
        await until(lambda: model.phase == phase)
    return task


@pytest.mark.parametrize(("presses", "ticks"), PRESSES)
@pytest.mark.parametrize("phase", CONNECTED)
async def test_stop_in_a_phase(server: ModelServer, phase: str, presses: int, ticks: int) -> None:
    before = len(server.log())
    model, got = open_model(server.base_url), []
    task = await start(model, phase, got)
    assert open_to(server.port)
    assert model.open_sockets()
    requests = len(server.requests())

    shut_at = time.monotonic_ns()
    shut = model.shut()
    assert open_to(server.port) == []
    assert model.open_sockets() == []
    await stop(model, task, presses, ticks)
    assert task.cancelled()
    assert open_to(server.port) == []
    assert [(s.peer, s.phase) for s in shut] == [
        (f"127.0.0.1:{server.port}", {"mid_event": "streaming", "flood": "streaming"}.get(phase, phase))
    ]
    end = await until(lambda: [e for e in server.log()[before:] if e["ev"] in ENDS])
    assert end[0]["mono"] - shut_at < 1e9
    assert model.far_end() == ("none" if phase == "retrying" else "assumed")
    assert len(server.requests()) == requests
    with pytest.raises(ModelError, match="stopped"):
        await collect(model, request("fine"), [])
    await model.aclose()
    assert len(server.requests()) == requests


@pytest.mark.parametrize(("presses", "ticks"), PRESSES)
async def test_a_cancel_alone_hangs_up_too(server: ModelServer, presses: int, ticks: int) -> None:
    for phase in CONNECTED:
        before = len(server.log())
        model, got = open_model(server.base_url), []
        task = await start(model, phase, got)
        await stop(model, task, presses, ticks, shut=False)
        # After a refusal the connection may be used again, so only closing the model ends that one.
        if phase != "retrying":
            assert open_to(server.port) == []
        await model.aclose()
        assert open_to(server.port) == []
        await until(lambda before=before: [e for e in server.log()[before:] if e["ev"] in ENDS])


@pytest.mark.parametrize(("presses", "ticks"), PRESSES)
async def test_stop_while_connecting_to_a_full_backlog(full: ModelServer, presses: int, ticks: int) -> None:
    fds = open_fds()
    model = open_model(full.base_url)
    task = asyncio.create_task(collect(model, request(), []))
    await until(lambda: ("02",) in [row[:1] for row in open_to(full.port)])
    assert model.phase == "connecting"
    mine = {row[1] for row in open_to(full.port)}
    assert [s.phase for s in model.shut()] == ["connecting"]
    assert not mine & {row[1] for row in open_to(full.port)}
    await stop(model, task, presses, ticks)
    assert task.cancelled()
    assert model.open_sockets() == []
    assert model.far_end() == "none"
    await model.aclose()
    assert open_fds() <= fds


@pytest.mark.parametrize(("presses", "ticks"), PRESSES)
@pytest.mark.parametrize("shut", [True, False])
async def test_stop_inside_the_tls_handshake(presses: int, ticks: int, shut: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(5)
        port = silent.getsockname()[1]
        context = ssl.create_default_context()
        model = open_model(f"https://127.0.0.1:{port}/v1", context=context)
        task = asyncio.create_task(collect(model, request(), []))
        peer, _ = await asyncio.to_thread(silent.accept)
        with peer:
            peer.settimeout(5)
            first = await asyncio.to_thread(peer.recv, 1)
            assert first == b"\x16"  # a TLS handshake record
            await until(lambda: open_to(port))
            if shut:
                assert [s.phase for s in model.shut()] == ["tls"]
            await stop(model, task, presses, ticks, shut=shut)
            assert open_to(port) == []
            assert model.open_sockets() == []
            while peer.recv(65536):
                pass
        await model.aclose()


async def test_stop_while_resolving_opens_nothing_later(
    monkeypatch: pytest.MonkeyPatch, server: ModelServer
) -> None:
    release = asyncio.Event()

    async def slow(*args: Any, **more: Any) -> list[Any]:
        await asyncio.shield(release.wait())
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", slow)
    accepted = len(server.events("accept"))
    model = open_model("http://model.example/v1")
    task = asyncio.create_task(collect(model, request(), []))
    await until(lambda: model.phase == "resolving")
    assert model.shut() == []
    release.set()  # the answer comes after the stop, and nobody has cancelled the task
    with pytest.raises(ModelError, match="stopped"):
        await task
    assert open_to(server.port) == []
    assert len(server.events("accept")) == accepted
    await model.aclose()


async def test_shut_alone_ends_the_stream_with_a_clear_error(server: ModelServer) -> None:
    for phase in ("headers", "first_token", "streaming", "flood"):
        model, got = open_model(server.base_url), []
        task = await start(model, phase, got)
        model.shut()
        seen = len(got)
        with pytest.raises(ModelError, match="stopped") as caught:
            await task
        assert caught.value.evidence["stopped"] is True
        assert len(got) <= seen + 1
        await model.aclose()


async def test_a_consumer_that_is_stopped_elsewhere_hangs_up(server: ModelServer) -> None:
    before = len(server.log())
    model = open_model(server.base_url)
    blocked = asyncio.Event()

    async def consume() -> None:
        async with contextlib.aclosing(model.stream(request("streaming"))) as events:
            async for _ in events:
                blocked.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await blocked.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert open_to(server.port) == []
    await until(lambda: [e for e in server.log()[before:] if e["ev"] in ENDS], timeout=1)
    await model.aclose()


async def test_two_hundred_stops_leave_nothing(server: ModelServer) -> None:
    dice = random.Random(7)
    await collect(warm := open_model(server.base_url), request("fine"), [])
    await warm.aclose()
    fds, tasks = open_fds(), len(asyncio.all_tasks())

    async def one() -> None:
        model, got = open_model(server.base_url), []
        task = await start(model, dice.choice(CONNECTED), got)
        await asyncio.sleep(dice.random() * 0.003)
        await stop(model, task, dice.randint(1, 3), dice.randint(0, 2), shut=dice.random() < 0.7)
        await model.aclose()

    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(10)))
    assert open_to(server.port) == []
    assert open_fds() <= fds
    assert len(asyncio.all_tasks()) == tasks
    got: list[ModelEvent] = []
    model = open_model(server.base_url)
    assert TextDelta("fine") in await collect(model, request("fine"), got)
    await model.aclose()


async def test_a_tool_call_that_comes_after_the_stop_is_never_yielded(server: ModelServer) -> None:
    """F042: the server goes on on the same socket and calls a tool; nobody may hear it."""
    for cancel in (True, False):
        before = len(server.log())
        model, got = open_model(server.base_url), []
        task = asyncio.create_task(collect(model, request("late"), got))
        await until(lambda got=got: TextDelta("a") in got)
        model.shut()
        if cancel:
            task.cancel()
        await asyncio.wait([task], timeout=5)
        await until(
            lambda before=before: [
                e for e in server.log()[before:] if e["ev"] in ("write_failed", "reply_done", "rst")
            ]
        )
        assert [event for event in got if isinstance(event, ToolCall)] == []
        await model.aclose()


async def test_a_stop_between_two_attempts_sends_nothing(server: ModelServer) -> None:
    """Also where the stop comes in the very tick in which the wait is over."""
    requests = len(server.requests())

    async def sleep(seconds: float) -> None:
        assert seconds == 30
        model.shut()

    model = open_model(server.base_url, sleep=sleep, delays=lambda: iter([0.0] * 5))
    with pytest.raises(ModelError, match="stopped"):
        await collect(model, request("retrying"), [])
    await model.aclose()
    await asyncio.sleep(0.05)
    assert len(server.requests()) == requests + 1


async def test_shut_is_idempotent_and_works_on_an_idle_connection(server: ModelServer) -> None:
    before = len(server.log())
    model = open_model(server.base_url)
    await collect(model, request("fine"), [])
    assert [state for state, _ in open_to(server.port)] == ["01"]
    first = model.shut()
    assert first == model.shut()
    assert len(first) == 1
    assert first[0].bytes_in > 100
    assert first[0].local.startswith("127.0.0.1:")
    assert open_to(server.port) == []
    await until(lambda: [e for e in server.log()[before:] if e["ev"] == "fin"])
    assert open_model(server.base_url).shut() == []
    await model.aclose()


async def test_usage_after_a_cut_is_an_estimate(server: ModelServer) -> None:
    model, got = open_model(server.base_url), []
    task = asyncio.create_task(collect(model, request("streaming"), got))
    await until(lambda: len(got) >= 30)
    assert model.usage().exact is False
    await stop(model, task, 2, 1)
    usage = model.usage()
    assert usage.exact is False
    assert usage.tokens_in > 0
    assert abs(usage.tokens_out - len(got)) <= len(got) * 0.1 + 5
    await model.aclose()


# --- canaries: these tests can fail ----------------------------------------------------------------------------------


async def test_canary_a_socket_that_is_kept_is_seen(server: ModelServer) -> None:
    """With the fault on, neither the shutdown nor the cancel of the task can fake a quiet model."""
    before = len(server.log())
    faults.install(["model.keep_socket"])
    try:
        model, got = open_model(server.base_url), []
        task = await start(model, "first_token", got)
        assert model.shut() == []
        await stop(model, task, 2, 1)
        await model.aclose()
        assert open_to(server.port)
        assert len(model.open_sockets()) == 1
        assert "ESTABLISHED" in model.open_sockets()[0]
        assert open_by_handle(model._transport._sockets[0]).endswith("ESTABLISHED")
        assert model.far_end() == "continues"
        assert [e for e in server.log()[before:] if e["ev"] in ENDS] == []
    finally:
        faults.install([])
        release_kept()
    assert model.open_sockets() == []
    assert open_by_handle(model._transport._sockets[0]) == ""
    await until(lambda: [e for e in server.log()[before:] if e["ev"] in ENDS])


async def test_canary_plain_httpx_leaks_on_a_double_cancel(server: ModelServer) -> None:
    """The same stop, without our transport, leaves a connection open: this is what the guard is for."""

    async def plain(client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "streaming"}]}
        async with client.stream("POST", f"{server.base_url}/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                started.set()

    left = 0
    for _ in range(5):
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            started = asyncio.Event()
            task = asyncio.create_task(plain(client))
            await started.wait()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            left += len(open_to(server.port))
    assert left


def test_one_request_at_a_time() -> None:
    async def two() -> None:
        transport = ModelTransport(environ={})
        transport._busy = True
        with pytest.raises(RuntimeError, match="one request at a time"):
            async with transport.request("GET", "http://127.0.0.1:1/", headers={}):
                pass

    asyncio.run(two())


def test_clocks_have_the_documented_defaults() -> None:
    assert Clocks() == Clocks(connect=10, first_byte=120, idle=60, total=1800)
