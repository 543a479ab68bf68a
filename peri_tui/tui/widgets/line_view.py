"""A scrolling view of ready lines: only what is visible is composed. For diffs, help and traces."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from peri_tui.core.sanitize import reveal
from peri_tui.tui.theming import Palette

Line = Sequence[tuple[str, str]]
"""Pieces of text with the name of a palette colour (or an empty name)."""


class LineView(ScrollView, can_focus=True):
    """Lines of coloured pieces, cleaned where they are drawn."""

    ALLOW_SELECT = False

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        super().__init__()
        self._lines = list(lines)

    def show(self, lines: Sequence[Line]) -> None:
        """Show other lines, from the top."""
        self._lines = list(lines)
        self.scroll_to(y=0, animate=False)
        self._measure()

    def on_mount(self) -> None:
        """Learn the size of the text."""
        self._measure()

    def _measure(self) -> None:
        widest = max((sum(len(text) for text, _ in line) for line in self._lines[:2000]), default=0)
        self.virtual_size = Size(min(widest + 2, 2000), len(self._lines))
        self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines, for an automatic height."""
        return max(1, len(self._lines))

    def render_line(self, y: int) -> Strip:
        """Return the line at ``y`` of the widget."""
        x, top = self.scroll_offset
        base = self.rich_style
        at = top + y
        strip = self._strip(self._lines[at]) if at < len(self._lines) else Strip([])
        width = self.size.width
        return strip.crop_extend(x, x + width, base).apply_style(base)

    def _strip(self, line: Line) -> Strip:
        palette = Palette.of(self.app.theme_variables, dark=self.app.current_theme.dark)
        return Strip(
            [
                Segment(reveal(text[:2000]).replace("\n", "␊").expandtabs(4), self._style(palette, name))
                for text, name in line
            ]
        )

    def _style(self, palette: Palette, name: str) -> Style:
        colour, _, weight = name.partition(" ")
        return Style(color=getattr(palette, colour) if colour else None, bold=weight == "bold" or None)


def diff_lines(diff: str) -> list[Line]:
    """Return the lines of a unified diff, coloured by their first character."""
    colours = {"+": "added", "-": "removed", "@": "accent", "\\": "muted"}
    lines: list[Line] = []
    for line in diff.split("\n"):
        if line.startswith(("+++ ", "--- ")):
            lines.append([(line, "muted")])
        else:
            lines.append([(line, colours.get(line[:1], "foreground"))])
    return lines[:-1] if lines and not diff.split("\n")[-1] else lines
