"""Dialogs that ask: the safe answer has the focus, and nothing counts in the first 400 ms.

A key that was on its way before the dialog came must not answer it. So the buttons and the letters are dead until the
terminal has had the dialog for 400 ms, and a key that comes before that starts the 400 ms again: who types on without
looking up answers nothing. Esc is never dead, it is the stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

from textual import events
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Button, Static

from peri_tui.core.messages import Asked
from peri_tui.core.sanitize import one_line, reveal
from peri_tui.tui.screens.overlay import Overlay
from peri_tui.tui.widgets.line_view import LineView, diff_lines

DEAD_NS: Final = 400_000_000
LONG_CHARS: Final = 400
SHOWN_AGAIN_S: Final = 0.05


class QuestionScreen(Overlay[str | None]):
    """Base: dismissed with an outcome, or with None when nobody answered. The focus is on the safe answer."""

    AUTO_FOCUS = "#deny"

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._quiet_since: int | None = None

    def on_mount(self) -> None:
        """Find out when the dialog is really to be seen: on a busy machine that may be long after now."""
        self.call_after_refresh(self._ask_shown)

    def _ask_shown(self) -> None:
        if self._quiet_since is not None or not self.is_attached:
            return
        when_shown = getattr(self.app._driver, "when_shown", None)
        if when_shown is None:
            self._shown()
            return
        when_shown(self._shown)
        self.set_timer(SHOWN_AGAIN_S, self._ask_shown)

    def _shown(self) -> None:
        if self._quiet_since is None:
            self._quiet_since = self.clock()

    def _disturbed(self) -> None:
        if self._quiet_since is not None:
            self._quiet_since = self.clock()

    def on_paste(self, event: events.Paste) -> None:
        """A paste is no answer, and what follows it for a moment is its tail."""
        event.stop()
        self._disturbed()

    def on_key(self, _event: events.Key) -> None:
        """A key that means nothing here was meant for something else, and so may be the next."""
        if not self.is_armed:
            self._disturbed()

    @property
    def is_shown(self) -> bool:
        """True once the terminal has the dialog."""
        return self._quiet_since is not None

    @property
    def is_armed(self) -> bool:
        """True once an answer counts."""
        return self._quiet_since is not None and self.clock() - self._quiet_since >= DEAD_NS

    def action_choose(self, outcome: str) -> None:
        """Answer, if answers count already."""
        if self.is_armed:
            self.dismiss(outcome)
        else:
            self._disturbed()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer by a button."""
        event.stop()
        if event.button.name:
            self.action_choose(event.button.name)


class PermissionScreen(QuestionScreen):
    """May this tool run? The whole command or path is shown, every odd byte of it visible."""

    BINDINGS: ClassVar[Any] = [
        Binding("n", "choose('deny')", "Deny", show=False),
        Binding("y", "choose('allow')", "Once", show=False),
        Binding("s", "choose('allow_session')", "This exact one, this session", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, question: Asked, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self.question = question

    def box_title(self) -> str:
        """Return a title of our own words."""
        return "Permission"

    def compose_box(self) -> Iterable[Widget]:
        """Build question, command, facts, diff, buttons."""
        asked = self.question
        yield Static(Content.assemble((one_line(asked.title or asked.tool, 200), "bold")), classes="q-title")
        with VerticalScroll(classes="q-detail", can_focus=False):
            yield Static(command(asked), classes="q-command")
        yield Static(facts(asked), classes="q-facts")
        if asked.diff:
            yield LineView(diff_lines(asked.diff))
        with Horizontal(classes="q-buttons"):
            yield Button("Deny  n", id="deny", name="deny", compact=True)
            yield Button("Once  y", id="once", name="allow", compact=True)
            if self.question.tool == "shell":
                yield Button(
                    "This exact command, this session  s", id="session", name="allow_session", compact=True
                )

    def action_choose(self, outcome: str) -> None:
        """Answer; "for this session" exists for commands only, because the next change is never the same one."""
        if outcome != "allow_session" or self.question.tool == "shell":
            super().action_choose(outcome)

    def action_page(self, way: int) -> None:
        """Turn a page of the diff, or of the command where there is none: all of it can be read before an answer."""
        part = (self.query(LineView) or self.query(".q-detail")).first()
        if way > 0:
            part.scroll_page_down(animate=False)
        else:
            part.scroll_page_up(animate=False)


def command(asked: Asked) -> Content:
    """Return the whole text that is to be allowed, nothing elided."""
    mark = "$ " if asked.tool == "shell" else ""
    return Content.assemble((mark, "$accent bold"), (reveal(asked.detail), "$foreground"))


def facts(asked: Asked) -> Content:
    """Return where it runs, how long it is, and what a stop would not undo."""
    parts: list[tuple[str, str]] = []
    if asked.where:
        parts.append((f"in {one_line(asked.where, 100)}", "$peri-muted"))
    if len(asked.detail) > LONG_CHARS or asked.detail.count("\n") > 8:
        lines = asked.detail.count("\n") + 1
        parts.append((f"   {len(asked.detail):,} characters, {lines:,} lines", "$warning"))
    if asked.note:
        parts.append((f"\n{reveal(asked.note)}", "$peri-muted"))
    if asked.tool == "shell" and "not restored" not in asked.note:
        parts.append(("\nFiles that the command itself changes are not restored by a stop.", "$warning"))
    return Content.assemble(*parts)


class TrustScreen(QuestionScreen):
    """May the folder's own instructions be read? Default no; Enter says no."""

    BINDINGS: ClassVar[Any] = [
        Binding("n", "choose('no')", "No", show=False),
        Binding("y", "choose('yes')", "Yes", show=False),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, names: tuple[str, ...], clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._names = names

    def box_title(self) -> str:
        """Return a title of our own words."""
        return "Trust this folder?"

    def compose_box(self) -> Iterable[Widget]:
        """Build question and buttons."""
        yield Static(
            "This folder brings its own instructions for the model:", classes="q-title", markup=False
        )
        with VerticalScroll(classes="q-detail", can_focus=False):
            yield Static(Content("\n").join([Content("  " + one_line(name, 200)) for name in self._names]))
        yield Static(
            "Without trust they are not read; everything else works.", classes="q-facts", markup=False
        )
        with Horizontal(classes="q-buttons"):
            yield Button("No  n", id="deny", name="no", compact=True)
            yield Button("Yes, read them  y", id="once", name="yes", compact=True)
