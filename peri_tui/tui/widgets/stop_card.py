"""The stop card: five layers, what became of the files, what is left. Its letters act only while it has the focus."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from peri_tui.core.sanitize import reveal
from peri_tui.tui.drawing import one_line
from peri_tui.tui.stop_report import GLYPHS, StopReport, duration, report
from peri_tui.tui.view_model import LampState, TaskView, ViewState

SAID_AT = 23
_TONES = {"ok": "$success", "warn": "$warning", "fail": "$error"}
_LAMPS = {
    LampState.PENDING: "$peri-muted",
    LampState.ACTIVE: "$accent",
    LampState.OK: "$success",
    LampState.FAILED: "$error",
}


class StopCard(Static, can_focus=True):
    """Hidden until a stopped task may be shown, and again with the next prompt."""

    BINDINGS: ClassVar[Any] = [
        Binding("c", "ask('copy')", "Copy report", show=False),
        Binding("d", "ask('details')", "Details", show=False),
        Binding("f", "ask('force')", "Force again", show=False),
        Binding("enter", "ask('dismiss')", "Put away", show=False),
    ]

    class Asked(Message):
        """A letter on the card: copy, details, force or dismiss."""

        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._shown: TaskView | None = None

    def on_mount(self) -> None:
        """Follow the state."""
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        task = view.tasks.get(view.card) if view.card else None
        task = task if task is not None and task.settled else None
        if task is self._shown and self.display == (task is not None):
            return
        self._shown = task
        self.display = task is not None
        if task is not None:
            self._fill(report(task))

    def _fill(self, card: StopReport) -> None:
        self.border_title = Content.assemble((reveal(card.title), f"bold {_TONES[card.tone]}"))
        self.set_classes(f"-{card.tone}")
        self._draw(card)

    def on_resize(self) -> None:
        """Cut the lines for the new width."""
        if self._shown is not None:
            self._draw(report(self._shown))

    def _draw(self, card: StopReport) -> None:
        self.update(
            card_content(card, self.content_size.width or self.app.size.width - 6, focused=self.has_focus)
        )

    def watch_has_focus(self, has_focus: bool) -> None:
        """Show whether the letters act now."""
        super().watch_has_focus(has_focus)
        if self._shown is not None:
            self._draw(report(self._shown))

    def action_ask(self, what: str) -> None:
        """Pass a letter on, where it means something now."""
        if self._shown is None or (what == "force" and not report(self._shown).can_force):
            return
        self.post_message(self.Asked(what))


def card_content(card: StopReport, width: int, *, focused: bool = False) -> Content:
    """Return the inside of the card; what a layer said is cut to one line (the whole is in the details)."""
    said = max(8, width - SAID_AT)
    lines = [
        Content.assemble(
            (f"{lamp.layer.title:<10} ", "$foreground"), (f"{GLYPHS[lamp.state]} ", f"{_LAMPS[lamp.state]} bold"),
            (f"{duration(lamp.ms):>7}   ", "$peri-muted"), (one_line(lamp.said, said), "$foreground"),
        )
        for lamp in card.lamps
    ]  # fmt: skip
    for line in card.files:
        weight = "$warning" if "not restored" in line else "$foreground bold"
        lines.append(Content.assemble((reveal(line), weight)))
    lines += [
        Content.assemble(("left  ", "$error bold"), (reveal(line), "$foreground"))
        for line in card.residue[:4]
    ]
    if len(card.residue) > 4:
        lines.append(Content.assemble((f"      and {len(card.residue) - 4} more", "$peri-muted")))
    if card.ended:
        # One line for all: which programs, and by which signal (the whole list is in the report).
        lines.append(
            Content.assemble(
                ("ended ", "$peri-muted"), (one_line(_ended(card.ended), width - 6), "$foreground")
            )
        )
    lines += [
        Content.assemble(
            ("kept  ", "$success bold"),
            (one_line(f"service {line}, ends by Ctrl+T", width - 6), "$foreground"),
        )
        for line in card.services
    ]
    lines.append(_keys(card, focused))
    return Content("\n").join(lines)


def _ended(ended: tuple[str, ...]) -> str:
    return " · ".join(ended[:6]) + (f" and {len(ended) - 6} more" if len(ended) > 6 else "")


def _keys(card: StopReport, focused: bool) -> Content:
    keys = [("d", "details"), ("c", "copy report"), ("Enter", "put away")]
    if card.can_force:
        keys.insert(0, ("f", "force again"))
    key_style, word_style = (
        ("$accent bold", "$foreground") if focused else ("$peri-muted bold", "$peri-muted")
    )
    parts: list[tuple[str, str]] = [] if focused else [("Ctrl+Up then  ", "$peri-muted")]
    for key, word in keys:
        parts += [(key, key_style), (f" {word}   ", word_style)]
    return Content.assemble(*parts)
