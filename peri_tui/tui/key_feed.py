"""From bytes of the terminal to key messages, with the waits that a Stop key can afford.

An escape sequence and the Escape key begin with the same byte. Stock Textual waits 100 ms to tell them apart and only
looks every 100 ms. Here an ESC that ends a read is a key at once where sequences arrive in one piece, and the wait is
short and exact where they may be split (``escape_wait``).

Uses private names of Textual's parser (``_timeout_time``); a test pins them.
"""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from textual._parser import ParseError
from textual._time import get_time
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

ESC: Final = "\x1b"
REMOTE_WAIT_S: Final = 0.05
IDLE_SELECT_S: Final = 0.1
_PASTE_SILENCE_S: Final = 0.25
_CONTAINER_FILES: Final = ("/.dockerenv", "/run/.containerenv")

# ESC and a character in one read is Alt+character. While a task runs it counts as Esc and the character, or a fast
# typist loses the Stop; not so where the character opens a longer sequence (CSI, SS2, SS3, OSC, DCS, SOS, PM, APC), and
# not for the word keys that terminals send for Option+arrow, Option+Backspace and Alt+Enter.
_ALT: Final = re.compile(r"\x1b(?=[^\x00-\x1f\x7f\x80-\x9f\[NO\]PX^_bfd])")
# What a terminal answers to questions that we do not ask (a colour, its name). Textual would take it for Escape and
# typed text: a false stop, and words in the draft. Only an answer that came whole is taken out: ESC ] is also Alt+].
_REPORT: Final = re.compile(r"\x1b(?:\][0-9]{1,4};[^\x07\x1b]*(?:\x07|\x1b\\)|[P_^X][^\x07\x1b]*\x1b\\)")


class Step(Enum):
    """What to do between two pieces of input."""

    ESCAPE_IS_A_KEY = "the pending ESC is a key, wait no longer"


def escape_wait(environ: Mapping[str, str], piped_in: Callable[[], bool] | None = None) -> float:
    """Return the seconds to wait for the rest of a sequence after a lone ESC; 0 means not at all.

    ``ESCDELAY`` (milliseconds) wins. A multiplexer re-sends whole sequences. Over SSH, mosh or into a container the
    pieces may come apart by tens of milliseconds, and a false Stop would follow from a split arrow key.

    Args:
        environ: the environment.
        piped_in: tells whether the terminal is carried into a container from outside.
    """
    given = environ.get("ESCDELAY", "")
    if given.isdecimal():
        return int(given) / 1000
    if environ.get("TMUX") or environ.get("STY"):
        return 0.0
    if any(name.startswith(("SSH_", "MOSH")) for name in environ):
        return REMOTE_WAIT_S
    return REMOTE_WAIT_S if (piped_in or terminal_is_piped_in)() else 0.0


def terminal_is_piped_in() -> bool:
    """Tell whether this is a container whose terminal is carried in by the container's runtime.

    Then the leader of the terminal's session was started from outside: its parent has no number in here. A terminal
    made inside the container (a multiplexer, an IDE's server, a test) is as local as any.
    """
    if "container" not in os.environ and not any(Path(name).exists() for name in _CONTAINER_FILES):
        return False
    leader = os.getsid(0)
    try:
        fields = (
            Path(f"/proc/{leader}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return True
    return int(fields[1]) == 0


class InputLexer:
    """Cuts input into pieces for the parser: pastes made whole and harmless, Alt+character taken apart on demand."""

    def __init__(self) -> None:
        self._pasting = False
        self._held = ""
        self._tail = ""
        self._last = 0.0

    def split(self, data: str, *, now: float, running: bool) -> Iterator[str | Step]:
        """Yield the pieces of one read.

        Args:
            data: what was read, not empty.
            now: seconds, to see a paste that never ends.
            running: a task runs, so an Esc must not be lost.
        """
        if self._pasting and data in (ESC, "\x03") and now - self._last > _PASTE_SILENCE_S:
            # A paste that nobody closes must not swallow the Stop key.
            self._pasting, self._held = False, ""
            yield BRACKETED_PASTE_END
        self._last = now
        while data:
            if self._pasting:
                piece, data = self._take_paste(data)
                if piece:
                    yield piece
            else:
                piece, data = self._take_keys(data)
                if piece := _REPORT.sub("", piece):
                    yield from self._part(piece, running)

    def _take_keys(self, data: str) -> tuple[str, str]:
        joined = self._tail + data
        found = joined.find(BRACKETED_PASTE_START)
        if found < 0:
            self._tail = joined[-len(BRACKETED_PASTE_START) + 1 :]
            return data, ""
        end = found + len(BRACKETED_PASTE_START) - len(self._tail)
        self._tail, self._pasting = "", True
        return data[:end], data[end:]

    def _take_paste(self, data: str) -> tuple[str, str]:
        text = self._held + data
        found = text.find(BRACKETED_PASTE_END)
        if found >= 0:
            self._pasting, self._held = False, ""
            return text[:found].replace(ESC, "") + BRACKETED_PASTE_END, text[
                found + len(BRACKETED_PASTE_END) :
            ]
        keep = next(
            (n for n in range(len(BRACKETED_PASTE_END) - 1, 0, -1) if text.endswith(BRACKETED_PASTE_END[:n])),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep].replace(ESC, ""), ""

    @staticmethod
    def _part(piece: str, running: bool) -> Iterator[str | Step]:
        if not running:
            yield piece
            return
        start = 0
        for match in _ALT.finditer(piece):
            yield piece[start : match.end()]
            yield Step.ESCAPE_IS_A_KEY
            start = match.end()
        if start < len(piece):
            yield piece[start:]


class KeyFeed:
    """Bytes in, messages out; never raises for what a terminal sends.

    Args:
        wait: seconds to wait after a lone ESC (see ``escape_wait``).
        debug: Textual's key log.
    """

    def __init__(self, wait: float, *, debug: bool = False) -> None:
        self._wait = wait
        self._debug = debug
        self._parser = XTermParser(debug)
        self._lexer = InputLexer()
        # Bytes that are not UTF-8 must not end the app.
        self._decode = getincrementaldecoder("utf-8")(errors="replace").decode
        self._lone = False
        self.restarts = 0

    def take(self, data: bytes, *, more: Callable[[], bool], running: bool) -> Iterator[Message]:
        """Yield the messages of one read.

        Args:
            data: the bytes read.
            more: tells whether there is more to read at this moment.
            running: a task runs.
        """
        text = self._decode(data)
        if not text:
            return
        if running and self._lone and _ALT.match(ESC + text):
            yield from self._escape_is_a_key()
        for piece in self._lexer.split(text, now=get_time(), running=running):
            if isinstance(piece, Step):
                yield from self._escape_is_a_key()
            else:
                yield from self._feed(piece)
        yield from self._settle(text, more)

    def _settle(self, text: str, more: Callable[[], bool]) -> Iterator[Message]:
        self._lone = text.endswith(ESC) and self._parser._timeout_time is not None
        if not self._lone:
            return
        if self._wait > 0:
            self._parser._timeout_time = get_time() + self._wait
        elif not more():
            yield from self._escape_is_a_key()

    def tick(self) -> Iterator[Message]:
        """Yield what a passed deadline makes of the pending input."""
        yield from self._guarded(self._parser.tick)

    def timeout(self) -> float:
        """Return the seconds until ``tick`` has something to say, at most ``IDLE_SELECT_S``."""
        deadline = self._parser._timeout_time
        return IDLE_SELECT_S if deadline is None else min(IDLE_SELECT_S, max(0.0, deadline - get_time()))

    def close(self) -> None:
        """End the parser."""
        try:
            for _ in self._parser.feed(""):
                pass
        except (EOFError, ParseError):
            return

    def _escape_is_a_key(self) -> Iterator[Message]:
        self._lone = False
        if self._parser._timeout_time is not None:
            self._parser._timeout_time = 0.0
            yield from self.tick()

    def _feed(self, piece: str) -> Iterator[Message]:
        yield from self._guarded(lambda: self._parser.feed(piece))

    def _guarded(self, step: Callable[[], object]) -> Iterator[Message]:
        try:
            yield from step()  # type: ignore[misc]
        except Exception:
            # The parser's generator is dead after an error (a number out of range in a report, for one). The input
            # thread is the Stop key: it starts a new parser and goes on.
            self.restarts += 1
            self._parser = XTermParser(self._debug)
