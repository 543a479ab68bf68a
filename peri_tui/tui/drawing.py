"""Draws a block of the conversation as strips; pure, so that it can run in a thread.

Everything that comes from outside is cleaned here, per code point, and becomes plain segments: no markup parser ever
sees it. Markdown is rendered by rich; links are shown as text with their address, never as terminal links.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.theme import Theme as RichTheme
from textual.strip import Strip

from peri_tui.core.blocks import Block as Piece
from peri_tui.core.blocks import Kind as PieceKind
from peri_tui.core.sanitize import clean
from peri_tui.tui.conversation import Block, Kind, ToolFacts
from peri_tui.tui.theming import Palette

MARGIN: Final = 2
TEXT_WIDTH: Final = 100
LINE_CELLS: Final = 2000
MARKDOWN_CHARS: Final = 8192
RUNNING_LINES: Final = 3
FAILED_LINES: Final = 6
UNFOLDED_LINES: Final = 40
_MARKS: Final = re.compile(r"[*_`\[\]<>&\\~|]|^ {4}", re.MULTILINE)
_TOOL_WORDS: Final[dict[str, str]] = {
    "read_file": "read",
    "list_files": "list",
    "search": "search",
    "edit_file": "edit",
    "write_file": "write",
    "shell": "shell",
}
_STATUS: Final[dict[str, tuple[str, str]]] = {
    "running": ("●", "accent"),
    "ok": ("✓", "success"),
    "error": ("✗", "error"),
    "denied": ("⊘", "warning"),
    "cancelled": ("■", "muted"),
}
_TONES: Final[dict[str, str]] = {"ok": "success", "warn": "warning", "fail": "error"}


def draw(block: Block, width: int, palette: Palette, *, unfolded: bool = False) -> list[Strip]:
    """Return the lines of a block for a width in cells. Safe in any thread: reads the block once."""
    inner = max(8, min(width - 2 * MARGIN, TEXT_WIDTH))
    match block.kind:
        case Kind.USER:
            return _user(block.text, inner, palette)
        case Kind.MARKDOWN:
            return _piece(block.piece, inner, palette) if block.piece else []
        case Kind.TAIL:
            return _plain(block.text, inner, Style(color=palette.foreground))
        case Kind.THINKING:
            return _plain(block.text, inner, Style(color=palette.muted, italic=True))
        case Kind.TOOL:
            return _tool(block.tool, inner, palette, unfolded) if block.tool else []
        case Kind.NOTICE:
            colour = getattr(palette, _TONES.get(block.tone, "muted"))
            return _led("·", block.text, inner, colour, Style(color=palette.muted))
        case Kind.END:
            colour = getattr(palette, _TONES.get(block.tone, "muted"))
            return _led("■", block.text, inner, colour, Style(color=colour))


def wrap(text: str, width: int) -> list[str]:
    """Return cleaned text broken at blanks into lines of at most ``width`` cells; overlong lines say what was cut."""
    lines: list[str] = []
    for raw in clean(text).split("\n"):
        lines += _wrap_line(_bounded(raw.expandtabs(4)), width)
    return lines


def _bounded(line: str) -> str:
    if len(line) <= LINE_CELLS:
        return line
    return f"{line[:LINE_CELLS]} … {len(line) - LINE_CELLS:,} more characters"


def _wrap_line(line: str, width: int) -> list[str]:
    if len(line) <= width and cell_len(line) <= width:
        return [line]
    lines, current, used = [], "", 0
    for word in _words(line):
        cells = cell_len(word)
        if used + cells <= width or (not word.strip() and used <= width):
            current, used = current + word, used + cells
            continue
        if current.strip():
            lines.append(current.rstrip())
            current, used = "", 0
        pieces = chop_cells(word, width) if cells > width else [word]
        lines += pieces[:-1]
        current, used = pieces[-1], cell_len(pieces[-1])
    return [*lines, current.rstrip()]


def _words(line: str) -> Iterable[str]:
    start = 0
    for index in range(1, len(line)):
        if line[index] != " " and line[index - 1] == " ":
            yield line[start:index]
            start = index
    yield line[start:]


def _plain(text: str, width: int, style: Style) -> list[Strip]:
    body = text.rstrip("\n")
    return [_line((" " * MARGIN, None), (line, style)) for line in wrap(body, width)] if body.strip() else []


def _line(*parts: tuple[str, Style | None]) -> Strip:
    return Strip([Segment(text, style) for text, style in parts if text])


def _led(glyph: str, text: str, width: int, colour: str, style: Style) -> list[Strip]:
    first, *rest = wrap(text, width - 2) or [""]
    head = _line((" " * MARGIN, None), (f"{glyph} ", Style(color=colour, bold=True)), (first, style))
    return [head, *(_line((" " * (MARGIN + 2), None), (line, style)) for line in rest)]


def _user(text: str, width: int, palette: Palette) -> list[Strip]:
    style = Style(color=palette.user, bold=True)
    return _led("›", text, width, palette.accent, style)


def _tool(tool: ToolFacts, width: int, palette: Palette, unfolded: bool) -> list[Strip]:
    glyph, colour = _STATUS.get(tool.status, ("•", "muted"))
    name = _TOOL_WORDS.get(tool.name, clean(tool.name).replace("\n", " ")[:16])
    result = one_line(tool.result or _result(tool), 28)
    room = width - 2 - 8 - cell_len(result) - 2
    summary = one_line(tool.summary, max(8, room))
    gap = max(1, room - cell_len(summary) + 2)
    muted, tint = Style(color=palette.muted), Style(color=getattr(palette, colour))
    head = _line(
        (" " * MARGIN, None), (f"{glyph} ", tint), (f"{name:<7} ", muted),
        (summary, Style(color=palette.foreground)), (" " * gap, None), (result, muted),
    )  # fmt: skip
    return [head, *_output(tool, width, palette, unfolded)]


def _result(tool: ToolFacts) -> str:
    if tool.status == "cancelled":
        return "stopped"
    return tool.status if tool.status in ("denied", "error") else ""


def one_line(text: str, cells: int) -> str:
    """Return cleaned text on one line of at most ``cells`` cells; a cut is shown by an ellipsis."""
    line = " ".join(clean(text[: 8 * cells + 64]).split())
    if cell_len(line) <= cells:
        return line
    return (chop_cells(line, max(1, cells - 1)) or [""])[0] + "…"


def _output(tool: ToolFacts, width: int, palette: Palette, unfolded: bool) -> list[Strip]:
    count = {"running": RUNNING_LINES, "error": FAILED_LINES}.get(tool.status, 0)
    count = UNFOLDED_LINES if unfolded else count
    lines = [line for line in list(tool.output) if line.strip()]
    shown = lines[-count:] if count else []
    style = Style(color=palette.muted)
    strips = [_line((" " * (MARGIN + 10), None), (one_line(line, width - 10), style)) for line in shown]
    hidden = len(lines) - len(shown) + tool.cut
    if unfolded and hidden > 0:
        note = (f"… {hidden:,} lines above", Style(color=palette.muted, italic=True))
        strips.insert(0, _line((" " * (MARGIN + 10), None), note))
    return strips


# --- Markdown ----------------------------------------------------------------------------------------------------------


class _LeftHeading(Heading):
    """A heading without rich's box and centring."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _CalmMarkdown(Markdown):
    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "heading_open": _LeftHeading}


def _rich_theme(palette: Palette) -> RichTheme:
    heading = Style(color=palette.user, bold=True)
    return RichTheme(
        {
            "markdown.code": Style(color=palette.code),
            "markdown.code_block": Style(color=palette.code),
            "markdown.block_quote": Style(color=palette.muted),
            "markdown.item.bullet": Style(color=palette.accent),
            "markdown.item.number": Style(color=palette.accent),
            "markdown.link": Style(color=palette.accent),
            "markdown.link_url": Style(color=palette.muted),
            "markdown.hr": Style(color=palette.faint),
            "markdown.table.border": Style(color=palette.faint),
            "markdown.table.header": heading,
            **{f"markdown.h{level}": heading for level in range(1, 8)},
        }
    )


def _piece(piece: Piece, width: int, palette: Palette) -> list[Strip]:
    text = clean(piece.text)
    match piece.kind:
        case PieceKind.FENCE:
            return _code(text, piece.language, width, palette)
        case PieceKind.HEADING:
            return _plain(piece.text, width, Style(color=palette.user, bold=True))
        case PieceKind.RULE:
            return [_line((" " * MARGIN, None), ("─" * min(width, 24), Style(color=palette.faint)))]
        case PieceKind.PARAGRAPH if len(text) > MARKDOWN_CHARS or not _MARKS.search(text):
            # Most paragraphs have no marks at all: no parser is needed, and their lines stay as they were.
            return _plain(piece.text, width, Style(color=palette.foreground))
        case _:
            return _render(_CalmMarkdown(text, hyperlinks=False), width, palette)


def _code(text: str, language: str, width: int, palette: Palette) -> list[Strip]:
    lines = "\n".join(_bounded(line) for line in text.split("\n"))
    theme = "one-dark" if palette.dark else "friendly"
    name = language if language.isascii() and language.isprintable() else ""
    body = Syntax(lines, name or "text", theme=theme, word_wrap=True, background_color="default")
    bar = Segment("▏ ", Style(color=palette.faint))
    return [
        Strip([Segment(" " * MARGIN), bar, *list(strip)[1:]]) for strip in _render(body, width - 2, palette)
    ]


def _render(body: RenderableType, width: int, palette: Palette) -> list[Strip]:
    console = Console(
        file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True, legacy_windows=False,
        theme=_rich_theme(palette), markup=False, emoji=False, highlight=False, no_color=False,
    )  # fmt: skip
    base = Style(color=palette.foreground)
    lines = console.render_lines(body, console.options.update(width=width), style=base, pad=False)
    margin = Segment(" " * MARGIN)
    strips = [Strip([margin, *(Segment(part.text, _calm(part.style)) for part in line)]) for line in lines]
    while strips and not strips[-1].text.strip():
        strips.pop()
    while strips and not strips[0].text.strip():
        strips.pop(0)
    return strips


def _calm(style: Style | None) -> Style | None:
    """Return the style without link, meta and background.

    A link would become a terminal escape of the far side's choosing, and a background of the highlighter's would
    cut holes into ours.
    """
    if style is None:
        return None
    return Style(
        color=style.color,
        bold=style.bold,
        italic=style.italic,
        underline=style.underline,
        strike=style.strike,
    )
