"""The bar of the running task: what it does, whether it lives, what it costs; the Stop button at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget

from peri_tui.core.sanitize import one_line
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Layer
from peri_tui.tui.stop_report import clock as running_time
from peri_tui.tui.stop_report import headline, report
from peri_tui.tui.view_model import TaskView, ViewState
from peri_tui.tui.widgets.stop_button import StopButton

TICK_S: Final = 0.25
QUIET_S: Final = 10.0
Part = tuple[str, str]
Clock = Callable[[], int]


class TaskBar(Horizontal):
    """The line and the button."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def compose(self) -> ComposeResult:
        """Build both."""
        yield TaskLine(self._clock)
        yield StopButton()


class TaskLine(Widget):
    """One line of words about the shown task; ticks only while it runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._view = ViewState()

    def on_mount(self) -> None:
        """Follow the state and, while a task runs, the time."""
        self._ticking = self.set_interval(TICK_S, self.refresh, pause=True)
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        self._view = view
        if view.task is not None and not view.task.is_over:
            self._ticking.resume()
        else:
            self._ticking.pause()
        self.refresh()

    def render(self) -> Content:
        """Return the line for the present width."""
        return fit(bar_parts(self._view, self._clock()), self.size.width)


def fit(parts: list[Part], width: int) -> Content:
    """Return the parts that fit, whole, from the left; the first one is cut if it must."""
    chosen: list[Part] = []
    left = width - 1
    for index, (text, style) in enumerate(parts):
        if cell_len(text) > left:
            if index == 0:
                chosen.append((one_line(text, left), style))
            break
        chosen.append((text, style))
        left -= cell_len(text)
    return Content.assemble(" ", *chosen)


def bar_parts(view: ViewState, now: int) -> list[Part]:
    """Return the parts of the line, the most important first. Pure."""
    task = view.task
    if task is None:
        return _link(view) or [("○ Ready", "$peri-muted")]
    if task.is_stopping or (task.end is not None and task.pressed and not task.settled):
        return _stopping(task, now)
    if task.end is not None:
        return _over(task)
    if view.link in ("lost", "failed", "restarting", "killing"):
        return [*_link(view), *_running(task, now)]
    return _running(task, now)


def _link(view: ViewState) -> list[Part]:
    detail = one_line(view.link_detail, 80)
    detail = f" · {detail}" if detail else ""
    words: dict[str, Part] = {
        "connecting": ("◌ Connecting to the agent" + detail, "$peri-muted"),
        "lost": ("◌ Link lost, reconnecting" + detail + "   ", "$warning"),
        "restarting": ("◌ Agent is started again" + detail + "   ", "$warning"),
        "killing": ("✗ Agent is silent and will be ended" + detail + "   ", "$error"),
        "restarted": ("◌ Agent restarted" + detail + "   ", "$warning"),
        "failed": ("✗ No agent" + detail + "   ", "$error"),
    }
    return [words[view.link]] if view.link in words else []


def _stopping(task: TaskView, now: int) -> list[Part]:
    since = f" {(now - task.pressed) / 1e9:.1f} s" if task.pressed else ""
    word = "◐ Forcing" if task.forced else "◐ Stopping"
    parts = [(word + since, "$accent bold")]
    lamp = task.waits_for()
    if lamp is not None:
        said = f": {one_line(lamp.said, 40)}" if lamp.said and lamp.state == "failed" else ""
        if lamp.layer is Layer.ROLLBACK and "process" in lamp.said and lamp.state == "active":
            said = f": {one_line(lamp.said, 90)}"
        parts.append((f"   waits for {lamp.layer.title}{said}", "$foreground"))
    if not task.forced:
        parts.append(("   Esc again forces", "$peri-muted"))
    return parts


def _over(task: TaskView) -> list[Part]:
    end = task.end
    assert end is not None
    if end.state == TaskState.COMPLETED and not task.pressed:
        return [("✓ Done", "$success"), *_cost(task), *_changed(task)]
    if end.state == TaskState.COMPLETED:
        return [("✓ " + headline(task, end), "$foreground")]
    if end.state == TaskState.FAILED and not end.stop_reason:
        return [("✗ Failed", "$error"), (" · " + one_line(end.message, 200), "$foreground")]
    if task.verified:
        tone = {"ok": "$success", "warn": "$warning", "fail": "$error"}[report(task).tone]
        left = len(end.files.not_restored)
        more = [(f" · {left} not restored", tone)] if left else []
        return [("■ " + one_line(headline(task, end), 200), tone), *more]
    lamp = task.waits_for()
    return [
        ("✗ Not verified", "$error bold"),
        (f" · {lamp.layer.title}" if lamp is not None else "", "$error"),
    ]


def _running(task: TaskView, now: int) -> list[Part]:
    if task.state is TaskState.QUEUED:
        word = "○ Queued" if task.confirmed else "○ Sending"
        return [(word, "$peri-muted")]
    elapsed = running_time((now - task.started) / 1e9)
    parts = [(f"? Waiting for you {elapsed}", "$warning bold")]
    if task.state is not TaskState.WAITING:
        parts = [("● ", "$accent"), (f"Running {elapsed}", "$foreground bold")]
    if task.step:
        doing = one_line(task.doing, 16)
        parts.append((f"   step {task.step} {doing}".rstrip(), "$foreground"))
    if task.state is TaskState.WAITING:
        return [*parts, *_cost(task)]
    quiet = max(0.0, (now - task.alive) / 1e9)
    style = "$warning" if quiet >= QUIET_S else "$peri-muted"
    parts.append((f"   alive {quiet:4.1f} s ago", style))
    return [*parts, *_load(task), *_cost(task)]


def _load(task: TaskView) -> list[Part]:
    parts = []
    if task.processes:
        parts.append((f"   cpu {task.cpu:3.0f} %", "$peri-muted"))
        parts.append((f"   {task.rss / 1e6:4.0f} MB", "$peri-muted"))
    if task.rate:
        parts.append((f"   {task.rate:3.0f} tok/s", "$peri-muted"))
    return parts


def _cost(task: TaskView) -> list[Part]:
    total = task.tokens_in + task.tokens_out
    about = "" if task.exact else "~"
    return [(f"   {about}{tokens(total)} tokens", "$peri-muted")] if total else []


def tokens(count: int) -> str:
    """Return a count of tokens as people read it: ``812``, ``12.4k``."""
    return f"{count / 1000:.1f}k" if count >= 1000 else str(count)


def _changed(task: TaskView) -> list[Part]:
    count = len(task.files)
    return [(f"   {count} file{'' if count == 1 else 's'} changed", "$peri-muted")] if count else []
