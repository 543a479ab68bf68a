"""The prompt, the queue, the draft, the history, slash commands."""

from __future__ import annotations

import pytest
from textual import events

from peri_tui.core import messages as m
from peri_tui.errors import Conflict
from peri_tui.tui.screens.reading import DiffScreen, HelpScreen, TraceScreen
from peri_tui.tui.screens.tasks import TasksScreen
from tests.doubles.fake_session import FakeDrafts, FakeSession
from tests.tui.stage import evidence, stage

pytestmark = pytest.mark.tui


async def test_enter_sends_and_shift_enter_and_ctrl_j_break_the_line() -> None:
    async with stage() as scene:
        await scene.pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert scene.app.prompt.text == "a\nb\nc"
        await scene.pilot.press("enter")
        await scene.until(lambda: scene.session.submitted)
        assert scene.session.submitted[0][1:] == ("a\nb\nc", "ask")
        assert scene.app.prompt.text == ""
        assert "› a" in scene.lines()


async def test_a_blank_prompt_is_not_sent() -> None:
    async with stage() as scene:
        await scene.pilot.press("space", "enter")
        await scene.pilot.pause()
        assert scene.session.submitted == []


async def test_prompts_queue_while_a_task_runs_and_go_on_after_it_completed() -> None:
    async with stage() as scene:
        await scene.run("one")
        for text in ("two", "three"):
            scene.app.prompt.replace_text(text)
            await scene.pilot.press("enter")
        assert scene.view.queued == ("two", "three")
        assert "2 queued" in scene.screen()
        scene.end("completed")
        await scene.until(lambda: len(scene.session.submitted) == 2)
        assert scene.session.submitted[1][1] == "two"
        assert scene.view.queued == ("three",)


async def test_a_stop_holds_the_queue_and_one_key_sends_it_on() -> None:
    async with stage() as scene:
        await scene.run("one")
        scene.text("working")
        scene.app.prompt.replace_text("two")
        await scene.pilot.press("enter")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end(files=m.Files())
        await scene.settled()
        assert len(scene.session.submitted) == 1
        assert scene.view.held
        assert "1 held" in scene.screen()
        await scene.pilot.press("ctrl+s")
        await scene.until(lambda: len(scene.session.submitted) == 2)
        assert not scene.view.held


async def test_a_prompt_stopped_before_any_output_returns_to_the_input() -> None:
    async with stage() as scene:
        await scene.run("make it so")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end()
        await scene.settled()
        assert scene.app.prompt.text == "make it so"


async def test_a_draft_is_never_overwritten_by_a_returning_prompt() -> None:
    async with stage() as scene:
        await scene.run("make it so")
        scene.app.prompt.replace_text("my draft")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end()
        await scene.settled()
        assert scene.app.prompt.text == "my draft"


async def test_what_was_produced_keeps_the_prompt_where_it_is() -> None:
    async with stage() as scene:
        await scene.run("make it so")
        scene.text("Working on it.")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end()
        await scene.settled()
        assert scene.app.prompt.text == ""


async def test_draft_and_queue_are_saved_as_typed_and_come_back_held() -> None:
    drafts = FakeDrafts()
    async with stage(drafts=drafts) as scene:
        await scene.run("one")
        scene.app.prompt.replace_text("two")
        await scene.pilot.press("enter")
        scene.app.prompt.replace_text("half a thou")
        for _ in range(100):
            if drafts.text == "half a thou" and drafts.queued == ("two",):
                break
            await scene.pilot.pause(0.02)
        assert (drafts.text, drafts.queued) == ("half a thou", ("two",))
    async with stage(drafts=drafts) as scene:
        await scene.until(lambda: scene.app.prompt.text)
        assert scene.app.prompt.text == "half a thou"
        assert scene.view.queued == ("two",)
        assert scene.view.held
        assert scene.session.submitted == []


async def test_a_disk_that_is_full_is_told_and_nothing_dies() -> None:
    drafts = FakeDrafts()

    def save(_draft: object) -> None:
        raise OSError(28, "No space left on device")

    drafts.save = save  # type: ignore[method-assign]
    async with stage(drafts=drafts) as scene:
        await scene.pilot.press("a")
        for _ in range(100):
            if scene.app._notifications:
                break
            await scene.pilot.pause(0.02)
        assert "the draft cannot be kept: No space left" in str([*scene.app._notifications])


async def test_a_refused_prompt_says_why_and_returns() -> None:
    session = FakeSession(refuse=Conflict("the folder is in use"))
    async with stage(session=session) as scene:
        await scene.prompt("do it")
        await scene.settled()
        assert "not sent: the folder is in use" in scene.lines()
        assert scene.app.prompt.text == "do it"
        assert scene.view.running is None


async def test_what_is_typed_before_the_agent_is_there_is_sent_when_it_is() -> None:
    session = FakeSession()
    async with stage(session=session) as scene:
        scene.app.desk._session = None
        scene.app.prompt.replace_text("early")
        await scene.pilot.press("enter")
        assert scene.view.queued == ("early",)
        await scene.app.desk.connect(scene.app.pump.push)
        await scene.until(lambda: session.submitted)


async def test_up_and_down_walk_through_earlier_prompts_and_back_to_the_draft() -> None:
    async with stage() as scene:
        scene.app.desk.history[:] = ["first", "second"]
        scene.app.prompt.replace_text("dra")
        await scene.pilot.press("up")
        assert scene.app.prompt.text == "second"
        await scene.pilot.press("up", "up", "up")
        assert scene.app.prompt.text == "first"
        await scene.pilot.press("down", "down")
        assert scene.app.prompt.text == "dra"


async def test_ctrl_r_finds_the_earlier_prompts_that_contain_what_is_typed() -> None:
    async with stage() as scene:
        scene.app.desk.history[:] = ["fix the cart", "write docs", "fix the price"]
        scene.app.prompt.replace_text("FIX")
        await scene.pilot.press("ctrl+r")
        assert scene.app.prompt.text == "fix the price"
        await scene.pilot.press("ctrl+r")
        assert scene.app.prompt.text == "fix the cart"


async def test_ctrl_c_clears_keeps_in_history_and_quits_at_the_second_on_empty() -> None:
    async with stage() as scene:
        scene.app.prompt.replace_text("precious")
        await scene.pilot.press("ctrl+c")
        assert scene.app.prompt.text == ""
        await scene.pilot.press("up")
        assert scene.app.prompt.text == "precious"
        scene.app.prompt.replace_text("")
        await scene.pilot.press("ctrl+c")
        assert "Ctrl+C again quits" in scene.screen()
        assert not scene.session.closed
        await scene.pilot.press("ctrl+c")
        await scene.until(lambda: scene.session.closed)


async def test_quit_stops_the_task_first() -> None:
    async with stage() as scene:
        await scene.run()
        await scene.pilot.press("ctrl+q")
        await scene.until(lambda: scene.session.cancels)
        assert not scene.session.closed
        scene.end(files=m.Files())
        await scene.until(lambda: scene.session.closed)


async def test_a_paste_is_text_and_its_tail_sends_nothing() -> None:
    async with stage() as scene:
        scene.app.prompt.post_message(events.Paste("line one\r\nrm -rf\x1b[201~ x\u202e"))
        await scene.pilot.pause()
        await scene.pilot.press("enter")
        assert scene.session.submitted == []
        assert scene.app.prompt.text == "line one\nrm -rf␛[201~ x\n"
        scene.clock.pass_ms(200)
        await scene.pilot.press("enter")
        await scene.until(lambda: scene.session.submitted)


@pytest.mark.parametrize(
    ("command", "screen"),
    [("/help", HelpScreen), ("/tasks", TasksScreen), ("/trace", TraceScreen), ("/diff", DiffScreen)],
)
async def test_slash_commands_open_what_they_name(command: str, screen: type) -> None:
    async with stage() as scene:
        await scene.run()
        scene.end("completed")
        await scene.settled()
        scene.app.prompt.replace_text(command)
        await scene.pilot.press("enter")
        await scene.until(lambda: isinstance(scene.app.screen, screen))
        await scene.pilot.press("escape")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)


@pytest.mark.parametrize("text", ["/nonsense", "/undo", "!ls"])
async def test_what_does_not_exist_says_so_and_is_not_sent(text: str) -> None:
    async with stage() as scene:
        scene.app.prompt.replace_text(text)
        await scene.pilot.press("enter")
        await scene.until(lambda: scene.app._notifications)
        assert scene.session.submitted == []


async def test_a_path_is_a_prompt_and_no_command() -> None:
    async with stage() as scene:
        await scene.prompt("/etc/hosts is odd, look at it")


async def test_question_mark_opens_help_only_in_an_empty_prompt() -> None:
    async with stage() as scene:
        await scene.pilot.press("a", "?")
        assert scene.app.prompt.text == "a?"
        scene.app.prompt.replace_text("")
        await scene.pilot.press("?")
        await scene.until(lambda: isinstance(scene.app.screen, HelpScreen))
        await scene.pilot.press("f1")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)


async def test_the_chosen_task_is_shown() -> None:
    async with stage() as scene:
        await scene.run("one")
        first = scene.task
        scene.end("completed")
        await scene.settled()
        await scene.run("two")
        assert scene.view.shown == scene.task
        await scene.pilot.press("ctrl+t", "down", "enter")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)
        assert scene.view.shown == first
        assert scene.view.running.task == scene.task


async def test_the_palette_offers_what_the_registry_has() -> None:
    async with stage() as scene:
        await scene.pilot.press("ctrl+p")
        await scene.until(lambda: len(scene.app.screen_stack) == 2)
        await scene.pilot.press(*"help", "enter")
        await scene.pilot.pause()
        await scene.pilot.press("enter")
        await scene.until(lambda: isinstance(scene.app.screen, HelpScreen))


async def test_an_earlier_session_is_replayed_in_order_and_raises_no_card() -> None:
    session = FakeSession()
    session.welcome.tasks = [
        m.TaskSummary(task="A", state="cancelled", prompt="first wish", stop_reason="user"),
        m.TaskSummary(task="B", state="running", prompt="second wish"),
    ]
    async with stage(session=session) as scene:
        assert scene.view.running.task == "B"
        for state in ("queued", "running"):
            scene.say(m.TaskStateChanged, task="A", state=state)
        scene.say(m.Delta, task="A", ch="text", part="p", text="first answer\n\n")
        scene.say(m.TaskStateChanged, task="A", state="cancelling", prev="running")
        scene.say(m.TaskEnded, task="A", state="cancelled", stop_reason="user", evidence=evidence())
        for state in ("queued", "running"):
            scene.say(m.TaskStateChanged, task="B", state=state)
        scene.say(m.Delta, task="B", ch="text", part="p", text="second answer\n\n")
        await scene.settled()
        shown = [line.strip() for line in scene.lines().split("\n") if line.strip()]
        assert [line[:14] for line in shown] == [
            "› first wish", "first answer", "■ Stopped · ve", "› second wish", "second answer",
        ]  # fmt: skip
        assert scene.view.card == ""
        await scene.pilot.press("escape")
        await scene.until(lambda: session.cancels)
        assert session.cancels[0][0] == "B"
