"""The decoder of chat completions: what is a complete tool call, and what is an error in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peri_tui.agent.models.call import Finished, ModelEvent, TextDelta, ThinkingDelta, ToolCall, UsageReport
from peri_tui.agent.models.openai import ChatDecoder
from peri_tui.agent.models.refusals import one_line, refusal, retry_after, retry_wait
from peri_tui.agent.models.sse import SseEvent
from peri_tui.errors import (
    ModelAuthFailed,
    ModelProtocolError,
    ModelRefused,
    ModelTruncated,
    ModelUnreachable,
)

pytestmark = pytest.mark.unit

URL = "http://127.0.0.1:1/v1/chat/completions"
KEY = "sk-very-secret-0123456789"


def sse(data: Any) -> SseEvent:
    return SseEvent("message", data if isinstance(data, str) else json.dumps(data), "")


def delta(finish: str | None = None, **fields: Any) -> SseEvent:
    return sse({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def call(index: int | None, arguments: str = "", **more: Any) -> SseEvent:
    piece: dict[str, Any] = {
        "function": {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    }
    if index is not None:
        piece["index"] = index
    return delta(tool_calls=[piece | more])


def decode(*events: SseEvent, end: bool = True) -> list[ModelEvent]:
    decoder = ChatDecoder(URL, KEY)
    found = [found for event in events for found in decoder.take(event)]
    return found + (list(decoder.end()) if end else [])


def calls(*events: SseEvent, end: bool = True) -> list[ToolCall]:
    return [event for event in decode(*events, end=end) if isinstance(event, ToolCall)]


def test_text_thinking_usage_and_end() -> None:
    assert decode(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(reasoning="so"),
        delta(content="hi"),
        delta("stop"),
        sse({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}),
        sse("[DONE]"),
    ) == [ThinkingDelta("hm"), ThinkingDelta("so"), TextDelta("hi"), UsageReport(7, 2), Finished("stop")]


def test_lone_surrogates_are_scrubbed() -> None:
    assert decode(sse('{"choices":[{"delta":{"content":"a\\ud800b"}}]}'), end=False) == [
        TextDelta("a\ufffdb")
    ]


@pytest.mark.parametrize("terminator", [delta("tool_calls"), delta("stop"), sse("[DONE]")])
def test_a_call_is_complete_with_either_terminator(terminator: SseEvent) -> None:
    assert calls(call(0, '{"a"', id="c1", name="shell"), call(0, ": 1}"), terminator) == [
        ToolCall(0, "c1", "shell", '{"a": 1}')
    ]


def test_arguments_cut_at_every_byte_are_never_a_call() -> None:
    whole = '{"cmd":"rm -rf build"}'
    for cut in range(len(whole) + 1):
        decoder = ChatDecoder(URL)
        events = [call(0, id="c", name="shell"), *(call(0, byte) for byte in whole[:cut])]
        assert [found for event in events for found in decoder.take(event)] == []
        with pytest.raises(ModelTruncated, match="in the middle"):
            list(decoder.end())


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_turn_that_the_server_cut_has_no_calls(reason: str) -> None:
    assert decode(call(0, '{"path": "/', id="c", name="shell"), delta(reason)) == [Finished(reason)]


def test_three_interleaved_calls_keep_their_arguments() -> None:
    texts = ['{"n": 0}', '{"n": 1, "x": "ab"}', '{"n": 2}']
    events = [call(i, id=f"c{i}", name=f"t{i}") for i in range(3)]
    for position in range(0, 20, 2):
        events += [call(i, text[position : position + 2]) for i, text in enumerate(texts) if text[position:]]
    assert calls(*events, delta("tool_calls")) == [
        ToolCall(i, f"c{i}", f"t{i}", t) for i, t in enumerate(texts)
    ]


def test_servers_that_bend_the_rules() -> None:
    without_index = calls(
        call(None, '{"a":', id="x", name="one"),
        call(None, "1}"),
        call(None, "{}", id="y", name="two"),
        sse("[DONE]"),
    )
    assert [(c.name, c.arguments) for c in without_index] == [("one", '{"a":1}'), ("two", "{}")]
    all_zero = calls(
        call(0, "{}", id="x", name="one"), call(0, "{}", id="y", name="two"), delta("tool_calls")
    )
    assert [(c.index, c.id) for c in all_zero] == [(0, "x"), (1, "y")]
    # An id made anew for every piece does not start a new call.
    assert [
        c.arguments for c in calls(call(0, "{", id="x", name="one"), call(0, "}", id="z"), sse("[DONE]"))
    ] == ["{}"]
    as_object = delta(tool_calls=[{"index": 0, "function": {"name": "t", "arguments": {"a": 1}}}])
    assert calls(as_object, delta("tool_calls")) == [ToolCall(0, "call_0", "t", '{"a": 1}')]
    assert decode(
        delta(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), end=False
    ) == [TextDelta("ab")]
    assert calls(call(0, id="x", name="none"), delta("tool_calls"))[0].arguments == "{}"


def test_nothing_after_the_terminator_counts() -> None:
    assert calls(delta("stop"), call(0, "{}", id="late", name="shell"), sse("[DONE]")) == []
    assert decode(sse("[DONE]"), delta(content="late")) == [Finished("stop")]


def test_end_of_file_without_terminator_is_a_truncation() -> None:
    with pytest.raises(ModelTruncated, match="without an answer"):
        decode()
    with pytest.raises(ModelTruncated, match="in the middle"):
        decode(delta(content="half"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"choices": [', "sent invalid JSON"),
        ("[1]", "a chunk is no object"),
        ('{"choices": ["x"]}', "a choice is no object"),
        ('{"choices": [{"delta": "x"}]}', "a delta is no object"),
        ("[" * 100_000, "sent invalid JSON"),
        ('{"choices":[{"delta":{"tool_calls":[{"index":0,"function":"x"}]}}]}', "function is no object"),
    ],
)
def test_what_is_no_protocol_is_one_clear_line(data: str, said: str) -> None:
    with pytest.raises(ModelProtocolError, match=said) as caught:
        decode(sse(data))
    assert "\n" not in str(caught.value)
    assert URL in str(caught.value)


def test_a_call_without_a_name_and_too_many_calls() -> None:
    with pytest.raises(ModelProtocolError, match="without a name"):
        decode(call(0, "{}", id="c"), delta("tool_calls"))
    with pytest.raises(ModelProtocolError, match="more than 128"):
        decode(*(call(i, "{}", id=f"c{i}", name="t") for i in range(129)))


@pytest.mark.parametrize(
    ("error", "kind", "again"),
    [
        ({"message": "Overloaded", "type": "overloaded_error"}, ModelRefused, True),
        ({"message": "x", "code": 503}, ModelRefused, True),
        ({"message": "x", "code": "429"}, ModelRefused, True),
        ({"message": "bad", "code": 400}, ModelRefused, False),
        ({"message": "no", "code": 401}, ModelAuthFailed, False),
        ("just words", ModelRefused, False),
    ],
)
def test_an_error_object_inside_a_200(error: Any, kind: type[ModelRefused], again: bool) -> None:
    with pytest.raises(kind) as caught:
        decode(sse({"error": error}))
    assert (retry_wait(caught.value, 1.0) is not None) is again


def test_refusals_name_the_cause_and_hide_the_key() -> None:
    body = json.dumps({"error": {"message": f"Incorrect API key: {KEY}\nsecond line"}}).encode()
    error = refusal(401, {}, body, URL, KEY)
    assert isinstance(error, ModelAuthFailed)
    assert error.exit_code == 41
    assert KEY not in str(error)
    assert "\n" not in str(error)
    assert "the key was refused" in str(error)
    assert "set PERI_API_KEY" in str(refusal(401, {}, b"", URL, ""))
    assert "base URL" in str(refusal(404, {"content-type": "text/html"}, b"<html>Not found", URL, KEY))
    assert "redirects to https://x/" in str(refusal(308, {"location": "https://x/"}, b"", URL, KEY))
    assert str(refusal(500, {}, b'{"error": "boom"}', URL, KEY)).endswith("500: boom")
    assert len(one_line("x" * 5000)) == 300


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "30"}, 30.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_what_is_worth_another_attempt(status: int) -> None:
    assert retry_wait(refusal(status, {}, b"", URL, ""), 1.0) == 1.0
    assert retry_wait(refusal(status, {"retry-after": "7"}, b"", URL, ""), 1.0) == 7.0
    assert retry_wait(refusal(status, {"x-should-retry": "false"}, b"", URL, ""), 1.0) is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 308])
def test_what_is_not(status: int) -> None:
    assert retry_wait(refusal(status, {}, b"", URL, ""), 1.0) is None
    assert retry_wait(ModelUnreachable("x", retry=False), 1.0) is None
    assert retry_wait(ModelTruncated("x"), 1.0) is None
