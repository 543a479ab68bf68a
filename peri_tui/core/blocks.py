"""Splits a stream of Markdown into sealed blocks, which never change again, and an open tail.

A screen renders a sealed block once. So the cost of a stream is that of its tail, and the tail is bounded: a block
is sealed at 40 lines or 8,192 characters, whatever it is, and carries on as the next one (``continued``). Lines are
decided one by one, and only when they are whole, therefore the blocks do not depend on how the text was cut.

This reads what models write, not all of CommonMark: no nesting (a fence inside a list ends the list), a blank line
ends a list, indented code is a paragraph, reference definitions are text. Lines end with LF (see ``sanitize``).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_LINES: Final = 40
MAX_CHARS: Final = 8192

# Each of these is linear on any line: hostile text must not hold up a screen.
_HEADING: Final = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_FENCE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_LANGUAGE: Final = re.compile(r"[^\s{]*")
_RULE: Final = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*")
_UNDERLINE: Final = re.compile(r" {0,3}(=+|-{2,})[ \t]*")
_ITEM: Final = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])(?:[ \t].*|)")
_QUOTE: Final = re.compile(r" {0,3}>.*")
_ROW: Final = re.compile(r"[ \t]*\|.*")
_COLUMN: Final = re.compile(r"[ \t]*:?-+:?[ \t]*")


class Kind(StrEnum):
    """What a block is."""

    PARAGRAPH = "paragraph"
    HEADING = "heading"
    FENCE = "fence"
    LIST = "list"
    TABLE = "table"
    QUOTE = "quote"
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class Block:
    """One sealed piece.

    ``text`` is the source without a last line end: of a fence only the code, of a heading only the words.
    ``language`` belongs to fences, ``level`` (1 to 6) to headings. ``continued`` says that the block before is of
    the same construct and was sealed because it was long.
    """

    kind: Kind
    text: str
    language: str = ""
    level: int = 0
    continued: bool = False


@dataclass(slots=True)
class _Fence:
    indent: int
    mark: str
    language: str

    def closed_by(self, line: str) -> bool:
        bare = line.strip(" \t")
        return len(bare) >= len(self.mark) and not bare.strip(self.mark[0])

    def body(self, line: str) -> str:
        """Return a code line without the indentation that the fence itself has."""
        lead = len(line) - len(line.lstrip(" \t"))
        return line[min(lead, self.indent) :]


class BlockSplitter:
    """Takes text in pieces of any size, gives sealed blocks."""

    def __init__(self) -> None:
        self._partial = ""
        self._broken = False
        self._kind: Kind | None = None
        self._lines: list[str] = []
        self._chars = 0
        self._continued = False
        self._fence: _Fence | None = None
        self._sealed: list[Block] = []

    @property
    def tail(self) -> str:
        """The source of what is not sealed yet (of a fence only its code), at most two blocks long."""
        return "\n".join([*self._lines, self._partial])

    def feed(self, text: str) -> list[Block]:
        """Take the next piece; return the blocks that it sealed, in order."""
        first, *rest = text.split("\n")
        self._partial += first
        for line in rest:
            self._end_line()
            self._partial = line
            self._break_long_line()
        self._break_long_line()
        return self._take()

    def close(self) -> list[Block]:
        """End of the text: return what is left; the splitter is as new afterwards."""
        if self._partial or self._broken:
            self._end_line()
        self._seal()
        self._fence = None
        self._kind = None
        self._continued = False
        return self._take()

    def peek(self) -> list[Block]:
        """Return what ``close`` would, and change nothing: the blocks to show for the tail."""
        twin = copy.copy(self)
        twin._lines, twin._sealed = list(self._lines), []
        return twin.close()

    def _take(self) -> list[Block]:
        sealed, self._sealed = self._sealed, []
        return sealed

    # --- lines --------------------------------------------------------------------------------------------------

    def _break_long_line(self) -> None:
        while len(self._partial) > MAX_CHARS:
            head, self._partial = self._partial[:MAX_CHARS], self._partial[MAX_CHARS:]
            self._piece(head)
            self._broken = True

    def _end_line(self) -> None:
        self._break_long_line()
        line, self._partial = self._partial, ""
        self._piece(line)
        self._broken = False

    def _piece(self, line: str) -> None:
        if self._broken:
            # The rest of a line that was too long: it goes on with what the line was, it starts nothing.
            self._kind = self._kind or Kind.PARAGRAPH
            self._add(line)
        elif self._fence is not None:
            self._code(self._fence, line)
        else:
            self._prose(line)

    def _code(self, fence: _Fence, line: str) -> None:
        if not fence.closed_by(line):
            self._add(fence.body(line))
            return
        self._seal(even_empty=True)
        self._fence, self._kind, self._continued = None, None, False

    def _prose(self, line: str) -> None:
        if not line.strip():
            self._end_block()
        elif not (self._start_fence(line) or self._single(line) or self._underline(line)):
            self._flow(line)

    def _start_fence(self, line: str) -> bool:
        match = _FENCE.fullmatch(line)
        if match is None or (match[2][0] == "`" and "`" in match[3]):
            return False
        self._end_block()
        self._kind = Kind.FENCE
        language = _LANGUAGE.match(match[3].strip())
        self._fence = _Fence(len(match[1]), match[2], language[0].lower() if language else "")
        return True

    def _single(self, line: str) -> bool:
        """Headings, and rules that do not underline a paragraph: blocks of one line."""
        if match := _HEADING.match(line):
            self._end_block()
            self._sealed.append(Block(Kind.HEADING, _title(line[match.end() :]), level=len(match[1])))
            return True
        if _RULE.fullmatch(line) and not (self._kind is Kind.PARAGRAPH and _UNDERLINE.fullmatch(line)):
            self._end_block()
            self._sealed.append(Block(Kind.RULE, line.strip()))
            return True
        return False

    def _underline(self, line: str) -> bool:
        """What makes of the paragraph before it something else: a heading, or the head of a table."""
        if self._kind is not Kind.PARAGRAPH or not self._lines:
            return False
        if "|" in line and "|" in self._lines[-1] and _is_table_rule(line):
            head = self._lines.pop()
            self._chars -= len(head) + 1
            self._end_block()
            self._kind = Kind.TABLE
            self._add(head)
            self._add(line)
            return True
        if match := _UNDERLINE.fullmatch(line):
            text = "\n".join(part.strip() for part in self._lines)
            self._sealed.append(Block(Kind.HEADING, text, level=1 if match[1][0] == "=" else 2))
            self._reset()
            return True
        return False

    def _flow(self, line: str) -> None:
        kind = self._kind_of(line)
        if kind is not self._kind:
            self._end_block()
            self._kind = kind
        self._add(line)

    def _kind_of(self, line: str) -> Kind:
        inside_list = self._kind is Kind.LIST and line[0] in " \t"
        if inside_list or _ITEM.fullmatch(line):
            return Kind.LIST
        if _QUOTE.fullmatch(line):
            return Kind.QUOTE
        if _ROW.fullmatch(line) or (self._kind is Kind.TABLE and "|" in line):
            return Kind.TABLE
        # A line without a mark of its own carries on the list item or the quote before it.
        return self._kind if self._kind in (Kind.LIST, Kind.QUOTE) else Kind.PARAGRAPH

    # --- blocks -------------------------------------------------------------------------------------------------

    def _add(self, line: str) -> None:
        if self._lines and (len(self._lines) >= MAX_LINES or self._chars + len(line) > MAX_CHARS):
            self._seal()
            self._continued = True
        self._lines.append(line)
        self._chars += len(line) + 1

    def _seal(self, *, even_empty: bool = False) -> None:
        if self._kind is not None and (self._lines or even_empty):
            language = self._fence.language if self._fence is not None else ""
            text = "\n".join(self._lines)
            self._sealed.append(Block(self._kind, text, language=language, continued=self._continued))
        self._lines = []
        self._chars = 0

    def _end_block(self) -> None:
        self._seal()
        self._reset()

    def _reset(self) -> None:
        self._kind, self._lines, self._chars, self._continued = None, [], 0, False


def _title(rest: str) -> str:
    """Return the words of a heading; hashes at its end are decoration if a blank stands before them."""
    words = rest.strip(" \t")
    bare = words.rstrip("#")
    return bare.rstrip(" \t") if not bare or bare[-1] in " \t" else words


def _is_table_rule(line: str) -> bool:
    inner = line.strip(" \t").removeprefix("|").removesuffix("|")
    return all(_COLUMN.fullmatch(cell) for cell in inner.split("|"))
