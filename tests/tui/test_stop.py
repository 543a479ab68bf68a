"""Layer 1: the press, the button, the lamps, the card."""

from __future__ import annotations

import pytest

from tests.tui.stage import stage

pytestmark = pytest.mark.tui


async def test_escape_is_shown_at_once_and_sent_once() -> None:
    async with stage() as scene:
        await scene.run()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        assert scene.view.task is not None
        assert scene.view.task.is_stopping
        assert "Stopping" in scene.screen()
        assert [(task, mode) for task, mode, _ in scene.session.cancels] == [(scene.task, "graceful")]
