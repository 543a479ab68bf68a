"""Text files as bytes: which encoding, and a replacement that changes nothing but the changed span.

The model writes line feeds; files hold CRLF, CR, both, a byte order mark, UTF-16 or Latin-1. So the text to be
replaced is looked for with all line ends alike, the span found is mapped back to the file's own characters, what old
and new text have in common at both ends is left alone, and new lines get the line end that stands nearest.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from peri_tui.errors import ToolError

_BREAK: Final = re.compile("\r\n|\r")
_ANY_BREAK: Final = re.compile("\r\n|\r|\n")
_BINARY: Final = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f]")
# UTF-32's mark begins with UTF-16's, so it comes first.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file's characters, and how they stand on disk. ``encode`` of an unchanged text gives the same bytes."""

    text: str
    encoding: str = "utf-8"
    mark: bytes = b""

    def encode(self, text: str) -> bytes:
        """Return ``text`` as bytes in this file's encoding, with its mark.

        Raises:
            ToolError: the encoding has no such character.
        """
        try:
            return self.mark + text.encode(self.encoding)
        except UnicodeEncodeError as error:
            lost = error.object[error.start : error.start + 1]
            raise ToolError(f"the file is {self.encoding}, which cannot hold {lost!r}") from None

    @property
    def line_end(self) -> str:
        """The line end that all lines have; "" where they differ or there is none."""
        ends = set(_ANY_BREAK.findall(self.text))
        return ends.pop() if len(ends) == 1 else ""


def decode(data: bytes, path: str) -> TextFile:
    """Return the text of a file.

    Raises:
        ToolError: it is binary; names ``path``.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _exact(data, mark, encoding, path)
    try:
        file = TextFile(data.decode("utf-8"))
    except UnicodeDecodeError:
        file = TextFile(data.decode("latin-1"), "latin-1")
    limit = _BINARY if file.encoding == "latin-1" else re.compile("\x00")
    if limit.search(file.text):
        raise ToolError(f"{path}: a binary file, not text ({len(data)} bytes)")
    return file


def _exact(data: bytes, mark: bytes, encoding: str, path: str) -> TextFile:
    try:
        file = TextFile(data[len(mark) :].decode(encoding), encoding, mark)
        if file.encode(file.text) == data:
            return file
    except UnicodeDecodeError:
        pass
    raise ToolError(f"{path}: begins like {encoding} text but is not; a binary file")


def unify(text: str) -> str:
    """Return ``text`` with every line end as a line feed: what the model reads and writes."""
    return _BREAK.sub("\n", text)


def replace(file: TextFile, old: str, new: str, *, every: bool, path: str) -> bytes:
    """Return the file's bytes with ``old`` replaced by ``new``; every other byte is the same.

    Args:
        file: the file as it stands.
        old: what is to be replaced, exact but for the kind of line ends.
        new: what comes in its place.
        every: all occurrences; else there must be exactly one.
        path: for messages.

    Raises:
        ToolError: nothing to change, not found, found more than once, or not encodable.
    """
    old, new = unify(old), unify(new)
    if not old:
        raise ToolError(f"{path}: 'old' is empty; use write_file to make a file")
    if old == new:
        raise ToolError(f"{path}: 'old' and 'new' are the same, nothing to change")
    lines = _Unified(file.text)
    spots = lines.find(old)
    if not spots:
        raise ToolError(f"{path}: 'old' was not found{_hint(lines.text, old)}")
    if len(spots) > 1 and not every:
        raise ToolError(f"{path}: 'old' was found {len(spots)} times; give more context, or set 'all'")
    return file.encode(_splice(lines, spots, old, new))


def _splice(lines: _Unified, spots: list[int], old: str, new: str) -> str:
    head, tail = _common(old, new)
    pieces, done = [], 0
    for spot in spots:
        start, end = lines.back(spot + head), lines.back(spot + len(old) - tail)
        pieces.append(lines.raw[done:start])
        pieces.append(new[head : len(new) - tail].replace("\n", lines.end_near(start, end)))
        done = end
    return "".join([*pieces, lines.raw[done:]])


class _Unified:
    """A text with all line ends alike, and the way back to the characters of the file."""

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.text = unify(raw)
        self._pairs = [found.start() - n for n, found in enumerate(re.finditer("\r\n", raw))]

    def back(self, index: int) -> int:
        """Return the index in the file of an index in ``text``."""
        return index + bisect_left(self._pairs, index)

    def find(self, wanted: str) -> list[int]:
        """Return where ``wanted`` stands in ``text``, without overlaps."""
        spots, at = [], self.text.find(wanted)
        while at >= 0:
            spots.append(at)
            at = self.text.find(wanted, at + len(wanted))
        return spots

    def end_near(self, start: int, end: int) -> str:
        """Return the line end inside the span, else the one before it, else the one after it, else a line feed."""
        inside = _ANY_BREAK.search(self.raw, start, end)
        if inside:
            return inside.group()
        for at in (max(self.raw.rfind("\n", 0, start), self.raw.rfind("\r", 0, start)), -1):
            if at >= 0:
                pair = self.raw[at] == "\n" and at > 0 and self.raw[at - 1] == "\r"
                return "\r\n" if pair else self.raw[at]
        after = _ANY_BREAK.search(self.raw, end)
        return after.group() if after else "\n"


def _common(old: str, new: str) -> tuple[int, int]:
    shorter = min(len(old), len(new))
    head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    left = shorter - head
    tail = next((i for i in range(left) if old[-1 - i] != new[-1 - i]), left)
    return head, tail


def _hint(text: str, old: str) -> str:
    squeezed = " ".join(old.split())
    if squeezed and squeezed in " ".join(text.split()):
        return ": the words are there, but the white space differs"
    return "; read the file again"
