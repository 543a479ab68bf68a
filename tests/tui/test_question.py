"""Dialogs: what is asked is shown whole, the safe answer has the focus, nothing counts in the first 400 ms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual import events

from peri_tui.core import messages as m
from peri_tui.tui.screens.question import QuestionScreen
from tests.doubles.fake_session import FakeSession
from tests.tui.stage import Stage, stage

pytestmark = pytest.mark.tui


async def ask(scene: Stage, detail: str = "npm test", **fields: str) -> None:
    await scene.run()
    scene.say(m.TaskStateChanged, state="waiting", prev="running")
    fields = {
        "qid": "q1",
        "kind": "tool",
        "tool": "shell",
        "title": "Run a command?",
        "detail": detail,
    } | fields
    scene.say(m.Asked, **fields)
    await shown(scene)


async def shown(scene: Stage) -> None:
    """Wait for the dialog, and until its dead time began."""
    await scene.until(lambda: isinstance(scene.app.screen, QuestionScreen) and scene.app.screen.is_shown)


async def test_the_focus_is_on_deny() -> None:
    async with stage() as scene:
        await ask(scene)
        assert scene.app.focused.id == "deny"
        scene.clock.pass_ms(500)
        await scene.pilot.press("enter")
        await scene.until(lambda: scene.session.answers)
        assert scene.session.answers == [(scene.task, "q1", "deny")]


@pytest.mark.parametrize(("key", "outcome"), [("n", "deny"), ("y", "allow"), ("s", "allow_session")])
async def test_the_letters_answer(key: str, outcome: str) -> None:
    async with stage() as scene:
        await ask(scene)
        scene.clock.pass_ms(400)
        await scene.pilot.press(key)
        await scene.until(lambda: scene.session.answers)
        assert scene.session.answers[0][2] == outcome


async def test_nothing_counts_in_the_first_400_ms() -> None:
    async with stage() as scene:
        await ask(scene)
        for _ in range(20):
            scene.clock.pass_ms(19)
            await scene.pilot.press("y", "enter", "n", "s")
        assert scene.session.answers == []
        assert len(scene.app.screen_stack) == 2


async def test_the_dead_time_begins_when_the_terminal_has_the_dialog() -> None:
    async with stage() as scene:
        takes: list[Callable[[], None]] = []
        scene.app._driver.when_shown = takes.append
        await scene.run()
        scene.say(m.TaskStateChanged, state="waiting", prev="running")
        scene.say(m.Asked, qid="q1", kind="tool", tool="shell", title="Run a command?", detail="npm test")
        await scene.until(lambda: takes)
        scene.clock.pass_ms(5000)
        await scene.pilot.press("y", "enter")
        assert scene.session.answers == []
        takes[-1]()
        scene.clock.pass_ms(400)
        await scene.pilot.press("y")
        await scene.until(lambda: scene.session.answers)


async def test_typing_that_goes_on_begins_the_dead_time_again() -> None:
    async with stage() as scene:
        await ask(scene)
        for key in ["x", "y", "enter", "z", "y", "s", "a", "y"]:
            scene.clock.pass_ms(399)
            await scene.pilot.press(key)
        assert scene.session.answers == []
        scene.clock.pass_ms(400)
        await scene.pilot.press("n")
        await scene.until(lambda: scene.session.answers)
        assert scene.session.answers[0][2] == "deny"


async def test_the_end_of_a_long_command_can_be_reached() -> None:
    async with stage() as scene:
        await ask(scene, "\n".join(f"word{number}" for number in range(100)) + "; the end")
        for _ in range(40):
            await scene.pilot.press("pagedown")
        await scene.pilot.pause()
        assert "the end" in scene.screen()


async def test_a_paste_is_no_answer() -> None:
    async with stage() as scene:
        await ask(scene)
        scene.clock.pass_ms(1000)
        scene.app.screen.post_message(events.Paste("y\n"))
        await scene.pilot.pause()
        await scene.pilot.press("y", "enter")
        assert scene.session.answers == []


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("ls \x1b[8mrm", "ls ␛[8mrm"),
        ("a\u202eb", "a<U+202E>b"),
        ("a\u200bb", "a<U+200B>b"),
        ("echo [$HOME] [/] [@click=app.quit]X", "echo [$HOME] [/] [@click=app.quit]X"),
    ],
)
async def test_every_odd_byte_of_a_command_is_visible(detail: str, shown: str) -> None:
    async with stage() as scene:
        await ask(scene, detail)
        await scene.pilot.pause()
        assert shown in scene.screen()


async def test_a_long_command_is_counted_and_whole() -> None:
    async with stage() as scene:
        await ask(scene, "echo " + "x" * 300 + " " * 300 + "; rm -rf /")
        await scene.pilot.pause()
        assert "615 characters, 1 lines" in scene.screen()


async def test_a_shell_command_says_not_restored() -> None:
    async with stage() as scene:
        await ask(scene)
        await scene.pilot.pause()
        assert "are not restored by a stop" in scene.screen()


async def test_an_edit_shows_its_diff() -> None:
    async with stage((80, 24)) as scene:
        await ask(
            scene,
            "a.py",
            tool="edit_file",
            title="Change a file?",
            diff="--- a\n+++ b\n@@ -1 +1 @@\n-old [/]\n+new\u202e\n",
        )
        await scene.pilot.pause()
        assert "-old [/]" in scene.screen()
        assert "+new<U+202E>" in scene.screen()


async def test_a_change_has_no_answer_for_the_session() -> None:
    async with stage((80, 24)) as scene:
        await ask(scene, "a.py", tool="edit_file", title="Change a file?")
        scene.clock.pass_ms(500)
        await scene.pilot.press("s")
        await scene.pilot.pause()
        assert "this session" not in scene.screen()
        assert scene.session.answers == []
        await scene.pilot.press("y")
        await scene.until(lambda: bool(scene.session.answers))
        assert scene.session.answers[0][2] == "allow"


async def test_a_question_that_was_closed_elsewhere_goes_away() -> None:
    async with stage() as scene:
        await ask(scene)
        scene.say(m.Resolved, qid="q1", outcome="deny")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)
        assert scene.session.answers == []


async def test_the_next_question_opens_after_the_answer() -> None:
    async with stage() as scene:
        await ask(scene)
        scene.clock.pass_ms(500)
        await scene.pilot.press("y")
        scene.say(m.Resolved, qid="q1", outcome="allow")
        scene.say(m.Asked, qid="q2", kind="tool", tool="shell", title="Run?", detail="second")
        await scene.until(lambda: "second" in scene.screen())
        assert [answer[1] for answer in scene.session.answers] == ["q1"]


async def test_a_help_screen_above_a_question_does_not_keep_it() -> None:
    async with stage() as scene:
        await scene.run()
        await scene.pilot.press("f1")
        scene.say(m.Asked, qid="q1", kind="tool", tool="shell", title="Run?", detail="first")
        await scene.until(lambda: "first" in scene.screen())
        await scene.pilot.press("f1")
        assert "first" in scene.screen()
        scene.say(m.Resolved, qid="q1", outcome="deny")
        await scene.until(lambda: "Help" in scene.screen())


@pytest.mark.parametrize(
    ("keys", "trusted"), [(("enter",), False), (("n",), False), (("escape",), False), (("y",), True)]
)
async def test_trust_is_asked_and_the_default_is_no(keys: tuple[str, ...], trusted: bool) -> None:
    session = FakeSession()
    session.welcome.ask_trust = ["AGENTS.md", "[/] \x1b]0;x"]
    async with stage(session=session) as scene:
        await shown(scene)
        await scene.pilot.pause()
        assert "AGENTS.md" in scene.screen()
        scene.clock.pass_ms(500)
        await scene.pilot.press(*keys)
        await scene.until(lambda: session.trusted)
        assert session.trusted == [trusted]
