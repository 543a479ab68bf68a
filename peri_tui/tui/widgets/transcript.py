"""The conversation as a virtual view of lines: only what is visible is composed, whatever the length.

Blocks are drawn once for a width and a theme, the newest at once when they are cheap, all others in a thread, a few
at a time. A block that is not drawn yet keeps the lines it had. The view follows the end unless the user scrolled up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, chain
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
BATCH: Final = 40
BATCH_CHARS: Final = 8000
NEAR: Final = 60
WATCHED: Final = 200
PLACEHOLDER_CHARS: Final = 4000

GREETING: Final = (
    ("p e r i", "accent", True),
    ("", "muted", False),
    ("Describe a task. While it runs, Esc stops it, at any moment:", "foreground", False),
    ("five layers answer for it, and the files come back.", "muted", False),
)


@dataclass(frozen=True, slots=True)
class _Look:
    """What lines are drawn for; another width, theme or folding is another look."""

    width: int
    palette: Palette
    unfolded: bool


@dataclass(slots=True, eq=False)
class _Row:
    """A block with its lines, and the version and look that they were drawn for."""

    block: Block
    gap: int = 0
    version: int = -1
    look: _Look | None = None
    strips: list[Strip] = field(default_factory=list)

    @property
    def height(self) -> int:
        return len(self.strips) + self.gap if self.strips else 0

    def is_stale(self, look: _Look | None) -> bool:
        return self.look is not look or self.version != self.block.version


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
        self._look: _Look | None = None
        self._stale: set[_Row] = set()

    @property
    def follows(self) -> bool:
        """True while the view stays at the end by itself."""
        return self._following

    @property
    def settled(self) -> bool:
        """True when every block is drawn for this size and theme."""
        return not self._drawing and not self._stale

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
        row, offset = self._anchor()
        fresh_look = self._take_look()
        self._match()
        self._find_stale(everything=fresh_look or len(self._rows) < WATCHED)
        self._draw_newest()
        self._arrange(row, offset)
        if self._stale and not self._drawing:
            self._drawing = True
            self.run_worker(self._draw_rest(), group="draw", exit_on_error=False)

    def _take_look(self) -> bool:
        palette = Palette.of(self.app.theme_variables, dark=self.app.current_theme.dark)
        # The place of the scroll bar is kept free, so that its appearance moves no line.
        width = self.outer_size.width - self.styles.scrollbar_size_vertical
        look = _Look(width, palette, self._conversation.unfolded)
        if look == self._look:
            return False
        self._look = look
        return True

    def _match(self) -> None:
        # Blocks are added near the end and dropped at the start; what is between keeps its rows.
        blocks, rows = self._conversation.blocks, self._rows
        same = min(len(blocks), len(rows))
        if same and rows[0].block is not blocks[0]:
            same = 0
        while same and rows[same - 1].block is not blocks[same - 1]:
            same -= 1
        known = {id(row.block): row for row in rows[same:]}
        kept = rows[:same]
        before = blocks[same - 1] if same else None
        for block in blocks[same:]:
            row = known.pop(id(block), None) or _Row(block)
            row.gap = _gap(before, block)
            kept.append(row)
            before = block
        self._stale.difference_update(known.values())
        self._rows = kept

    def _find_stale(self, *, everything: bool) -> None:
        # Only the newest blocks change by themselves; looking at all of them would cost more than drawing.
        rows = self._rows if everything else self._rows[-WATCHED:]
        self._stale.update(row for row in rows if row.is_stale(self._look))

    def _draw_newest(self) -> None:
        for row in self._rows[-DRAWN_AT_ONCE:]:
            if row not in self._stale:
                continue
            if row.block.kind is not Kind.MARKDOWN:
                self._put(row, row.block.version, self._look, self._draw(row.block))
            elif not row.strips and len(row.block.text) <= PLACEHOLDER_CHARS:
                # Until the thread has drawn it, a sealed block looks as it did while it was the tail.
                row.strips = self._draw(Block(Kind.TAIL, row.block.text))

    def _draw(self, block: Block) -> list[Strip]:
        assert self._look is not None
        return draw(block, self._look.width, self._look.palette, unfolded=self._look.unfolded)

    def _put(self, row: _Row, version: int, look: _Look | None, strips: list[Strip]) -> None:
        row.version, row.look, row.strips = version, look, strips
        if not row.is_stale(self._look):
            self._stale.discard(row)

    async def _draw_rest(self) -> None:
        try:
            while (batch := self._next_batch()) and (look := self._look) is not None:
                versions = [row.block.version for row in batch]
                drawn = await asyncio.to_thread(_draw_all, [row.block for row in batch], look)
                anchor, offset = self._anchor()
                for row, version, strips in zip(batch, versions, drawn, strict=True):
                    self._put(row, version, look, strips)
                self._arrange(anchor, offset)
        finally:
            self._drawing = False

    def _next_batch(self) -> list[_Row]:
        """Return stale rows, those near the view first, as many as are drawn in a few milliseconds."""
        if not self._stale or not self.is_attached:
            return []
        first = max(0, bisect_right(self._tops, self.scroll_offset.y) - 1)
        near = self._rows[first : first + NEAR] or self._rows[-NEAR:]
        chosen: list[_Row] = []
        chars = 0
        for row in chain((row for row in near if row in self._stale), self._stale):
            if chars > BATCH_CHARS or len(chosen) >= BATCH:
                break
            if row not in chosen:
                chosen.append(row)
                chars += len(row.block.text)
        return chosen

    def _trim(self) -> None:
        if self._tops[-1] <= MAX_STRIPS:
            return
        drop = bisect_right(self._tops, self._tops[-1] - MAX_STRIPS * 9 // 10)
        drop = min(drop, len(self._rows) - 1)
        self._stale.difference_update(self._rows[:drop])
        del self._rows[:drop]
        self._conversation.drop_first(drop)
        self._measure()

    def _measure(self) -> None:
        self._tops = list(accumulate([row.height for row in self._rows], initial=0))

    # --- position --------------------------------------------------------------------------------------------------------

    def _anchor(self) -> tuple[_Row | None, int]:
        y = self.scroll_offset.y
        index = bisect_right(self._tops, y) - 1
        if self._following or not 0 <= index < len(self._rows):
            return None, 0
        return self._rows[index], y - self._tops[index]

    def _arrange(self, row: _Row | None, offset: int) -> None:
        self._measure()
        self._trim()
        self._moving = True
        try:
            self.virtual_size = Size(self.size.width, self._tops[-1])
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
        if self._look is None or not 0 <= line - top < len(GREETING):
            return Strip([])
        text, colour, bold = GREETING[line - top]
        style = Style(color=getattr(self._look.palette, colour), bold=bold)
        return Strip([Segment(" " * max(2, (self.size.width - len(text)) // 2)), Segment(text, style)])

    def get_content_height(self, *_args: Any, **_options: Any) -> int:
        """Return the number of lines (for an automatic height)."""
        return self._tops[-1]


def _draw_all(blocks: list[Block], look: _Look) -> list[list[Strip]]:
    return [_draw_one(block, look) for block in blocks]


def _draw_one(block: Block, look: _Look) -> list[Strip]:
    try:
        return draw(block, look.width, look.palette, unfolded=look.unfolded)
    except Exception:
        # Text that a highlighter or the Markdown parser chokes on is still text.
        style = Style(color=look.palette.foreground)
        return [Strip([Segment("  " + line, style)]) for line in wrap(block.text, max(8, look.width - 4))]


def _gap(before: Block | None, block: Block) -> int:
    if before is None:
        return 0
    if before.kind is Kind.TOOL and block.kind is Kind.TOOL:
        return 0
    if before.kind is Kind.NOTICE and block.kind is Kind.NOTICE:
        return 0
    return 0 if block.piece is not None and block.piece.continued else 1
