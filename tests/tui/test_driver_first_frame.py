"""The first *Stopping* comes from the input thread, also while the loop is blocked, and only where it is true."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from textual.geometry import Size

from peri_tui.core import messages as m
from peri_tui.core.stop_plan import Press
from peri_tui.tui import first_frame
from peri_tui.tui.first_frame import WORD, FirstFrame
from peri_tui.tui.widgets.task_bar import TaskLine
from tests.tui.stage import Stage
from tests.tui.stage import stage as staged

pytestmark = pytest.mark.tui


class FakeDriver:
    def __init__(self) -> None:
        self.painted: list[str] = []
        self.takes = True

    def paint(self, data: str) -> bool:
        self.painted.append(data)
        return self.takes


def press(stage: Stage, verdict: Press = Press.STOP, task: str = "") -> Any:
    return SimpleNamespace(press=verdict, task=task or stage.task, t_mono=time.monotonic_ns(), sent=True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(first_frame, "PeriDriver", FakeDriver)
    monkeypatch.setattr(first_frame, "_terminal", lambda _: Size(120, 40))
    return driver


async def running(stage: Stage, driver: FakeDriver) -> FirstFrame:
    first = FirstFrame()
    first.follow(stage.app)
    await stage.run()
    stage.app._driver = driver
    return first


async def test_it_is_painted_where_the_line_is_and_only_for_a_first_press(driver: FakeDriver) -> None:
    async with staged() as stage:
        kept = stage.app._driver
        first = await running(stage, driver)
        region = stage.app.main.query_one(TaskLine).region
        assert not first.paint(press(stage, Press.FORCE))
        assert not first.paint(press(stage, task="01J0000000000000000000000B"))
        assert first.paint(press(stage))
        assert f"\x1b[{region.y + 1};{region.x + 1}H" in driver.painted[0]
        assert WORD.ljust(region.width) in driver.painted[0]
        stage.app._driver = kept


async def test_nothing_is_painted_when_it_would_not_be_true(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged() as stage:
        kept = stage.app._driver
        first = await running(stage, driver)
        monkeypatch.setattr(first_frame, "_terminal", lambda _: Size(80, 24))
        assert not first.paint(press(stage)), "the terminal has another size by now"
        monkeypatch.setattr(first_frame, "_terminal", lambda _: Size(120, 40))
        driver.takes = False
        assert not first.paint(press(stage)), "the terminal takes nothing"
        driver.takes = True
        stage.app._driver = kept
        stage.say(m.Asked, qid="q", kind="tool", tool="shell", title="Run a command?")
        await stage.until(lambda: len(stage.app.screen_stack) > 1)
        stage.say(m.Progressed, step=2, doing="model")
        await stage.pilot.pause()
        assert not first.paint(press(stage)), "a dialog lies over the line"
        stage.end()
        await stage.pilot.pause()
        assert not first.paint(press(stage)), "the task is over"
