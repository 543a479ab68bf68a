"""The agent's HTTP routes as a client calls them: from any thread, over a Unix socket, with a clear error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peri_tui.errors import AgentUnreachable
from peri_tui.net import get_task, get_trace, post_cancel

pytestmark = pytest.mark.contract

TASK = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@contextmanager
def agent(folder: Path, answer: bytes | None) -> Iterator[tuple[Path, list[bytes]]]:
    """Listen on a Unix socket and give one answer; None: take the request and say nothing."""
    path, heard, over = folder / "agent.sock", list[bytes](), threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            heard.append(peer.recv(65536))
            if answer is None:
                over.wait(5)
            else:
                peer.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path, heard
    finally:
        over.set()
        thread.join(5)
        listener.close()


def http(body: Any, status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + data


def test_a_cancel_is_a_post_without_body(tmp_path: Path) -> None:
    with agent(tmp_path, http({"t": "cancel.accepted", "task": TASK}, "202 Accepted")) as (path, heard):
        answer = post_cancel(path, TASK, reason="user", mode="force", epoch=3, t_ui=7, attempt=2)
    assert answer == {"t": "cancel.accepted", "task": TASK}
    head, _, body = heard[0].partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert head.startswith(
        f"POST /v1/tasks/{TASK}/cancel?epoch=3&reason=user&mode=force&t_ui=7&attempt=2 ".encode()
    )
    assert "host: localhost" in lines
    assert body == b""
    assert not [line for line in lines if line.startswith(("origin", "transfer-encoding"))]
    assert [line for line in lines if line.startswith("content-length")] in ([], ["content-length: 0"])


def test_it_works_from_many_threads_at_once(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    folders = [tmp_path / str(number) for number in range(4)]

    def call(path: Path) -> None:
        answers.append(post_cancel(path, TASK))

    for folder in folders:
        folder.mkdir()
        with agent(folder, http({"t": "cancel.noop"})) as (path, _):
            thread = threading.Thread(target=call, args=(path,))
            thread.start()
            thread.join(5)
    assert answers == [{"t": "cancel.noop"}] * 4


def test_the_agents_own_error_is_an_answer(tmp_path: Path) -> None:
    with agent(tmp_path, http({"t": "error", "code": "E_UNKNOWN_TASK"}, "404 Not Found")) as (path, _):
        assert get_task(path, TASK)["code"] == "E_UNKNOWN_TASK"


def test_task_and_trace(tmp_path: Path) -> None:
    with agent(tmp_path, http([{"layer": 4}])) as (path, heard):
        assert get_trace(path, "odd/id") == {"records": [{"layer": 4}]}
    assert heard[0].startswith(b"GET /v1/tasks/odd%2Fid/trace HTTP/1.1")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "no answer within 0.2 s"),
        (b"", "agent at"),
        (http(b"<html>"), "is no JSON"),
        (b"nonsense\r\n\r\n", "agent at"),
    ],
)
def test_what_is_no_answer_is_unreachable(tmp_path: Path, answer: bytes | None, said: str) -> None:
    with agent(tmp_path, answer) as (path, _), pytest.raises(AgentUnreachable, match=said) as caught:
        post_cancel(path, TASK, timeout=0.2)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 75


def test_no_agent_at_all(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match=str(tmp_path / "none.sock")):
        post_cancel(tmp_path / "none.sock", TASK)


def test_a_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    with agent(tmp_path, b"") as (path, _), pytest.raises(AgentUnreachable):
        get_task(path, TASK)
    with pytest.raises(AgentUnreachable, match="refused"):
        get_task(path, TASK)
