"""The scripted server's strict check: it must refuse what real servers refuse, or the tests prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.model_server import Script, violation

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "do it"}
SYSTEM = {"role": "system", "content": "you are"}


def calls(*ids: str, arguments: str = "{}", content: str = "") -> dict[str, Any]:
    function = {"name": "shell", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": name, "type": "function", "function": function} for name in ids],
    }


def result(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "done"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER, {"role": "assistant", "content": "yes"}, USER],
        [SYSTEM, USER, calls("a"), result("a")],
        [USER, calls("a", "b"), result("b"), result("a"), {"role": "assistant", "content": "x"}, USER],
        [USER, calls("a"), result("a"), calls("b", content="and"), result("b")],
    ],
)
def test_a_valid_history(messages: list[dict[str, Any]]) -> None:
    assert violation(messages) == ""


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "no messages"),
        ([{"role": "user", "content": ""}], "empty user message"),
        ([USER, {"role": "assistant", "content": ""}, USER], "empty assistant message"),
        ([USER, {"role": "assistant", "content": "a"}], "the last message is the assistant's"),
        ([{"role": "assistant", "content": "a"}, USER], "without a message before it"),
        ([USER, SYSTEM], "system message in the middle"),
        ([USER, calls("a")], "tool calls without a result: ['a']"),
        ([USER, calls("a", "b"), result("a"), USER], "before the results of tool calls ['b']"),
        ([USER, calls("a"), USER, result("a")], "before the results of tool calls"),
        ([USER, calls("a"), result("a"), result("a")], "answers no open tool call"),
        ([USER, result("a")], "answers no open tool call"),
        ([USER, calls("a", "a"), result("a")], "two tool calls with one id"),
        ([USER, calls("a", arguments='{"path": "/'), result("a")], "arguments are no JSON"),
        ([USER, calls(), USER], "empty tool_calls"),
        ([{"role": "function", "content": "x"}], "unknown role"),
    ],
)
def test_a_history_that_is_refused(messages: list[dict[str, Any]], said: str) -> None:
    assert said in violation(messages)


def test_the_reply_is_chosen_by_the_longest_text_that_fits_and_the_last_repeats() -> None:
    script = Script([[{"text": "1"}], [{"text": "2"}], {"when": "do", "steps": [{"text": "do"}]},
                     {"when": "do it", "steps": [{"text": "it"}]}])  # fmt: skip
    assert [script.choose([{"role": "user", "content": text}])[0]["text"] for text in ("x", "y", "z")] == [
        "1",
        "2",
        "2",
    ]
    assert script.choose([USER, calls("a"), result("a")])[0]["text"] == "it"
    assert script.choose([{"role": "user", "content": "don't"}])[0]["text"] == "do"
