"""What is shown of a command's output while it runs: decoded across the edges of chunks, no line without end.

Bytes that are not shown are never decoded. A line is cut at 4,096 characters: a widget that gets a line of a hundred
megabytes is a widget that hangs.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

LINE_CHARS: Final = 4096
_BREAKS: Final = re.compile("([\r\n])")


class ShownText:
    """Turns bytes into text for the screen.

    Args:
        width: characters of a line that are shown.
    """

    def __init__(self, width: int = LINE_CHARS) -> None:
        self._width = width
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._column = 0
        self._hidden = 0

    def feed(self, data: bytes, skipped: int = 0) -> str:
        """Return the text of the next bytes; ``skipped`` bytes before them are not given, which is said."""
        before = ""
        if skipped:
            before = f"{self._end_line()}\n[{skipped} bytes not shown]\n"
            # What began before the gap does not end after it.
            self._decoder.reset()
            self._column = 0
        return before + "".join(map(self._cut, _BREAKS.split(self._decoder.decode(data))))

    def _cut(self, piece: str) -> str:
        if piece in ("\n", "\r"):
            told = self._end_line()
            self._column = 0
            return told + piece
        shown = piece[: max(0, self._width - self._column)]
        self._column += len(shown)
        self._hidden += len(piece) - len(shown)
        return shown

    def _end_line(self) -> str:
        told = f" … [{self._hidden} characters of this line not shown]" if self._hidden else ""
        self._hidden = 0
        return told
