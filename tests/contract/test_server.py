"""The agent's door, over real sockets: who gets in, what each route answers, and that a cancel needs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from peri_tui.agent.desk import ControlDesk
from peri_tui.agent.main import Agent, _dismantle, assemble
from peri_tui.agent.presence import Presence
from peri_tui.agent.server import AgentServer
from peri_tui.config import Settings, find_paths
from peri_tui.core import messages
from peri_tui.core.ids import make_ulid
from peri_tui.core.messages import SUBPROTOCOL, Cancel, Credit, Hello, Submit, decode_from_agent, encode
from peri_tui.net import get_task, get_trace, post_cancel

pytestmark = pytest.mark.contract

TOKEN = "right-token-right-token-right-token-right-token"


def fresh() -> str:
    return make_ulid(int(time.time() * 1000), os.urandom(10))


class Door:
    """An assembled agent behind its server."""

    def __init__(self, agent: Agent, path: Path, workspace: Path) -> None:
        self.agent = agent
        self.path = path
        self.workspace = workspace

    def connect(self, where: str = "control", *, token: str | None = TOKEN, **options: Any) -> unix_connect:
        headers = [("Authorization", f"Bearer {token}")] if token is not None else []
        headers += options.pop("headers", [])
        options.setdefault("subprotocols", [SUBPROTOCOL])
        return unix_connect(
            str(self.path), uri=f"ws://localhost/v1/{where}", additional_headers=headers, compression=None,
            ping_interval=None, **options,
        )  # fmt: skip

    def raw(self, request: bytes) -> bytes:
        """Send bytes and return everything that comes until the end."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(str(self.path))
            peer.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := peer.recv(65536):
                    answer += chunk
            return answer

    def submit(self, **changed: Any) -> Submit:
        facts = {
            "id": fresh(), "task": fresh(), "session": fresh(), "workspace": str(self.workspace),
            "prompt": "rehearse", "approve": "all",
        }  # fmt: skip
        return Submit(**(facts | changed))


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    paths = find_paths({"PERI_HOME": str(tmp_path / "home")})
    paths.make()
    workspace = tmp_path / "ws"
    workspace.mkdir()
    agent = await assemble(paths, replace(Settings(), offline_rate=30.0), fresh(), workspace)
    presence = Presence(lambda: None, lambda: True, lambda orphaned: None)
    desk = ControlDesk(
        agent.instance, scheduler=agent.scheduler, store=agent.store, questions=agent.questions,
        presence=presence, trust=agent.trust, jobs=agent.executor.jobs,
    )  # fmt: skip
    path = paths.socket(agent.instance)
    server = AgentServer(desk, path, TOKEN, trace_dir=paths.trace, log=agent.log)
    await server.start()
    yield Door(agent, path, workspace)
    await agent.scheduler.stop_all(messages_reason())
    await agent.scheduler.idle(20)
    presence.close()
    await server.close()
    await _dismantle(agent)


def messages_reason() -> Any:
    from peri_tui.core.states import StopReason

    return StopReason.SHUTDOWN


async def ask(connection: ClientConnection, request: messages.Message) -> Any:
    """Send a request and return its reply; heartbeats are passed over."""
    await connection.send(encode(request))
    async with asyncio.timeout(10):
        while True:
            reply = decode_from_agent(await connection.recv())
            if not isinstance(reply, messages.Heartbeat):
                return reply


def hello(door: Door, **changed: Any) -> Hello:
    return Hello(
        **({"id": fresh(), "proto": [1], "client": "test", "workspace": str(door.workspace)} | changed)
    )


# --- the gate -------------------------------------------------------------------------------------------------------


async def test_the_socket_is_the_users_own(door: Door) -> None:
    assert stat.S_IMODE(door.path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(door.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"headers": [("Authorization", f"Bearer {TOKEN}")]}, 400),
        ({"headers": [("Origin", "https://evil.example")]}, 403),
        ({"headers": [("Origin", "null")]}, 403),
        ({"subprotocols": ["other.v1"]}, 400),
        ({"subprotocols": None}, 400),
    ],
)
async def test_who_does_not_belong_gets_no_connection(
    door: Door, options: dict[str, Any], status: int
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with door.connect(**options):
            pass
    assert refused.value.response.status_code == status
    assert not [name for name in refused.value.response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /", b"404"),
        (b"GET /healthz", b"404"),
        (b"GET /v1/control", b"426"),
        (b"POST /v1/tasks", b"405"),
        (b"GET /v1/tasks/not-an-id", b"404"),
        (b"GET /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV", b"404"),
        (b"GET /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV/cancel", b"405"),
        (b"POST /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV/trace", b"405"),
        (b"GET /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV/other", b"404"),
        (b"GET /v1/tasks", b"200"),
    ],
)
async def test_each_route_has_its_own_answer(door: Door, request_line: bytes, status: bytes) -> None:
    answer = await asyncio.to_thread(door.raw, request_line + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.split(b" ")[1] == status
    assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("host", [b"evil.example", b"localhost.evil.example", b"127.0.0.1.nip.example"])
async def test_a_foreign_host_is_refused_on_every_route(door: Door, host: bytes) -> None:
    for line in (b"GET /v1/tasks", b"POST /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV/cancel"):
        answer = await asyncio.to_thread(door.raw, line + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert answer.split(b" ")[1] == b"403"


async def test_a_post_with_a_body_harms_nobody(door: Door) -> None:
    request = b"POST /v1/tasks/01ARZ3NDEKTSV4RRFFQ69G5FAV/cancel HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"
    await asyncio.to_thread(door.raw, request)
    async with door.connect() as control:
        assert isinstance(await ask(control, hello(door)), messages.Welcome)


# --- who may do what ------------------------------------------------------------------------------------------------


async def test_without_the_token_one_may_read_and_stop_but_not_start(door: Door) -> None:
    async with door.connect(token=None) as control:
        welcome = await ask(control, hello(door))
        assert welcome.may_write is False
        for request in (
            door.submit(),
            messages.Answer(id=fresh(), task=fresh(), qid="q1", outcome="allow"),
            messages.Trust(id=fresh(), workspace=str(door.workspace), trusted=True),
        ):
            reply = await ask(control, request)
            assert (reply.code, reply.re) == ("E_AUTH", request.id)
    async with door.connect() as owner, door.connect(token=None) as other:
        await ask(owner, hello(door))
        started = await ask(owner, submit := door.submit())
        assert isinstance(started, messages.SubmitOk)
        # Even before a hello: stopping is cheap.
        stopped = await ask(other, Cancel(id=fresh(), task=submit.task))
        assert (stopped.state, stopped.first, stopped.durable) in (
            ("cancelling", True, True),
            ("cancelled", True, True),
        )


async def test_jobs_need_the_token_and_bad_requests_are_named(door: Door) -> None:
    listing = messages.Job(id=fresh(), action="list")
    async with door.connect(token=None) as control:
        await ask(control, hello(door))
        assert (await ask(control, listing)).code == "E_AUTH"
    async with door.connect() as control:
        await ask(control, hello(door))
        assert await ask(control, listing) == messages.JobList(re=listing.id)
        for action, code, said in (
            ("promote", "E_JOB", "unknown job 'j9'; known: none"),
            ("stop", "E_JOB", "unknown job 'j9'; known: none"),
            ("burn", "E_PROTO_FIELD", "unknown action 'burn'; known: list, promote, stop"),
        ):
            request = messages.Job(id=fresh(), action=action, task=fresh(), job="j9")
            assert await ask(control, request) == messages.Failure(code=code, msg=said, re=request.id)


async def test_a_version_that_nobody_speaks_is_explained(door: Door) -> None:
    async with door.connect() as control:
        reply = await ask(control, hello(door, proto=[7]))
        assert (reply.code, "peri.v1" in reply.msg, "7" in reply.msg) == ("E_PROTO", True, True)
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(10):
                await control.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4400


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ('{"t":"wish","id":"1"}', "E_UNKNOWN_TYPE"),
        ("{", "E_PROTO"),
        ('{"t":"cancel"}', "E_PROTO"),
        ('{"t":"cancel","id":"1","task":[1]}', "E_PROTO"),
        ('["cancel"]', "E_PROTO"),
        ("NaN", "E_PROTO"),
        ("[" * 30_000, "E_PROTO"),
        ('{"t":"cancel","id":"1","task":"../../x"}', "E_UNKNOWN_TASK"),
        ('{"t":"cancel","id":"1","task":"01ARZ3NDEKTSV4RRFFQ69G5FAV","mode":"gentle"}', "E_PROTO_FIELD"),
        ('{"t":"cancel","id":"1","task":"01ARZ3NDEKTSV4RRFFQ69G5FAV","reason":"whim"}', "E_PROTO_FIELD"),
    ],
)
async def test_a_bad_message_is_named_and_the_connection_lives_on(door: Door, frame: str, code: str) -> None:
    async with door.connect() as control:
        await control.send(frame)
        async with asyncio.timeout(10):
            reply = decode_from_agent(await control.recv())
        assert isinstance(reply, messages.Failure)
        assert reply.code == code
        assert isinstance(await ask(control, hello(door)), messages.Welcome)


async def test_too_many_bad_messages_and_too_big_ones_close_only_their_own_connection(door: Door) -> None:
    async with door.connect() as good:
        await ask(good, hello(door))
        async with door.connect() as noisy:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(30):
                    await noisy.send("{")
                async with asyncio.timeout(10):
                    async for _reply in noisy:
                        pass
            assert noisy.close_code == 1008
        async with door.connect() as big:
            with contextlib.suppress(ConnectionClosed):
                await big.send("x" * (messages.MAX_CONTROL + 1))
            await big.wait_closed()
            assert big.close_code == 1009
        assert isinstance(await ask(good, Cancel(id=fresh(), task=fresh())), messages.CancelNoop)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt": " \n"}, "prompt is empty"),
        ({"workspace": "/no/such/folder"}, "/no/such/folder"),
        ({"workspace": "relative"}, "relative"),
        ({"task": "nope"}, "'nope' is no task id"),
        ({"session": "nope"}, "'nope' is no session id"),
    ],
)
async def test_a_bad_submission_names_what_is_wrong_and_starts_nothing(
    door: Door, changed: dict[str, Any], words: str
) -> None:
    async with door.connect() as control:
        reply = await ask(control, door.submit(**changed))
        assert (reply.code, words in reply.msg) == ("E_INPUT", True)
    assert await door.agent.store.tasks(limit=10) == []


async def test_the_same_submission_is_answered_alike_and_another_under_its_id_is_a_conflict(
    door: Door,
) -> None:
    async with door.connect() as control:
        submit = door.submit()
        first = await ask(control, submit)
        again = await ask(control, msgspec.structs.replace(submit, id=fresh()))
        assert (first.task, again.task) == (submit.task, submit.task)
        other = await ask(control, msgspec.structs.replace(submit, id=fresh(), prompt="something else"))
        assert other.code == "E_CONFLICT"


# --- stopping -------------------------------------------------------------------------------------------------------


async def test_any_number_of_cancels_over_every_route_have_one_effect(door: Door) -> None:
    async with door.connect() as control, door.connect(token=None) as lane:
        await ask(control, submit := door.submit())
        answers = await asyncio.gather(
            ask(control, Cancel(id=fresh(), task=submit.task)),
            ask(lane, Cancel(id=fresh(), task=submit.task, attempt=2)),
        )
        over_http = await asyncio.to_thread(post_cancel, door.path, submit.task)
        await door.agent.scheduler.idle(20)
        late = await ask(control, Cancel(id=fresh(), task=submit.task))
    # The second may find the stop under way, or already done: the answer differs, the effect does not.
    accepted = [answer for answer in answers if isinstance(answer, messages.CancelAccepted)]
    assert [answer.first for answer in accepted].count(True) == 1
    assert len({answer.cancel_id for answer in accepted}) == 1
    assert over_http["t"] in ("cancel.accepted", "cancel.noop")
    assert (late.state, late.stop_reason) == ("cancelled", "user")
    described = await asyncio.to_thread(get_task, door.path, submit.task)
    assert described["state"] == "cancelled"
    trace = await asyncio.to_thread(get_trace, door.path, submit.task)
    committed = [record for record in trace["records"] if record["ev"] == "cas" and record["data"]["ok"]]
    assert len(committed) == 1


async def test_a_cancel_before_its_submission_leaves_a_tombstone(door: Door) -> None:
    async with door.connect() as control:
        submit = door.submit()
        answer = await ask(control, Cancel(id=fresh(), task=submit.task))
        assert answer.state == "tombstone"
        assert (await ask(control, submit)).state == "cancelled"
    row = await door.agent.store.get(submit.task)
    assert row is not None
    assert (row.state, row.started) == ("cancelled", 0)


async def test_an_answer_to_a_closed_question_is_harmless(door: Door) -> None:
    async with door.connect() as control:
        reply = await ask(control, messages.Answer(id=fresh(), task=fresh(), qid="q1", outcome="allow"))
        assert reply.code == "E_CLOSED"
        reply = await ask(control, messages.Answer(id=fresh(), task=fresh(), qid="q1", outcome="always"))
        assert reply.code == "E_PROTO_FIELD"


# --- the stream -----------------------------------------------------------------------------------------------------


async def test_the_stream_never_goes_beyond_its_credit_and_resumes_without_a_hole(door: Door) -> None:
    async with door.connect() as control:
        welcome = await ask(control, hello(door))
        submit = door.submit(session=welcome.session, prompt="find x")
        stream_hello = hello(door, session=welcome.session, resume={submit.task: 0})
        await ask(control, submit)
        await door.agent.scheduler.idle(30)
        seen: list[int] = []
        async with door.connect("stream") as stream:
            await stream.send(encode(stream_hello))
            await stream.send(encode(Credit(n=3)))
            await _read(stream, seen, quiet=0.3)
        first = list(seen)
        assert 0 < len(first) <= messages.CREDIT_WINDOW + 3
        resumed = hello(door, session=welcome.session, resume={submit.task: first[-1]})
        async with door.connect("stream") as stream:
            await stream.send(encode(resumed))
            await stream.send(encode(Credit(n=1000)))
            await _read(stream, seen, quiet=0.3)
    assert seen == list(range(1, seen[-1] + 1))
    row = await door.agent.store.get(submit.task)
    assert row is not None
    assert seen[-1] == row.last_seq


async def _read(stream: ClientConnection, seen: list[int], *, quiet: float) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(quiet if seen else 10):
                event = json.loads(await stream.recv())
            seen.extend(range(event["seq"], max(event["seq"], event.get("seq_to", 0)) + 1))


async def test_a_stream_without_a_hello_is_closed(door: Door) -> None:
    async with door.connect("stream") as stream:
        await stream.send(encode(Credit(n=1)))
        await stream.wait_closed()
        assert stream.close_code == 4400


async def test_a_press_that_comes_after_the_end_is_traced_under_the_stops_own_id(door: Door) -> None:
    async with door.connect() as control:
        await ask(control, submit := door.submit())
        first = await ask(control, Cancel(id=fresh(), task=submit.task))
        await door.agent.scheduler.idle(20)
        await ask(control, Cancel(id=fresh(), task=submit.task, mode="force"))
    trace = await asyncio.to_thread(get_trace, door.path, submit.task)
    assert {record["cancel_id"] for record in trace["records"] if record.get("cancel_id")} == {
        first.cancel_id
    }
    assert [record["ev"] for record in trace["records"]].count("received") == 2
