"""The first *Stopping* after a press, written to the terminal by the input thread itself.

The event loop may be busy for some tens of milliseconds (a layout, the garbage collector) or blocked for good; the
user is to see at once that the press was taken. So the loop publishes, while a task runs, the line that a press would
show and where; the input thread only hands it to the terminal's writer. The trace does not call this *painted*: that
word stays with the loop, so that a blocked one is still found.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.css.query import NoMatches
from textual.geometry import Region, Size

from peri_tui.core.stop_plan import Press
from peri_tui.tui.driver import PeriDriver
from peri_tui.tui.ports import PressReport
from peri_tui.tui.view_model import ViewState
from peri_tui.tui.widgets.task_bar import TaskLine

WORD: Final = " ◐ Stopping"
WRITER_S: Final = 0.001
_SAVE: Final = "\x1b7"
_RESTORE: Final = "\x1b8"


@dataclass(frozen=True, slots=True)
class _Frame:
    task: str
    size: Size
    region: Region
    text: str


class FirstFrame:
    """See the module. One attribute is shared between the threads; it is replaced whole."""

    def __init__(self) -> None:
        self._app: App[int] | None = None
        self._frame: _Frame | None = None

    def follow(self, app: App[int]) -> None:
        """Publish from now on what the app's ``view`` says; called on the loop, once the main screen is there."""
        self._app = app
        app.watch(app, "view", self._publish)

    def _publish(self, view: ViewState) -> None:
        task = view.task
        wanted = task is not None and task.can_stop and task.task == (view.running or task).task
        self._frame = self._draw(task.task) if wanted and task is not None else None

    def _draw(self, task: str) -> _Frame | None:
        app = self._app
        # Under a dialog the line is dimmed or hidden; there the loop has the word.
        if app is None or len(app.screen_stack) != 1:
            return None
        try:
            line = app.screen.query_one(TaskLine)
        except NoMatches:
            return None
        region = line.region
        if region.width < len(WORD) or region.height < 1:
            return None
        style = Style(color=_accent(app).rich_color, bgcolor=line.background_colors[1].rich_color, bold=True)
        shown = style.render(WORD.ljust(region.width), color_system=app.console._color_system)
        where = f"\x1b[{region.y + 1};{region.x + 1}H"
        return _Frame(task, app.size, region, f"{_SAVE}{where}{shown}{_RESTORE}")

    def paint(self, report: PressReport) -> bool:
        """Show a press; called in the input thread. True if the writer took it."""
        frame, app = self._frame, self._app
        if frame is None or app is None or report.press is not Press.STOP or report.task != frame.task:
            return False
        driver = app._driver
        if not isinstance(driver, PeriDriver) or _terminal(driver) != frame.size:
            return False
        if not driver.paint(frame.text):
            return False
        # The loop wakes next, for the same press, and would keep the writer from the interpreter.
        time.sleep(WRITER_S)
        if app._loop is not None and not app._loop.is_closed():
            app._loop.call_soon_threadsafe(self._check, frame)
        return True

    def _check(self, frame: _Frame) -> None:
        # If the line moved between the last publication and the press, what was painted is in a wrong place.
        app = self._app
        if app is None or not app.screen_stack:
            return
        lines = app.screen_stack[0].query(TaskLine)
        if app.size != frame.size or not lines or lines.first().region != frame.region:
            app.screen.refresh(repaint=True)


def _accent(app: App[int]) -> Color:
    return Color.parse(app.theme_variables.get("accent", "#ffffff"))


def _terminal(driver: PeriDriver) -> Size:
    try:
        columns, rows = os.get_terminal_size(driver.fileno)
    except OSError:
        return Size(0, 0)
    return Size(columns, rows)
