"""The five lamps of a stop on one line, joined by a wire that lights up as the layers acknowledge.

Every lamp has its place for a width, whatever it says: nothing jumps. A lamp is glyph, word and time (or what it
waits for); colour only repeats them.
"""

from __future__ import annotations

from typing import Final

from rich.cells import cell_len
from textual.content import Content
from textual.widget import Widget

from peri_tui.tui.stop_report import GLYPHS, duration
from peri_tui.tui.view_model import DARK, Lamp, Lamps, LampState, ViewState

MARGIN: Final = 1
GAP: Final = 2
WIDEST: Final = 13
_COLOURS: Final[dict[LampState, str]] = {
    LampState.PENDING: "$peri-muted",
    LampState.ACTIVE: "$accent",
    LampState.OK: "$success",
    LampState.FAILED: "$error",
}


class LayerStrip(Widget):
    """Shows the lamps of the shown task; hollow and faint while nobody stops anything."""

    def __init__(self) -> None:
        super().__init__()
        self._lamps: Lamps = DARK

    def on_mount(self) -> None:
        """Follow the state."""
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        task = view.task
        lamps = task.lamps if task is not None else DARK
        if lamps != self._lamps:
            self._lamps = lamps
            self.refresh()

    def render(self) -> Content:
        """Return the line for the present width."""
        return strip_line(self._lamps, self.size.width)


def strip_line(lamps: Lamps, width: int) -> Content:
    """Return the strip for a width in cells."""
    fixed = sum(len(lamp.layer.title) + 3 for lamp in lamps) + GAP * (len(lamps) - 1)
    room = width - 2 * MARGIN
    value = max(0, min(WIDEST, (room - fixed) // len(lamps)))
    gap = max(GAP, (room - sum(len(lamp.layer.title) + 3 + value for lamp in lamps)) // (len(lamps) - 1))
    parts: list[Content | tuple[str, str]] = [(" " * MARGIN, "")]
    for index, lamp in enumerate(lamps):
        text, used = _lamp(lamp, value)
        parts += text
        if index < len(lamps) - 1:
            cell = len(lamp.layer.title) + 3 + value + gap
            parts.append(_wire(cell - used, lamp.state is LampState.OK))
    return Content.assemble(*parts)


def _lamp(lamp: Lamp, width: int) -> tuple[list[Content | tuple[str, str]], int]:
    colour = _COLOURS[lamp.state]
    name = "$peri-muted" if lamp.state is LampState.PENDING else "$foreground"
    bold = " bold" if lamp.state in (LampState.ACTIVE, LampState.FAILED) else ""
    value = _value(lamp, width)
    parts: list[Content | tuple[str, str]] = [
        (f"{GLYPHS[lamp.state]} ", colour + bold),
        (lamp.layer.title, name + bold),
    ]
    used = 2 + len(lamp.layer.title)
    if value:
        parts.append((f" {value}", "$peri-muted" if lamp.state is LampState.OK else colour))
        used += 1 + cell_len(value)
    return parts, used


def _value(lamp: Lamp, width: int) -> str:
    """Return what fits beside the name: the time of an acknowledged lamp, the words of another."""
    if lamp.state is LampState.OK:
        options = [duration(lamp.ms), duration(lamp.ms).replace(" ", "")]
    else:
        options = [lamp.words, lamp.words.replace(" files", "").replace(" of ", "/")]
    return next((text for text in options if cell_len(text) <= width), "")


def _wire(cells: int, lit: bool) -> tuple[str, str]:
    return (f" {'─' * max(0, cells - 2)} ", "$accent" if lit else "$peri-faint")
