"""The conversation as a virtual view of lines: only what is visible is composed, whatever the length.

Blocks are drawn once for a width and a theme, the newest at once when they are cheap, all others in a thread, a few
at a time. A block that is not drawn yet keeps the lines it had. The view follows the end unless the user scrolled up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from peri_tui.tui.conversation import Block, Conversation, Kind
from peri_tui.tui.drawing import draw, wrap
from peri_tui.tui.theming import Palette

MAX_STRIPS: Final = 20_000
DRAWN_AT_ONCE: Final = 12
BATCH: Final = 6
PLACEHOLDER_CHARS: Final = 4000

GREETING: Final = (
    ("p e r i", "accent", True),
    ("", "muted", False),
    ("Describe a task. While it runs, Esc stops it, at any moment:", "foreground", False),
    ("five layers answer for it, and the files come back.", "muted", False),
)

Key = tuple[int, int, Palette, bool]


@dataclass(slots=True, eq=False)
class _Row:
    """A block with its lines; ``key`` is what they were drawn for."""

    block: Block
    gap: int = 0
    key: Key | None = None
    strips: list[Strip] = field(default_factory=list)


class Transcript(ScrollView, can_focus=True):
    """Shows a ``Conversation``; call ``sync`` after it changed."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[Any] = [
        Binding("pageup", "page_up", "Scroll up", show=False),
        Binding("pagedown", "page_down", "Scroll down", show=False),
    ]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self._conversation = conversation
        self._rows: list[_Row] = []
        self._tops: list[int] = [0]
        self._following = True
        self._moving = False
        self._drawing = False
        self._palette: Palette | None = None

    @property
    def follows(self) -> bool:
        """True while the view stays at the end by itself."""
        return self._following

    @property
    def settled(self) -> bool:
        """True when every block is drawn for this size and theme."""
        return not self._drawing and not any(self._stale(row) for row in self._rows)

    @property
    def lines(self) -> list[str]:
        """The text of every line, for tests."""
        return [self._strip(y).text.rstrip() for y in range(self._tops[-1])]

    # --- following the model -------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Follow the app's text and theme."""
        self.watch(self.app, "text_version", self.sync)
        self.watch(self.app, "theme", self._retheme, init=False)

    def _retheme(self) -> None:
        # The theme's variables are resolved after this watcher ran.
        self.call_after_refresh(self.sync)

    def on_resize(self) -> None:
        """Draw again for the new width."""
        self.sync()

    def sync(self) -> None:
        """Take over what changed in the conversation."""
        if not self.is_attached or self.size.width == 0:
            return
        self._palette = Palette.of(self.app.theme_variables, dark=self.app.current_theme.dark)
        first_visible, offset = self._anchor()
        self._match()
        self._draw_newest()
        self._trim()
        self._arrange(first_visible, offset)
        if not self._drawing and any(self._stale(row) for row in self._rows):
            self._drawing = True
            self.run_worker(self._draw_rest(), group="draw", exit_on_error=False)

    def _match(self) -> None:
        blocks = self._conversation.blocks
        old = {id(row.block): row for row in self._rows}
        rows = [old.get(id(block)) or _Row(block) for block in blocks]
        before: Block | None = None
        for row in rows:
            row.gap = _gap(before, row.block)
            before = row.block
        self._rows = rows

    def _key(self, row: _Row) -> Key:
        assert self._palette is not None
        unfolded = self._conversation.unfolded and row.block.kind is Kind.TOOL
        return (row.block.version, self.scrollable_content_region.width, self._palette, unfolded)

    def _stale(self, row: _Row) -> bool:
        return self._palette is not None and row.key != self._key(row)

    def _draw_newest(self) -> None:
        for row in self._rows[-DRAWN_AT_ONCE:]:
            if not self._stale(row):
                continue
            if row.block.kind is not Kind.MARKDOWN:
                self._put(row, self._key(row), self._draw(row))
            elif not row.strips and len(row.block.text) <= PLACEHOLDER_CHARS:
                row.strips = self._placeholder(row)

    def _draw(self, row: _Row) -> list[Strip]:
        _version, width, palette, unfolded = self._key(row)
        return draw(row.block, width, palette, unfolded=unfolded)

    def _placeholder(self, row: _Row) -> list[Strip]:
        # Until the thread has drawn it, a sealed block looks as it did while it was the tail.
        tail = Block(Kind.TAIL, row.block.text)
        _version, width, palette, _unfolded = self._key(row)
        return draw(tail, width, palette)

    def _put(self, row: _Row, key: Key, strips: list[Strip]) -> None:
        row.key, row.strips = key, strips

    async def _draw_rest(self) -> None:
        try:
            while batch := self._next_batch():
                jobs = [(row.block, *self._key(row)[1:]) for row in batch]
                keys = [self._key(row) for row in batch]
                drawn = await asyncio.to_thread(_draw_all, jobs)
                first_visible, offset = self._anchor()
                for row, key, strips in zip(batch, keys, drawn, strict=True):
                    self._put(row, key, strips)
                self._trim()
                self._arrange(first_visible, offset)
        finally:
            self._drawing = False

    def _next_batch(self) -> list[_Row]:
        stale = [index for index, row in enumerate(self._rows) if self._stale(row)]
        if not stale or not self.is_attached:
            return []
        row, _offset = self._anchor()
        middle = self._rows.index(row) if row in self._rows else len(self._rows)
        stale.sort(key=lambda index: abs(index - middle))
        return [self._rows[index] for index in stale[:BATCH]]

    def _trim(self) -> None:
        total = sum(len(row.strips) + row.gap for row in self._rows)
        if total <= MAX_STRIPS:
            return
        drop, goal = 0, total - MAX_STRIPS * 9 // 10
        while drop < len(self._rows) - 1 and goal > 0:
            goal -= len(self._rows[drop].strips) + self._rows[drop].gap
            drop += 1
        del self._rows[:drop]
        self._conversation.drop_first(drop)

    # --- position --------------------------------------------------------------------------------------------------------

    def _anchor(self) -> tuple[_Row | None, int]:
        y = self.scroll_offset.y
        index = bisect_right(self._tops, y) - 1
        if self._following or not 0 <= index < len(self._rows):
            return None, 0
        return self._rows[index], y - self._tops[index]

    def _arrange(self, row: _Row | None, offset: int) -> None:
        self._tops = list(accumulate((len(item.strips) + item.gap for item in self._rows), initial=0))
        self._moving = True
        try:
            self.virtual_size = Size(self.scrollable_content_region.width, self._tops[-1])
            if self._following:
                self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)
            elif row is not None and row in self._rows:
                top = self._tops[self._rows.index(row)]
                self.scroll_to(y=top + offset, animate=False, immediate=True, force=True)
        finally:
            self._moving = False
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Keep following only while the user is at the end."""
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self._following = round(new_value) >= self.max_scroll_y

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._following = True
        self._arrange(None, 0)

    # --- lines -----------------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Return the line at ``y`` of the widget."""
        strip = self._strip(self.scroll_offset.y + y)
        base = self.rich_style
        return strip.adjust_cell_length(self.size.width, base).apply_style(base)

    def _strip(self, line: int) -> Strip:
        if not self._rows:
            return self._greeting(line)
        if not 0 <= line < self._tops[-1]:
            return Strip([])
        index = bisect_right(self._tops, line) - 1
        row = self._rows[index]
        within = line - self._tops[index] - row.gap
        return row.strips[within] if 0 <= within < len(row.strips) else Strip([])

    def _greeting(self, line: int) -> Strip:
        top = max(1, self.size.height // 2 - len(GREETING))
        if self._palette is None or not 0 <= line - top < len(GREETING):
            return Strip([])
        text, colour, bold = GREETING[line - top]
        style = Style(color=getattr(self._palette, colour), bold=bold)
        return Strip([Segment(" " * max(2, (self.size.width - len(text)) // 2)), Segment(text, style)])

    def get_content_height(self, *_args: Any, **_options: Any) -> int:
        """Return the number of lines (for an automatic height)."""
        return self._tops[-1]


def _draw_all(jobs: list[tuple[Block, int, Palette, bool]]) -> list[list[Strip]]:
    return [_draw_one(block, width, palette, unfolded) for block, width, palette, unfolded in jobs]


def _draw_one(block: Block, width: int, palette: Palette, unfolded: bool) -> list[Strip]:
    try:
        return draw(block, width, palette, unfolded=unfolded)
    except Exception:
        # Text that a highlighter or the Markdown parser chokes on is still text.
        style = Style(color=palette.foreground)
        return [Strip([Segment("  " + line, style)]) for line in wrap(block.text, max(8, width - 4))]


def _gap(before: Block | None, block: Block) -> int:
    if before is None:
        return 0
    if before.kind is Kind.TOOL and block.kind is Kind.TOOL:
        return 0
    if before.kind is Kind.NOTICE and block.kind is Kind.NOTICE:
        return 0
    return 0 if block.piece is not None and block.piece.continued else 1
