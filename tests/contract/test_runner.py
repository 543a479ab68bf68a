"""The reason–act loop: what it shows, runs and refuses, and that a stop at any point leaves a valid history."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.history import MAX_CALLS, History, validate
from peri_tui.agent.instructions import Instruction
from peri_tui.agent.models import call
from peri_tui.agent.questions import Reply
from peri_tui.agent.runner import Outcome
from peri_tui.core.messages import (
    MAX_STREAM,
    Asked,
    Budget,
    Delta,
    FileChanged,
    Progressed,
    Resolved,
    ToolEnded,
    ToolStarted,
    UsageCounted,
    encode,
)
from peri_tui.core.states import StopReason, TaskState
from peri_tui.errors import ModelAuthFailed, ModelTruncated, StoreFull, WorkspaceBusy
from tests.doubles.body import Body, calls, says
from tests.doubles.model_server import violation

pytestmark = pytest.mark.contract

READ = ("read_file", '{"path": "a.py"}')
EDIT = ("edit_file", '{"path": "a.py", "old": "one", "new": "1"}')
SHELL = ("shell", '{"command": "touch marker"}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    (workspace / "a.py").write_text("one\ntwo\n")
    return workspace


@pytest.fixture
def make(folder: Path, request: pytest.FixtureRequest) -> Callable[..., Body]:
    def made(*script: list[Any], **how: Any) -> Body:
        body = Body(folder, script, **how)
        request.addfinalizer(body.close)
        return body

    return made


Make = Callable[..., Body]


def check_history(body: Body, cause: StopReason | None = None) -> list[dict[str, Any]]:
    messages = body.history.close(cause)
    assert validate(messages) == []
    following = History(messages)
    following.add_user("next")
    assert violation(following.request("system")) == ""
    for request in body.model.requests:
        assert validate(request.messages, for_request=True) == []
        assert violation(request.messages) == ""
    return messages


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


# --- the loop -------------------------------------------------------------------------------------------------------


async def test_an_answer_is_streamed_and_completes(make: Make) -> None:
    body = make([call.ThinkingDelta("hm"), *says("Hel", "lo \ud800")])
    outcome = await body.run()
    assert outcome == Outcome("completed", answer="Hello \ufffd")
    deltas = [(d.ch, d.part, d.off, d.text) for d in body.of(Delta)]
    assert deltas == [
        ("thinking", "thinking-1", 0, "hm"),
        ("text", "text-1", 0, "Hel"),
        ("text", "text-1", 3, "lo \ufffd"),
    ]
    assert [(p.step, p.doing) for p in body.of(Progressed)] == [(1, "model")]
    assert body.of(UsageCounted)[-1].tokens_out == 5
    assert body.model.streams_closed == 1
    check_history(body)


async def test_tools_run_in_order_and_the_model_sees_their_results(make: Make, folder: Path) -> None:
    body = make(calls(READ, EDIT, text="I look."), calls(("search", '{"pattern": "two"}')), says("Done."))
    outcome = await body.run()
    assert (outcome.kind, outcome.answer, outcome.touched) == ("completed", "Done.", True)
    assert (folder / "a.py").read_text() == "1\ntwo\n"
    started = body.of(ToolStarted)
    assert [(s.name, s.summary) for s in started] == [
        ("read_file", "a.py"),
        ("edit_file", "a.py"),
        ("search", "'two'"),
    ]
    assert len({s.call for s in started}) == 3  # the server used an id twice
    assert [s.call for s in started] == [e.call for e in body.of(ToolEnded)]
    assert [e.status for e in body.of(ToolEnded)] == ["ok", "ok", "ok"]
    assert "+1" in body.of(ToolEnded)[1].diff
    assert body.of(FileChanged)[0].path == "a.py"
    assert body.tool_messages()[-1] == "a.py:2: two"
    assert len({d.part for d in body.of(Delta)}) == 2
    check_history(body)


async def test_the_request_holds_prompt_tools_and_the_projects_notes(make: Make) -> None:
    body = make(says("ok"), instructions=[Instruction("/r/AGENTS.md", "Use tabs.")], prompt="please")
    await body.run()
    (request,) = body.model.requests
    assert request.messages[-1] == {"role": "user", "content": "please"}
    assert "Use tabs." in request.messages[0]["content"]
    assert str(body.root.path) in request.messages[0]["content"]
    assert {tool["function"]["name"] for tool in request.tools} >= {"read_file", "shell"}
    assert request.max_tokens


async def test_a_session_goes_on(make: Make) -> None:
    first = make(says("one"))
    await first.run()
    second = make(says("two"), history=History(first.history.close()), prompt="more")
    await second.run()
    roles = [m["role"] for m in second.model.requests[0].messages]
    assert roles == ["system", "user", "assistant", "user"]


async def test_a_retry_leaves_no_trace_in_the_history(make: Make) -> None:
    body = make([call.Retrying(1, 0.5, "429 slow down"), *says("ok")])
    await body.run()
    assert [m["role"] for m in check_history(body)] == ["user", "assistant"]
    assert any(p.doing == "retry" and "429" in p.detail for p in body.of(Progressed))


# --- bad input from the model (T51) ---------------------------------------------------------------------------------

BAD = [
    ("approve", "{}", "unknown tool"),
    ("../x", "{}", "unknown tool"),
    ("\x1b[2Jevil", "{}", "unknown tool"),
    ("read_file", '"text"', "JSON object"),
    ("read_file", "[1]", "JSON object"),
    ("read_file", "null", "JSON object"),
    ("read_file", '{"path": 1}', "Expected `str`"),
    ("read_file", '{"path": "a', "not valid JSON"),
    ("read_file", '{"path": "../../etc/passwd"}', "not allowed"),
    ("read_file", '{"path": "gone"}', "missing"),
]


async def test_bad_calls_are_told_to_the_model_and_the_task_goes_on(make: Make) -> None:
    body = make(calls(*((name, arguments) for name, arguments, _ in BAD)), says("I see."))
    outcome = await body.run()
    assert outcome.kind == "completed"
    assert not outcome.touched
    for (_, _, words), told in zip(BAD, body.tool_messages(), strict=True):
        assert words in told
        assert "\n" not in told
    assert all(ended.status == "error" for ended in body.of(ToolEnded))
    assert all("\x1b" not in started.name for started in body.of(ToolStarted))
    check_history(body)


async def test_ten_thousand_calls_are_capped(make: Make) -> None:
    body = make(calls(*[("list_files", "{}")] * 10_000), says("ok"))
    assert (await body.run()).kind == "completed"
    assert len(body.of(ToolStarted)) == MAX_CALLS
    assert f"{10_000 - MAX_CALLS} more calls" in body.tool_messages()[-1]
    check_history(body)


async def test_calls_of_a_message_cut_at_its_length_are_not_run(make: Make, folder: Path) -> None:
    cut = [*calls(READ, ("write_file", '{"path": "b", "content": "x"}'))[:-1], call.Finished("length")]
    body = make(cut, says("ok"))
    assert (await body.run()).kind == "completed"
    assert all("Not run" in told for told in body.tool_messages())
    assert not (folder / "b").exists()
    check_history(body)


async def test_calls_of_a_refused_message_are_not_run(make: Make, folder: Path) -> None:
    refused = [
        *calls(READ, ("write_file", '{"path": "b", "content": "x"}'))[:-1],
        call.Finished("content_filter"),
    ]
    body = make(refused, says("never"))
    outcome = await body.run()
    assert (outcome.kind, outcome.reason) == ("failed", StopReason.MODEL_ERROR)
    assert len(body.model.requests) == 1
    assert not (folder / "b").exists()
    check_history(body, StopReason.MODEL_ERROR)


async def test_everything_that_is_emitted_can_go_over_the_wire(make: Make) -> None:
    odd = ("\ud800\x1b", '{"path": "\\ud800"}')
    body = make(
        [call.Retrying(1, 0.1, "odd \ud800"), *calls(odd, ("list_files", '{"glob": "\x1b"}'))], says("\udfff")
    )
    assert (await body.run()).kind == "completed"
    for event in body.events:
        encode(event)


async def test_no_event_outgrows_a_frame(make: Make, folder: Path) -> None:
    big = json.dumps({"path": "big.txt", "content": "\x1b line\n" * 250_000})
    body = make(
        [call.TextDelta("\x1b" * 3_000_000), *calls(("write_file", big))],
        says("ok"),
        approve="ask",
        answers=["allow"],
    )
    assert (await body.run()).kind == "completed"
    assert (folder / "big.txt").stat().st_size == 1_750_000
    assert max(len(encode(event)) for event in body.events) < MAX_STREAM
    assert "characters left out" in body.of(Asked)[0].diff


async def test_a_name_that_is_no_text_is_shown_and_edited(make: Make, folder: Path) -> None:
    (folder / "b\udcff.py").write_text("one\n")
    (folder / "link.py").symlink_to("b\udcff.py")
    edit = ("edit_file", '{"path": "link.py", "old": "one", "new": "1"}')
    body = make(
        calls(("read_file", '{"path": "link.py"}'), edit), says("ok"), approve="ask", answers=["allow"]
    )
    assert (await body.run()).kind == "completed"
    assert (folder / "b\udcff.py").read_text() == "1\n"
    for event in body.events:
        encode(event)


async def test_a_full_store_is_told_and_changes_nothing(make: Make, folder: Path) -> None:
    body = make(calls(READ, EDIT), says("No space."))
    body.files.error = StoreFull("the backups' disk is full; nothing was changed")
    assert (await body.run()).kind == "completed"
    assert body.tool_messages()[-1] == "Error: the backups' disk is full; nothing was changed"
    assert (folder / "a.py").read_text() == "one\ntwo\n"


async def test_a_busy_workspace_ends_the_task_with_its_error(make: Make) -> None:
    body = make(calls(READ, EDIT), says("never"))
    body.files.error = WorkspaceBusy("pid 7 holds it", pid=7)
    outcome = await body.run()
    assert (outcome.kind, outcome.message) == ("failed", "pid 7 holds it")
    assert isinstance(outcome.error, WorkspaceBusy)
    assert body.of(ToolEnded)[-1].status == "error"


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "reason", "requests"),
    [
        (Budget(turns=2), StopReason.LIMIT_TURNS, 2),
        (Budget(tokens=25), StopReason.LIMIT_TOKENS, 2),
        (Budget(seconds=2.5), StopReason.LIMIT_SECONDS, 2),
    ],
)
async def test_limits_end_the_loop(make: Make, budget: Budget, reason: StopReason, requests: int) -> None:
    ticks = iter(range(1000))
    body = make(calls(READ), budget=budget, clock=lambda: float(next(ticks)))
    outcome = await body.run()
    assert (outcome.kind, outcome.reason) == ("limit", reason)
    assert len(body.model.requests) == requests
    check_history(body, reason)


async def test_the_token_budget_bounds_the_next_message(make: Make) -> None:
    body = make(calls(READ), says("ok"), budget=Budget(tokens=100))
    await body.run()
    assert [request.max_tokens for request in body.model.requests] == [100, 85]


async def test_a_models_error_is_an_outcome(make: Make) -> None:
    body = make([call.TextDelta("half"), ModelTruncated("the stream ended without its end")])
    outcome = await body.run()
    assert (outcome.kind, outcome.reason) == ("failed", StopReason.MODEL_ERROR)
    assert outcome.message == "the stream ended without its end"
    messages = check_history(body, StopReason.MODEL_ERROR)
    assert messages[1]["content"] == "half"
    refused = make([ModelAuthFailed("401 from the server")])
    assert isinstance((await refused.run()).error, ModelAuthFailed)


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([call.Finished("stop")], "failed", "empty answer"),
        ([call.TextDelta("x"), call.Finished("content_filter")], "failed", "content_filter"),
        ([call.TextDelta("x"), call.Finished("length")], "completed", "length limit"),
    ],
)
async def test_odd_ends_are_said(make: Make, events: list[Any], kind: str, words: str) -> None:
    outcome = await make(events).run()
    assert outcome.kind == kind
    assert words in outcome.message


# --- approvals (T43, T44) -------------------------------------------------------------------------------------------


async def test_reading_does_not_ask_and_changing_does(make: Make, folder: Path) -> None:
    body = make(calls(READ, EDIT), says("ok"), approve="ask", answers=["allow"])
    await body.run()
    (asked,) = body.of(Asked)
    assert asked.tool == "edit_file"
    assert "-one" in asked.diff
    assert "+1" in asked.diff
    assert body.states == [TaskState.WAITING, TaskState.RUNNING]
    assert (folder / "a.py").read_text() == "1\ntwo\n"


async def test_a_denial_goes_to_the_model(make: Make, folder: Path) -> None:
    body = make(calls(READ, EDIT), says("ok"), approve="ask", answers=[Reply("deny", "not that file")])
    outcome = await body.run()
    assert outcome.kind == "completed"
    assert "not that file" in body.tool_messages()[-1]
    assert body.of(ToolEnded)[-1].status == "denied"
    assert (folder / "a.py").read_text() == "one\ntwo\n"
    check_history(body)


async def test_one_approval_is_for_one_call(make: Make) -> None:
    write = ("write_file", '{"path": "n", "content": "1"}')
    body = make(
        calls(READ, EDIT), calls(write), calls(write), says("ok"), approve="ask", answers=["allow"] * 2
    )
    await body.run()
    assert len(body.of(Asked)) == 2
    assert "has this content already" in body.tool_messages()[-1]


async def test_a_file_changed_under_the_question_is_asked_again(make: Make, folder: Path) -> None:
    def change_then_allow() -> str:
        (folder / "a.py").write_text("one\nuser's\n")
        return "allow"

    body = make(calls(READ, EDIT), says("ok"), approve="ask", answers=[change_then_allow])
    await body.run()
    # The model has not read these bytes, so there is nothing to ask about any more.
    assert "changed since you read it" in body.tool_messages()[-1]
    assert (folder / "a.py").read_text() == "one\nuser's\n"


async def test_a_script_changed_under_the_question_is_asked_again(make: Make, folder: Path) -> None:
    (folder / "build.sh").write_text("echo good")

    def swap() -> str:
        (folder / "build.sh").write_text("touch evil")
        return "allow"

    run = ("shell", '{"command": "sh ./build.sh"}')
    body = make(calls(run), says("ok"), approve="ask", answers=[swap, "deny"])
    await body.run()
    assert len(body.of(Asked)) == 2
    assert body.processes.asked == []


async def test_headless_ask_denies_names_approve_once_and_fails(make: Make, folder: Path) -> None:
    write = ("write_file", '{"path": "b", "content": "x"}')
    body = make(calls(READ, EDIT, write), says("I could not."), approve="ask", interactive=False)
    outcome = await body.run()
    assert (outcome.kind, outcome.unapproved, outcome.touched) == ("failed", 2, False)
    assert outcome.answer == "I could not."
    notices = [d.text for d in body.of(Delta) if d.ch == "notice"]
    assert len(notices) == 1
    assert "--approve" in notices[0]
    assert "--approve" in body.tool_messages()[-1]
    assert not (folder / "b").exists()


async def test_all_still_asks_for_what_is_dangerous(make: Make, folder: Path) -> None:
    (folder / ".git").mkdir()
    hook = ("write_file", '{"path": ".git/hooks/pre-commit", "content": "evil"}')
    body = make(calls(hook), says("ok"), approve="all", answers=["deny"])
    await body.run()
    assert "git's own folder" in body.of(Asked)[0].note
    assert not (folder / ".git" / "hooks").exists()


# --- stop -----------------------------------------------------------------------------------------------------------


async def stopped(body: Body, task: asyncio.Task[Outcome]) -> list[dict[str, Any]]:
    with pytest.raises(asyncio.CancelledError):
        await task
    asked = len(body.model.requests)
    await asyncio.sleep(0)
    assert len(body.model.requests) == asked
    return check_history(body, StopReason.USER)


@pytest.mark.parametrize("before", range(7))
async def test_a_stop_after_any_event_of_the_stream(make: Make, folder: Path, before: int) -> None:
    write = ("write_file", '{"path": "b", "content": "x"}')
    events: list[Any] = [call.ThinkingDelta("hm"), call.TextDelta("I "), *calls(write, READ, text="will")]
    body = make([*events[:before], "wait"])
    task = body.start()
    await body.model.reached.wait()
    body.stop()
    await stopped(body, task)
    assert body.model.streams_closed == 1
    assert not (folder / "b").exists()


async def test_a_tool_call_that_arrives_after_the_stop_is_dropped(make: Make, folder: Path) -> None:
    # The model's code sets the token in the middle of its stream and goes on, as a far end that ignores us would.
    body: Body
    write = ("write_file", '{"path": "b", "content": "x"}')
    body = make([call.TextDelta("I"), lambda: body.stop(), *calls(write)], says("never"))
    await stopped(body, body.start())
    assert not (folder / "b").exists()
    assert body.of(ToolStarted) == []


@pytest.mark.parametrize("where", ["stream", "question", "between calls"])
async def test_the_token_alone_is_enough(make: Make, folder: Path, where: str) -> None:
    # Not bound to the body, so no cancel is delivered: the loop must look at the token by itself.
    body: Body
    write = ("write_file", '{"path": "b", "content": "x"}')

    def allow() -> str:
        body.stop()
        return "allow"

    events = calls(write)
    if where == "stream":
        body = make([lambda: body.stop(), *events], says("never"))
    elif where == "question":
        body = make(events, says("never"), approve="ask", answers=[allow])
    else:
        body = make(calls(READ, write), says("never"))
        body.context.drain = stop_after(body, ToolEnded)
    await stopped(body, asyncio.create_task(body.run()))
    assert not (folder / "b").exists()


def stop_after(body: Body, kind: type[Any]) -> Callable[[], Any]:
    async def drain() -> None:
        if body.of(kind):
            body.stop()

    return drain


async def test_a_stop_in_the_question_runs_nothing(make: Make, folder: Path) -> None:
    body = make(calls(READ, EDIT), approve="ask", answers=["wait"])
    task = body.start()
    await body.asked.wait()
    await until(lambda: body.of(Asked))
    body.stop()
    messages = await stopped(body, task)
    assert body.of(Resolved)[-1].outcome == "cancelled"
    assert body.states == [TaskState.WAITING]
    assert (folder / "a.py").read_text() == "one\ntwo\n"
    assert "had not started" in messages[-2]["content"]
    assert body.of(ToolEnded)[-1].status == "cancelled"


async def test_an_approval_that_comes_with_the_stop_runs_nothing(make: Make, folder: Path) -> None:
    body: Body

    def allow() -> str:
        body.stop()
        return "allow"

    body = make(calls(READ, EDIT), says("never"), approve="ask", answers=[allow])
    await stopped(body, body.start())
    assert (folder / "a.py").read_text() == "one\ntwo\n"


async def test_a_stop_in_an_edit_waits_for_the_thread(make: Make, folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(10)

    body = make(calls(READ, EDIT, ("write_file", '{"path": "b", "content": "x"}')))
    body.files.on_edit = hold
    task = body.start()
    await until(inside.is_set)
    body.stop()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()  # it must not unwind while its thread still writes
    go_on.set()
    messages = await stopped(body, task)
    assert (folder / "a.py").read_text() == "1\ntwo\n"  # the rollback's work, not the loop's
    assert not (folder / "b").exists()
    results = [m["content"] for m in messages if m["role"] == "tool"]
    assert "had started" in results[1]
    assert "had not started" in results[2]


async def test_the_next_prompt_after_a_stop_is_valid_and_marked_once(make: Make) -> None:
    body = make([call.TextDelta("half"), "wait"])
    task = body.start()
    await body.model.reached.wait()
    body.stop()
    messages = await stopped(body, task)
    following = make(says("4"), history=History(messages), prompt="what is 2+2")
    await following.run()
    assert json.dumps(following.model.requests[0].messages).count("stopped this task") == 1
    check_history(following)
