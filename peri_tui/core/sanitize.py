"""Cleans text of models, tools, files and repositories before it meets a terminal.

Works per code point, without looking for escape sequences: what has lost its ESC and C1 bytes is only letters, so
there is no unterminated sequence to miss and no state across the pieces of a stream. ``clean`` is for prose,
``reveal`` for what the user decides on (commands, paths, diffs, questions): there nothing may hide.

Three rules look at neighbours, all for looks and none for safety: CR LF becomes LF in prose, a joiner stays only
between what it joins, and a base carries at most ``MARKS_MAX`` marks. A text that is cut between such neighbours
may therefore look different from the whole, but no piece ever holds a control character, and for text without
CR, joiners and marks ``clean(a + b) == clean(a) + clean(b)`` holds everywhere.

Source of the tables: Unicode 15 (Cc, Cf, default ignorable code points); the bidi controls are those of "Trojan
Source" (Boucher and Anderson, 2021).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import accumulate, takewhile
from typing import Final

MARKS_MAX: Final = 8
ELLIPSIS: Final = "…"

_SEPARATORS = "\u0085\u2028\u2029"
# Soft hyphen, Arabic letter mark, Hangul fillers, Mongolian separator, zero width, bidi, invisible operators,
# annotations, musical controls, tags and the variation selectors beyond U+FE0F.
_HIDDEN = "\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
_HIDDEN_ASTRAL = "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
_NON_CHARACTERS = "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"
_NON_CHARACTERS_ASTRAL = "".join(
    f"{chr(plane << 16 | 0xFFFE)}-{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 17)
)
_ASTRAL = "\U00010000-\U0010ffff"
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_JOINERS = "\u200c\u200d"
# What a joiner may stand between: symbols and pictures with their modifiers, and scripts that write with joiners.
_EMOJI = "\u00a9\u00ae\u2190-\u2bff\u3030\u303d\u3297\u3299\ufe0f\U0001f000-\U0001faff"
_JOINED_SCRIPTS = "\u0600-\u061b\u061d-\u08ff\u0900-\u109f\u1780-\u180d\u1810-\u18af\ua840-\uabff"

_ASCII_BAD: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_BAD_BASIC = f"{_CONTROLS}{_SEPARATORS}{_HIDDEN}{_NON_CHARACTERS}"
_BAD: Final = re.compile(f"[{_BAD_BASIC}{_HIDDEN_ASTRAL}{_NON_CHARACTERS_ASTRAL}]")
# A class of the basic plane is one bitmap, each range beyond it one more comparison a character: so most texts are
# asked first whether they hold anything that may be bad (ten times faster, measured).
_MAYBE_BAD: Final = re.compile(f"[{_BAD_BASIC}{_ASTRAL}]")
_HIDES: Final = re.compile(f"[{_HIDDEN}{_HIDDEN_ASTRAL}]")
_JOINER: Final = re.compile(f"[{_JOINERS}]")
_LOOSE_JOINER: Final = re.compile(
    f"(?<![{_EMOJI}{_JOINED_SCRIPTS}])[{_JOINERS}]|[{_JOINERS}](?![{_EMOJI}{_JOINED_SCRIPTS}])"
)


def clean(text: str) -> str:
    """Return ``text`` fit for prose: no control but TAB and LF, nothing hidden, valid Unicode.

    Controls become visible (``␛``, ``<9B>``), line separators and CR LF become LF, lone surrogates and
    noncharacters U+FFFD; bidi and zero-width controls, tags and loose joiners are dropped (``count_hidden``).
    """
    if text.isascii():
        return _ASCII_BAD.sub(_plain, text.replace("\r\n", "\n")) if _ASCII_BAD.search(text) else text
    if _MAYBE_BAD.search(text):
        text = _BAD.sub(_plain, text.replace("\r\n", "\n"))
    return _neighbours(text, _drop)


def reveal(text: str) -> str:
    """Return ``text`` with everything in it visible, for commands, paths, diffs and questions.

    As ``clean``, but what ``clean`` drops or takes for a line end is shown (``<U+202E>``, ``␍``): of the lines only
    LF makes one, as it does for a shell.
    """
    if text.isascii():
        return _ASCII_BAD.sub(_visible, text)
    if _MAYBE_BAD.search(text):
        text = _BAD.sub(_visible, text)
    return _neighbours(text, _show)


def count_hidden(text: str) -> int:
    """Return how many code points of ``text`` ``clean`` drops."""
    if text.isascii():
        return 0
    if _MAYBE_BAD.search(text):
        dropped = len(_HIDES.findall(text))
        text = _BAD.sub(_plain, text)
    else:
        dropped = 0

    def count(chars: str) -> str:
        nonlocal dropped
        dropped += len(chars)
        return ""

    _neighbours(text, count)
    return dropped


def cells(text: str) -> int:
    """Return how many terminal cells ``text`` takes (no controls in it): 2 for wide, 0 for marks and joiners."""
    if text.isascii():
        return len(text)
    return sum(_width(char) for char in text)


def one_line(text: str, width: int) -> str:
    """Return ``reveal(text)`` on one line of at most ``width`` cells.

    Line ends and tabs become ``␊`` and ``␉``. A cut is never silent: it ends in ``…`` and how many characters are
    not shown (``… +120``); where not even that fits, in ``…``.
    """
    line = reveal(text).replace("\n", "␊").replace("\t", "␉")
    if cells(line) <= width:
        return line
    if width <= 0:
        return ""
    kept = _fit(line, width)
    while kept:
        mark = f"{ELLIPSIS} +{len(line) - kept}"
        if cells(line[:kept]) + len(mark) <= width:
            return line[:kept] + mark
        kept -= 1
    mark = f"{ELLIPSIS} +{len(line)}"
    return mark if len(mark) <= width else ELLIPSIS


def _fit(line: str, width: int) -> int:
    """Return how many characters from the start fit into ``width`` cells."""
    ends = accumulate(map(_width, line))
    return sum(1 for _ in takewhile(lambda end: end <= width, ends))


def _width(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _plain(match: re.Match[str]) -> str:
    char = match[0]
    if char in _SEPARATORS:
        return "\n"
    return "" if _HIDES.match(char) else _control(char)


def _visible(match: re.Match[str]) -> str:
    char = match[0]
    if char in "\u2028\u2029" or _HIDES.match(char):
        return _name(char)
    return _control(char)


def _control(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"<{code:02X}>" if code < 0xA0 else "\ufffd"


def _name(char: str) -> str:
    return f"<U+{ord(char):04X}>"


def _drop(chars: str) -> str:
    return ""


def _show(chars: str) -> str:
    return "".join(map(_name, chars))


def _neighbours(text: str, replace: Callable[[str], str]) -> str:
    # Joiners count as marks first and are judged by their neighbours last, so that a second pass finds nothing.
    maybe, many = _many_marks()
    if maybe.search(text):
        text = many.sub(lambda match: match[0][:MARKS_MAX] + replace(match[0][MARKS_MAX:]), text)
    return _LOOSE_JOINER.sub(lambda match: replace(match[0]), text) if _JOINER.search(text) else text


@cache
def _many_marks() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Match what may be, and what is, a row of more than ``MARKS_MAX`` marks.

    Built at the first text that is not ASCII.
    """
    marks = [code for code in range(0x300, 0x1F000) if unicodedata.category(chr(code)) in ("Mn", "Me")]
    basic = _ranges([code for code in marks if code < 0x10000])
    row = f"{{{MARKS_MAX + 1},}}"
    return re.compile(f"[{basic}{_JOINERS}{_ASTRAL}]{row}"), re.compile(f"[{_ranges(marks)}{_JOINERS}]{row}")


def _ranges(codes: list[int]) -> str:
    parts, start = [], codes[0]
    for code, after in zip(codes, [*codes[1:], -1], strict=True):
        if after != code + 1:
            parts.append(f"{chr(start)}-{chr(code)}")
            start = after
    return "".join(parts)
