"""The conversation is valid for the next request wherever a stop cuts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.history import MAX_CALLS, MAX_RESULT, History, bound, repair, validate
from peri_tui.core.states import StopReason
from tests.doubles.model_server import violation

pytestmark = pytest.mark.unit

ARGS = '{"path": "a.py"}'


def closed(history: History, cause: StopReason | None = StopReason.USER) -> list[dict[str, Any]]:
    """Close, and check with both judges: ours and the scripted server's strict mode."""
    messages = history.close(cause)
    assert validate(messages) == []
    assert validate(messages, for_request=cause is not None) == []
    following = History(messages)
    following.add_user("next")
    request = following.request("system")
    assert validate(request, for_request=True) == []
    assert violation(request) == ""
    json.dumps(request)
    return messages


Event = tuple[Any, ...]
_text = st.text(max_size=12) | st.sampled_from(["", " \n", "\ud800", "\x1b[31m"])
_calls = st.tuples(
    st.just("call"),
    st.sampled_from(["", "call_1", "a", "same", "same", "ü b", "x" * 200]),
    st.sampled_from(["read_file", "../x", "\x1bevil", "", "shell"]),
    st.sampled_from([ARGS, "{}", "", "[1]", "null", '"text"', '{"path": "/', '{"a": "\\ud800"}']),
)
_turns = st.tuples(st.lists(st.tuples(st.just("text"), _text), max_size=3), st.lists(_calls, max_size=4))


def _play(history: History, turns: list[tuple[list[Event], list[Event]]], after: Callable[[], None]) -> None:
    for texts, calls in turns:
        history.begin_answer()
        after()
        for _, piece in texts:
            history.add_text(piece)
            after()
        ids = []
        for _, call_id, name, arguments in calls:
            ids.append(history.add_call(call_id, name, arguments))
            after()
        history.end_answer()
        after()
        for known in ids:
            assert known is not None
            history.start_call(known)
            after()
            history.end_call(known, "done")
            after()
        if ids:
            assert validate(history.request("s"), for_request=True) == []


@given(st.lists(_turns, max_size=3))
def test_a_cut_at_any_event_leaves_a_valid_history(turns: list[tuple[list[Event], list[Event]]]) -> None:
    history = History()
    history.add_user("first")
    _play(history, turns, lambda: closed(history) and None)


_anything = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "tool", "system"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_damaged = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "robot"])},
        optional={
            "content": st.none() | st.sampled_from(["", " ", "text"]) | _anything,
            "tool_call_id": st.sampled_from(["1", "2"]),
            "tool_calls": _anything
            | st.lists(
                st.sampled_from(
                    [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}},
                        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    ]
                ),
                max_size=3,
            ),
        },
    ),
    max_size=6,
)


@given(_damaged)
def test_a_damaged_history_is_repaired_and_stays_repaired(messages: list[dict[str, Any]]) -> None:
    repaired = repair(messages)
    assert validate(repaired) == []
    assert repair(repaired) == repaired
    closed(History(messages))


def _started() -> tuple[History, str, str]:
    history = History()
    history.add_user("do it")
    history.begin_answer()
    history.add_text("I will")
    one = history.add_call("c1", "shell", '{"command": "ls"}')
    two = history.add_call("c2", "shell", '{"command": "pwd"}')
    history.end_answer()
    assert one == "c1"
    assert two == "c2"
    return history, one, two


def test_a_stop_in_the_text_keeps_it_and_says_so_once() -> None:
    history = History()
    history.add_user("tell me")
    history.begin_answer()
    history.add_text("Once upon")
    messages = closed(history)
    assert messages[1] == {"role": "assistant", "content": "Once upon"}
    assert messages[2]["role"] == "user"
    assert messages[2]["content"].count("stopped") == 1
    assert closed(history) == messages  # closing twice marks once


def test_a_stop_before_any_answer_marks_the_prompt() -> None:
    history = History()
    history.add_user("tell me")
    messages = closed(history)
    assert len(messages) == 1
    assert messages[0]["content"].startswith("tell me\n\n[The user stopped")


def test_results_say_whether_the_tool_had_started() -> None:
    history, one, _ = _started()
    history.start_call(one)
    results = [m for m in closed(history) if m["role"] == "tool"]
    assert "had started" in results[0]["content"]
    assert "had not started" in results[1]["content"]


def test_a_stop_between_two_calls_keeps_the_real_result() -> None:
    history, one, _ = _started()
    history.start_call(one)
    history.end_call(one, "a.py")
    results = [m["content"] for m in closed(history) if m["role"] == "tool"]
    assert results[0] == "a.py"
    assert "had not started" in results[1]


def test_an_answer_that_is_repeated_leaves_nothing_behind() -> None:
    history, _, _ = _started()
    history.drop_answer()
    assert [m["role"] for m in closed(history)] == ["user"]


def test_the_first_result_is_kept() -> None:
    history, one, two = _started()
    history.end_call(one, "first")
    history.end_call(one, "second")
    history.end_call(two, "")
    assert [m["content"] for m in history.close() if m["role"] == "tool"] == ["first", "(no output)"]


def test_ids_are_unique_over_the_session() -> None:
    history, _, _ = _started()
    later = History(history.close(StopReason.USER))
    later.add_user("again")
    later.begin_answer()
    assert later.add_call("c1", "shell", "{}") not in ("c1", "c2", "", None)
    closed(later)


def test_calls_of_one_message_are_capped() -> None:
    history = History()
    history.add_user("go")
    history.begin_answer()
    ids = [history.add_call(f"c{n}", "shell", "{}") for n in range(10_000)]
    assert [known for known in ids if known is not None] == [f"c{n}" for n in range(MAX_CALLS)]
    closed(history)


def test_results_are_bounded_head_and_tail() -> None:
    history, one, _ = _started()
    history.end_call(one, "A" * MAX_RESULT + "Z" * MAX_RESULT)
    text = next(m["content"] for m in history.close() if m["role"] == "tool")
    assert len(text) < MAX_RESULT + 100
    assert text.startswith("A")
    assert text.endswith("Z")
    assert "characters left out" in text
    assert bound("short") == "short"


def test_what_became_of_the_files_is_said() -> None:
    history, _, _ = _started()
    messages = history.close(StopReason.USER, files="2 files restored")
    assert messages[-1]["content"].endswith("What became of its changes: 2 files restored.]")


@pytest.mark.parametrize("cause", list(StopReason))
def test_every_cause_has_words(cause: StopReason) -> None:
    history, one, _ = _started()
    history.start_call(one)
    assert len(closed(history, cause)[-1]["content"]) > 20


def test_an_orphaned_call_of_a_stored_session_gets_a_result() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = repair([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
    assert messages[-1]["role"] == "tool"
    assert "No result" in messages[-1]["content"]


BROKEN: list[tuple[str, list[dict[str, Any]]]] = [
    ("not of the user", [{"role": "assistant", "content": "a"}]),
    ("twice in a row", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    ("empty message", [{"role": "user", "content": ""}]),
    ("not open", [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "1", "content": "x"}]),
    ("no list of calls", [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}]),
    ("ill-formed", [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ("unknown role", [{"role": "user", "content": "a"}, {"role": "robot", "content": "x"}]),
]


@pytest.mark.parametrize(("problem", "messages"), BROKEN)
def test_the_validator_names_what_is_wrong(problem: str, messages: list[dict[str, Any]]) -> None:
    assert any(problem in line for line in validate(messages))


def test_the_validator_wants_results_directly_after() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert any("no result" in line for line in validate(asked))
    late = [*asked, {"role": "user", "content": "b"}, {"role": "tool", "tool_call_id": "x", "content": "r"}]
    assert any("before the results" in line for line in validate(late))
    done = [*asked, {"role": "tool", "tool_call_id": "x", "content": "r"}]
    assert validate(done, for_request=True) == []
    again = [*done, {"role": "assistant", "tool_calls": [call]}]
    assert any("used before" in line for line in validate(again))
