"""A scripted model server: a separate process that speaks the OpenAI chat-completions wire and logs every end.

::

    python -m tests.doubles.model_server --port 0 --log FILE --script FILE_OR_JSON [--strict] [--backlog-full]

The first line on stdout is the port. The script is a list of replies, or ``{"replies": [...], "strict": true}``. A
reply is a list of steps, or ``{"when": TEXT, "steps": [...]}``: such a reply serves the requests whose last user
message contains TEXT (the longest TEXT that fits wins). Replies of one ``when`` (or of none) are used in order, the
last one repeats.

Steps::

    {"text": "…", "rate": 50}           text, a token a chunk, tokens a second (0: no delay)
    {"thinking": "…", "rate": 50}       the same as reasoning_content
    {"tool": "shell", "args": {…}}      a tool call; "split": n characters a delta, "cut_at": n sends only n
                                        characters, "index", "id"; "args" may be a raw text
    {"tools": [{…}, {…}]}               several tool calls, their deltas interleaved
    {"stall": 2.0}                      nothing for so long; -1: until the end of the server
    {"flood": 1000}                     chunks as fast as the socket takes them; 0: endless
    {"comment": "ping", "every": 0.1, "count": 10}    SSE comment lines
    {"bytes": 1}                        from here on write the body in pieces of so many bytes (cuts UTF-8 too)
    {"raw": "…"} or {"hex": "…"}        bytes as they are
    {"error": {…}}                      an error object inside the 200
    {"invalid": true}                   an event that is no JSON
    {"ignore_close": true}              go on although the client has closed
    {"cut": "fin"} or {"cut": "rst"}    end the connection here
    {"usage": {…}}                      instead of the counted usage
    {"finish": "length"}                send this finish_reason now
    {"done": false}                     end of file without finish_reason and [DONE]
    {"status": 429, "retry_after": 30, "body": …, "content_type": …}   an HTTP error (first step)
    {"headers_delay": 1.0}              wait before the status line (first steps)

The log has one JSON object a line, each with ``ev``, ``mono`` (``time.monotonic_ns``) and ``conn``: listen, accept,
request, first_byte, progress (every 100 chunks), reply_done, fin (the client's end of file), rst, write_failed,
closed (by the script).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]


class Cut(Exception):
    """The script ends the connection here."""


class Recorder:
    """Appends one line an event, each in one write."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, ev: str, conn: int = 0, **facts: Any) -> None:
        line = {"ev": ev, "mono": time.monotonic_ns(), "conn": conn} | facts
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Script:
    """Chooses the reply of a request."""

    def __init__(self, source: Any) -> None:
        if isinstance(source, dict):
            self.strict = bool(source.get("strict"))
            source = source.get("replies", [])
        else:
            self.strict = False
        self._queues: dict[str, list[list[dict[str, Any]]]] = {}
        for reply in source:
            when, steps = (reply.get("when", ""), reply["steps"]) if isinstance(reply, dict) else ("", reply)
            self._queues.setdefault(when, []).append(steps)

    def choose(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the steps for this history."""
        users = [text_of(message) for message in messages if message.get("role") == "user"]
        last = users[-1] if users else ""
        when = max((key for key in self._queues if key in last), key=len, default="")
        queue = self._queues.get(when)
        if not queue:
            return [{"text": "ok"}]
        return queue.pop(0) if len(queue) > 1 else queue[0]


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)


def violation(messages: list[dict[str, Any]]) -> str:
    """Return why this history is not acceptable, or an empty text.

    Every tool call is answered by exactly one tool result, directly after; no message is empty; roles come in order.
    """
    open_calls: list[str] = []
    if not messages:
        return "no messages"
    for number, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{number}]"
        if role == "tool":
            call = message.get("tool_call_id")
            if call not in open_calls:
                return f"{where}: tool result {call!r} answers no open tool call"
            open_calls.remove(call)
            if not isinstance(message.get("content"), (str, list)):
                return f"{where}: tool result without content"
            continue
        if open_calls:
            return f"{where}: role {role!r} before the results of tool calls {open_calls}"
        problem = _violation_of(message, number, messages)
        if problem:
            return f"{where}: {problem}"
        if role == "assistant":
            open_calls = [call["id"] for call in message.get("tool_calls") or []]
    if open_calls:
        return f"tool calls without a result: {open_calls}"
    if messages[-1].get("role") == "assistant":
        return "the last message is the assistant's"
    return ""


def _violation_of(message: dict[str, Any], number: int, messages: list[dict[str, Any]]) -> str:
    role = message.get("role")
    if role in ("system", "developer"):
        return "" if all(m.get("role") == role for m in messages[:number]) else "system message in the middle"
    if role == "user":
        return "" if text_of(message) else "empty user message"
    if role != "assistant":
        return f"unknown role {role!r}"
    if number == 0 or messages[number - 1].get("role") == "assistant":
        return "assistant message without a message before it to answer"
    calls = message.get("tool_calls")
    if calls is not None and not calls:
        return "empty tool_calls"
    for call in calls or []:
        function = call.get("function") or {}
        if not call.get("id") or call.get("type") != "function" or not function.get("name"):
            return "tool call without id, type or name"
        try:
            json.loads(function.get("arguments") or "")
        except ValueError:
            return f"tool call {call['id']!r}: arguments are no JSON"
    if calls and len({call["id"] for call in calls}) != len(calls):
        return "two tool calls with one id"
    return "" if calls or text_of(message) else "empty assistant message"


class Server:
    """What the connections share."""

    def __init__(self, script: Script, record: Recorder, strict: bool) -> None:
        self.script = script
        self.record = record
        self.strict = strict or script.strict
        self.connections = 0
        self.requests = 0


class Connection(asyncio.Protocol):
    """One connection: reads requests, plays replies, and never stops listening for the client's end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        server.connections += 1
        self.conn = server.connections
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.ignore_close = False
        self.lost = False
        self.ours = False

    def record(self, ev: str, **facts: Any) -> None:
        self._server.record(ev, self.conn, **facts)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.socket: socket.socket = transport.get_extra_info("socket")
        self.record("accept", peer=list(transport.get_extra_info("peername")[:2]))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, target, _ = lines[0].split(" ", 2)
        self._task = asyncio.get_running_loop().create_task(
            self._serve(method, target, headers, rest[:length])
        )

    def eof_received(self) -> bool:
        self.record("fin")
        if self.ignore_close:
            return True
        self._stop()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._writable.set()
        if isinstance(exc, ConnectionResetError):
            self.record("rst")
        elif exc is not None:
            self.record("write_failed", why=str(exc))
        if not self.ignore_close:
            self._stop()

    def _stop(self) -> None:
        if self._task is not None and not self.ours:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _serve(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        number = self._server.requests = self._server.requests + 1
        payload = json.loads(body) if body else {}
        messages = payload.get("messages", [])
        self.record(
            "request",
            number=number,
            method=method,
            target=target,
            host=headers.get("host", ""),
            authorization=headers.get("authorization", ""),
            digest=hashlib.sha256(body).hexdigest()[:16],
            count=len(messages),
            messages=messages[-6:],
            options={key: value for key, value in payload.items() if key not in ("messages", "tools")},
            tools=[tool.get("function", {}).get("name") for tool in payload.get("tools", [])],
        )
        with contextlib.suppress(Cut):
            await self._answer(method, target, payload, number)

    async def _answer(self, method: str, target: str, payload: dict[str, Any], number: int) -> None:
        path = target.partition("?")[0].rstrip("/")
        if method == "GET" and path.endswith("/models"):
            await self._plain(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        elif method != "POST" or not path.endswith("/chat/completions"):
            await self._plain(404, {"error": {"message": f"no route {method} {path}"}})
        else:
            problem = violation(payload.get("messages", [])) if self._server.strict else ""
            if problem:
                self.record("violation", why=problem, number=number)
                await self._plain(400, {"error": {"message": problem, "type": "invalid_request_error"}})
                return
            steps = self._server.script.choose(payload.get("messages", []))
            await Reply(self, payload, number).play(steps)

    async def _plain(
        self, status: int, body: Any, content_type: str = "application/json", extra: str = ""
    ) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n{extra}\r\n"
        await self.write(head.encode() + data)
        self.record("reply_done", status=status)

    async def write(self, data: bytes) -> None:
        """Write and wait while the socket is full; quiet once the connection is gone, if so scripted."""
        if self.lost:
            self.record("write_failed", why="connection lost")
            raise Cut
        if not self.transport.is_closing():
            self.transport.write(data)
        await (self._writable.wait() if not self.transport.is_closing() else asyncio.sleep(0))

    def cut(self, how: str) -> None:
        """End the connection as the script says."""
        self.ours = True
        self.record("closed", how=how)
        if how == "rst":
            # Linger zero: close sends RST instead of FIN.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()
        raise Cut


class Reply:
    """Plays the steps of one reply."""

    def __init__(self, connection: Connection, payload: dict[str, Any], number: int) -> None:
        self._connection = connection
        self._payload = payload
        self._number = number
        self._began = False
        self._piece = 0
        self._chunks = 0
        self._tokens = 0
        self._tool_index = 0
        self._finished = ""
        self._done = True
        self._usage: dict[str, Any] | None = None

    async def play(self, steps: list[dict[str, Any]]) -> None:
        """Play every step, then end the stream as a good server does, unless the script said otherwise."""
        for step in steps:
            if "status" in step:
                await self._status(step)
                return
            await self._step(step)
        await self._begin()
        if self._done:
            if not self._finished:
                await self._finish("tool_calls" if self._tool_index else "stop")
            await self._send_usage()
            await self._body(b"data: [DONE]\n\n")
        await self._connection.write(b"0\r\n\r\n")
        self._connection.record("reply_done", number=self._number, chunks=self._chunks, tokens=self._tokens)

    async def _step(self, step: dict[str, Any]) -> None:
        kind = next(key for key in step if key in self._KINDS)
        await self._KINDS[kind](self, step)

    async def _text(self, step: dict[str, Any]) -> None:
        key = "text" if "text" in step else "thinking"
        field = "content" if key == "text" else step.get("field", "reasoning_content")
        for token in split_tokens(step[key]):
            await self._delta({field: token})
            self._tokens += 1
            if step.get("rate"):
                await asyncio.sleep(1 / step["rate"])

    async def _tool(self, step: dict[str, Any]) -> None:
        for delta in self._tool_deltas(step):
            await self._delta({"tool_calls": [delta]})

    async def _tools(self, step: dict[str, Any]) -> None:
        lanes = [self._tool_deltas(call) for call in step["tools"]]
        while any(lanes):
            for lane in lanes:
                if lane:
                    await self._delta({"tool_calls": [lane.pop(0)]})

    def _tool_deltas(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        args = step.get("args", {})
        args = args if isinstance(args, str) else json.dumps(args)
        args = args[: step["cut_at"]] if "cut_at" in step else args
        size = step.get("split") or max(1, len(args))
        index = step.get("index", self._tool_index)
        self._tool_index += 1
        call = step.get("id", f"call_{self._number}_{index}")
        first = {"index": index, "id": call, "type": "function"}
        deltas: list[dict[str, Any]] = [first | {"function": {"name": step["tool"], "arguments": ""}}]
        deltas += [
            {"index": index, "function": {"arguments": args[start : start + size]}}
            for start in range(0, len(args), size)
        ]
        return deltas

    async def _stall(self, step: dict[str, Any]) -> None:
        await self._begin()
        self._connection.record("stalled", number=self._number)
        if step["stall"] < 0:
            await asyncio.Event().wait()
        await asyncio.sleep(step["stall"])

    async def _flood(self, step: dict[str, Any]) -> None:
        count = 0
        while not step["flood"] or count < step["flood"]:
            await self._delta({"content": f"flood {count} "})
            self._tokens += 2
            count += 1
            if count % 50 == 0:
                await asyncio.sleep(0)

    async def _comment(self, step: dict[str, Any]) -> None:
        for _ in range(step.get("count", 1)):
            await self._body(f": {step['comment']}\n\n".encode())
            await asyncio.sleep(step.get("every", 0))

    async def _bytes(self, step: dict[str, Any]) -> None:
        self._piece = step["bytes"]

    async def _raw(self, step: dict[str, Any]) -> None:
        await self._body(step["raw"].encode() if "raw" in step else bytes.fromhex(step["hex"]))

    async def _error(self, step: dict[str, Any]) -> None:
        await self._event({"error": step["error"]})

    async def _invalid(self, step: dict[str, Any]) -> None:
        await self._body(b'data: {"choices": [{"delta": \n\n')

    async def _ignore_close(self, step: dict[str, Any]) -> None:
        self._connection.ignore_close = bool(step["ignore_close"])

    async def _cut(self, step: dict[str, Any]) -> None:
        await self._begin()
        self._connection.cut(step["cut"])

    async def _set_usage(self, step: dict[str, Any]) -> None:
        self._usage = step["usage"]

    async def _set_finish(self, step: dict[str, Any]) -> None:
        await self._finish(step["finish"])

    async def _set_done(self, step: dict[str, Any]) -> None:
        self._done = bool(step["done"])

    async def _headers_delay(self, step: dict[str, Any]) -> None:
        self._connection.record("headers_delayed", number=self._number)
        await asyncio.sleep(step["headers_delay"]) if step[
            "headers_delay"
        ] >= 0 else await asyncio.Event().wait()

    _KINDS: ClassVar[dict[str, Callable[..., Any]]] = {
        "text": _text, "thinking": _text, "tool": _tool, "tools": _tools, "stall": _stall, "flood": _flood,
        "comment": _comment, "bytes": _bytes, "raw": _raw, "hex": _raw, "error": _error, "invalid": _invalid,
        "ignore_close": _ignore_close, "cut": _cut, "usage": _set_usage, "finish": _set_finish,
        "done": _set_done, "headers_delay": _headers_delay,
    }  # fmt: skip

    async def _status(self, step: dict[str, Any]) -> None:
        body = step.get("body", {"error": {"message": f"scripted {step['status']}", "type": "scripted"}})
        extra = f"retry-after: {step['retry_after']}\r\n" if "retry_after" in step else ""
        await self._connection._plain(
            step["status"], body, step.get("content_type", "application/json"), extra
        )

    async def _begin(self) -> None:
        if not self._began:
            self._began = True
            await self._connection.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )

    async def _delta(self, delta: dict[str, Any]) -> None:
        await self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    async def _finish(self, reason: str) -> None:
        self._finished = reason
        await self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})

    async def _send_usage(self) -> None:
        if not (self._payload.get("stream_options") or {}).get("include_usage"):
            return
        prompt = sum(len(text_of(message)) for message in self._payload.get("messages", [])) // 4
        usage = self._usage or {"prompt_tokens": prompt, "completion_tokens": self._tokens}
        await self._event({"choices": [], "usage": usage})

    async def _event(self, event: dict[str, Any]) -> None:
        event = {
            "id": f"chatcmpl-{self._number}",
            "object": "chat.completion.chunk",
            "model": "scripted",
        } | event
        await self._body(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    async def _body(self, data: bytes) -> None:
        await self._begin()
        pieces = (
            [data[i : i + self._piece] for i in range(0, len(data), self._piece)] if self._piece else [data]
        )
        for piece in pieces:
            await self._connection.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if self._piece:
                await asyncio.sleep(0)
        self._chunks += 1
        if self._chunks == 1:
            self._connection.record("first_byte", number=self._number)
        elif self._chunks % 100 == 0:
            self._connection.record("progress", number=self._number, chunks=self._chunks, tokens=self._tokens)


def split_tokens(text: str) -> list[str]:
    """Split into pieces of at most four characters: near what a tokenizer makes."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def fill_backlog(listener: socket.socket) -> list[socket.socket]:
    """Connect to ourselves until the kernel answers no more; the returned sockets keep it so."""
    fillers = []
    while True:
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
        if not select.select([], [filler], [], 0.2)[1]:
            return fillers


async def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    source = args.script
    text = source if source.lstrip()[:1] in ("[", "{") else Path(source).read_text(encoding="utf-8")
    record = Recorder(args.log)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", args.port))
    listener.listen(0 if args.backlog_full else 128)
    port = listener.getsockname()[1]
    fillers = fill_backlog(listener) if args.backlog_full else []
    server = Server(Script(json.loads(text)), record, args.strict)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    if not args.backlog_full:
        await loop.create_server(lambda: Connection(server), sock=listener)
    record("listen", port=port, pid=os.getpid(), fillers=len(fillers))
    print(port, flush=True)
    await over.wait()


def main() -> None:
    """Parse the options and serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", required=True)
    parser.add_argument("--script", default="[]")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--backlog-full", action="store_true")
    asyncio.run(serve(parser.parse_args()))


class ModelServer:
    """Runs the double for a test.

    Args:
        replies: the script (see the module's docstring).
        strict: answer 400 to a history that breaks the rules.
        backlog_full: never accept; a connect to it hangs.
        port: 0 for any.
    """

    def __init__(
        self,
        replies: list[Any] | None = None,
        *,
        strict: bool = False,
        backlog_full: bool = False,
        port: int = 0,
    ) -> None:
        self._replies = replies or []
        self._options = ["--strict"] * strict + ["--backlog-full"] * backlog_full + ["--port", str(port)]
        self.port = 0
        self.pid = 0

    def __enter__(self) -> ModelServer:
        self._folder = tempfile.TemporaryDirectory(prefix="model-server-")
        self.log_file = Path(self._folder.name) / "log.jsonl"
        script = Path(self._folder.name) / "script.json"
        script.write_text(json.dumps(self._replies), encoding="utf-8")
        self.log_file.touch()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.doubles.model_server",
                "--log",
                str(self.log_file),
                "--script",
                str(script),
                *self._options,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip():
            self.__exit__()
            raise RuntimeError("the model server did not start")
        self.port = int(line)
        self.pid = self._process.pid
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI-compatible client."""
        return f"http://127.0.0.1:{self.port}/v1"

    def log(self) -> list[dict[str, Any]]:
        """Return every event so far, oldest first."""
        lines = self.log_file.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds."""
        return [event for event in self.log() if event["ev"] in kinds]

    def requests(self) -> list[dict[str, Any]]:
        """Return the chat requests that arrived."""
        return [event for event in self.events("request") if event["method"] == "POST"]

    def ends(self) -> list[dict[str, Any]]:
        """Return how the client ended connections: fin, rst, write_failed."""
        return self.events("fin", "rst", "write_failed")

    def wait_for(self, predicate: Callable[[dict[str, Any]], bool], timeout: float = 10) -> dict[str, Any]:
        """Return the first event that fits, waiting for it.

        Raises:
            TimeoutError: it did not come; the message holds the log.
        """
        end = time.monotonic() + timeout
        while True:
            for event in self.log():
                if predicate(event):
                    return event
            if time.monotonic() > end:
                kinds = [(event["ev"], event["conn"]) for event in self.log()]
                raise TimeoutError(f"the model server never logged it; it logged {kinds}")
            time.sleep(0.005)

    def wait_event(self, kind: str, timeout: float = 10) -> dict[str, Any]:
        """Return the first event of this kind, waiting for it."""
        return self.wait_for(lambda event: event["ev"] == kind, timeout)


if __name__ == "__main__":
    main()
