"""OpenAI-compatible chat completions, streamed: the wire that most servers speak.

Source: OpenAI's API reference, "Chat completions, streaming"; the deviations of other servers are named where they
are met. A turn is complete with a ``finish_reason`` or ``[DONE]``; an end of file without either is a truncation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from peri_tui.agent.models.call import (
    Clocks,
    Finished,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    UsageReport,
)
from peri_tui.agent.models.http_model import Decoder, HttpModel, HttpRequest
from peri_tui.agent.models.refusals import error_object, one_line
from peri_tui.agent.models.sse import SseEvent
from peri_tui.core.messages import scrub
from peri_tui.errors import ModelProtocolError, ModelTruncated
from peri_tui.net import ModelTransport

_MAX_CALLS: Final = 128
_MAX_ARGUMENTS: Final = 16 * 1024 * 1024
# With these the server itself cut the turn, so its last tool call may be half of one.
_CUT_REASONS: Final = frozenset({"length", "content_filter", "max_tokens"})


class OpenAiModel(HttpModel):
    """A model behind ``POST {base_url}/chat/completions``.

    Args:
        base_url: where the API is, usually ending in ``/v1``.
        model: the model's name.
        key: sent as bearer token; empty for a server that wants none.
        transport: the task's connections.
        clocks: limits of one turn.
        options: further arguments of ``HttpModel``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key: str = "",
        transport: ModelTransport,
        clocks: Clocks,
        **options: Any,
    ) -> None:
        super().__init__(model, transport, clocks=clocks, secret=key, **options)
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        # Compressed, a flush of the server could hold text back.
        self._headers["accept-encoding"] = "identity"
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def build(self, request: ModelRequest) -> HttpRequest:
        """Return the HTTP request of a turn."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": request.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = request.tools
        if request.max_tokens:
            body["max_tokens"] = request.max_tokens
        try:
            content = msgspec.json.encode(body)
        except UnicodeEncodeError:
            content = json.dumps(body).encode()
        return HttpRequest(self._url, self._headers, content)

    def decoder(self) -> Decoder:
        """Return the decoder for one answer."""
        return ChatDecoder(self._url, self._secret)


@dataclass(slots=True)
class _Call:
    """A tool call that is still being written."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ChatDecoder:
    """Decodes the chunks of one chat completion."""

    def __init__(self, url: str, secret: str = "") -> None:
        self._url = url
        self._secret = secret
        self._calls: dict[int, _Call] = {}
        self._last_index = 0
        self._size = 0
        self._finish = ""
        self._done = False
        self._flushed = False
        self._saw_data = False

    @property
    def patience(self) -> float | None:
        """Seconds to wait for what may follow the terminator: usage after a finish_reason, little after [DONE]."""
        if self._done:
            return 0.25
        return 2.0 if self._finish else None

    def take(self, event: SseEvent) -> Iterator[ModelEvent]:
        """Yield what a chunk means."""
        if self._done:
            return
        if event.data.strip() == "[DONE]":
            self._done = True
            yield from self._flush()
            return
        self._saw_data = True
        chunk = self._parse(event.data)
        if chunk.get("error"):
            raise error_object(chunk["error"], self._url, self._secret)
        if event.event == "error":
            raise error_object(chunk, self._url, self._secret)
        yield from self._take_choice(chunk)
        if isinstance(chunk.get("usage"), dict):
            yield _usage(chunk["usage"])

    def end(self) -> Iterator[ModelEvent]:
        """Yield the rest at the end of the stream."""
        if self.patience is None:
            what = "in the middle of its answer" if self._saw_data else "without an answer"
            raise ModelTruncated(f"model server {self._url}: the stream ended {what}")
        yield from self._flush()
        yield Finished(self._finish or ("tool_calls" if self._calls else "stop"))

    def _parse(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            said = one_line(data, self._secret)[:80]
            raise ModelProtocolError(f"model server {self._url}: sent invalid JSON: {said}") from None
        if not isinstance(chunk, dict):
            raise self._broken("a chunk is no object")
        return chunk

    def _broken(self, what: str) -> ModelProtocolError:
        return ModelProtocolError(f"model server {self._url}: {what}")

    def _take_choice(self, chunk: dict[str, Any]) -> Iterator[ModelEvent]:
        choices = chunk.get("choices") or []
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            raise self._broken("a choice is no object")
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise self._broken("a delta is no object")
        thinking = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thinking, str) and thinking:
            yield ThinkingDelta(scrub(thinking))
        text = _text(delta.get("content"))
        if text:
            yield TextDelta(scrub(text))
        for piece in delta.get("tool_calls") or []:
            self._take_call(piece)
        if choice.get("finish_reason"):
            if choice["finish_reason"] == "error":
                raise error_object(
                    choice.get("error") or "the server reported an error", self._url, self._secret
                )
            self._finish = str(choice["finish_reason"])
            yield from self._flush()

    def _take_call(self, piece: Any) -> None:
        if not isinstance(piece, dict) or self._flushed:
            return
        function = piece.get("function") or {}
        if not isinstance(function, dict):
            raise self._broken("a tool call's function is no object")
        call = self._slot(piece, str(function.get("name") or ""))
        call.id = call.id or str(piece.get("id") or "")
        call.name = call.name or str(function.get("name") or "")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            return
        # Some servers send the arguments as an object.
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self._size += len(text)
        if self._size > _MAX_ARGUMENTS:
            raise self._broken(f"tool calls of more than {_MAX_ARGUMENTS} characters")
        call.arguments.append(text)

    def _slot(self, piece: dict[str, Any], name: str) -> _Call:
        index = piece.get("index")
        if not isinstance(index, int):
            # No index: a piece that names a function starts a call, any other continues the last one.
            index = len(self._calls) if name or not self._calls else self._last_index
        elif name and index in self._calls and piece.get("id") not in (None, "", self._calls[index].id):
            # Every call under index 0: a second name with a second id is a second call.
            index = max(self._calls) + 1
        if len(self._calls) >= _MAX_CALLS and index not in self._calls:
            raise self._broken(f"more than {_MAX_CALLS} tool calls in one turn")
        self._last_index = index
        return self._calls.setdefault(index, _Call())

    def _flush(self) -> Iterator[ModelEvent]:
        """Yield the tool calls, now that a terminator proves them complete."""
        if self._flushed:
            return
        self._flushed = True
        if self._finish in _CUT_REASONS:
            self._calls.clear()
        for order, (index, call) in enumerate(sorted(self._calls.items())):
            if not call.name:
                raise self._broken("a tool call without a name")
            arguments = scrub("".join(call.arguments)) or "{}"
            yield ToolCall(order, call.id or f"call_{index}", scrub(call.name), arguments)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _usage(found: dict[str, Any]) -> UsageReport:
    counts = [found.get(key) for key in ("prompt_tokens", "completion_tokens")]
    tokens_in, tokens_out = (count if isinstance(count, int) else 0 for count in counts)
    return UsageReport(tokens_in, tokens_out)
