"""The rest of the registry: tool output, themes, redraw, news of the link."""

from __future__ import annotations

import pytest

from peri_tui.core import messages as m
from tests.doubles.fake_session import FakeNews
from tests.tui.stage import stage

pytestmark = pytest.mark.tui


async def test_tool_output_is_folded_and_shown_by_a_key() -> None:
    async with stage() as scene:
        await scene.run()
        scene.say(m.ToolStarted, call="1", name="shell", summary="make")
        scene.say(m.Delta, ch="tool_out", part="1", text="".join(f"out {n}\n" for n in range(60)))
        scene.say(m.ToolEnded, call="1", name="shell", status="ok", summary="exit 0")
        await scene.settled()
        assert "out 59" not in scene.lines()
        await scene.pilot.press("ctrl+o")
        await scene.settled()
        assert "out 59" in scene.lines()
        assert "20 lines above" in scene.lines()
        await scene.pilot.press("ctrl+o")
        await scene.settled()
        assert "out 59" not in scene.lines()


async def test_a_failed_tool_shows_its_last_lines() -> None:
    async with stage() as scene:
        await scene.run()
        scene.say(m.ToolStarted, call="1", name="shell", summary="make")
        scene.say(m.Delta, ch="tool_out", part="1", text="one\ntwo: error\n")
        scene.say(m.ToolEnded, call="1", name="shell", status="error", summary="exit 2")
        await scene.settled()
        assert "two: error" in scene.lines()
        assert "exit 2" in scene.lines()


async def test_theme_and_redraw() -> None:
    async with stage() as scene:
        await scene.pilot.press("ctrl+l")
        scene.app.prompt.replace_text("/theme")
        await scene.pilot.press("enter")
        await scene.until(lambda: len(scene.app.screen_stack) == 2)
        await scene.pilot.press("escape")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)


async def test_a_stop_that_nobody_answers_is_shown_at_the_client_and_the_agent_may_be_kept() -> None:
    async with stage() as scene:
        scene.session.ack = False
        await scene.run()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.session.on_link(FakeNews("killing", "silent for 5 s", scene.task, ("other",)))
        await scene.settled()
        assert "would end with the agent: other. Ctrl+N" in scene.lines()
        await scene.pilot.press("ctrl+n")
        assert scene.session.declined == [scene.task]
        scene.session.on_link(FakeNews("unanswered", "no route answered", scene.task))
        await scene.until(lambda: scene.view.task.lamps[1].state == "failed")
        assert "Stopped" not in scene.screen()


async def test_a_lost_link_is_shown_and_the_task_can_still_be_stopped() -> None:
    async with stage() as scene:
        await scene.run()
        scene.session.on_link(FakeNews("lost", "the agent hung up"))
        await scene.settled()
        assert "Link lost" in scene.screen()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
