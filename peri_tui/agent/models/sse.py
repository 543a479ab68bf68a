"""Server-sent events from bytes, as the WHATWG's HTML standard (section "Server-sent events") frames them.

Lines are split at CR, LF and CRLF only, in bytes, before anything is decoded: text readers also split at U+2028 or
U+0085, which are legal inside JSON, and would break it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from peri_tui.errors import ModelProtocolError

MAX_LINE: Final = 8 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event: its type (``message`` where none was named), its data lines joined with LF, the last id seen."""

    event: str
    data: str
    id: str


class SseReader:
    """Reads a stream piece by piece; pieces may end anywhere, also inside a character or between CR and LF.

    Args:
        max_line: the longest line, and the most data of one event, in bytes.
    """

    def __init__(self, *, max_line: int = MAX_LINE) -> None:
        self.comments = 0
        self._max_line = max_line
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._first_line = True
        self._after_cr = False
        self._event = ""
        self._data: list[str] = []
        self._data_size = 0
        self._id = ""

    def feed(self, piece: bytes) -> Iterator[SseEvent]:
        """Yield the events that ``piece`` completes. An event without its closing blank line is never yielded.

        Raises:
            ModelProtocolError: a line, or the data of one event, is longer than ``max_line``.
        """
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if piece:
            self._after_cr = piece.endswith(b"\r")
        # bytes.splitlines knows CR, LF and CRLF and nothing else.
        for line in piece.splitlines(keepends=True):
            self._partial_size += len(line)
            if self._partial_size > self._max_line:
                raise ModelProtocolError(f"model server: a line of more than {self._max_line} bytes")
            self._partial.append(line)
            if line.endswith((b"\n", b"\r")):
                whole = b"".join(self._partial).rstrip(b"\r\n")
                self._partial.clear()
                self._partial_size = 0
                event = self._take(whole)
                if event is not None:
                    yield event

    def _take(self, line: bytes) -> SseEvent | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        if line.startswith(b":"):
            self.comments += 1
            return None
        name, _, value = line.partition(b":")
        self._set(name, value.removeprefix(b" ").decode("utf-8", "replace"))
        return None

    def _set(self, name: bytes, value: str) -> None:
        if name == b"data":
            self._data_size += len(value) + 1
            if self._data_size > self._max_line:
                raise ModelProtocolError(f"model server: an event of more than {self._max_line} bytes")
            self._data.append(value)
        elif name == b"event":
            self._event = value
        elif name == b"id" and "\0" not in value:
            self._id = value

    def _dispatch(self) -> SseEvent | None:
        event, data = self._event or "message", self._data
        self._event, self._data, self._data_size = "", [], 0
        return SseEvent(event, "\n".join(data), self._id) if data else None
