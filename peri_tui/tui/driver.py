"""The terminal driver: keys reach the stop lane before the app, and output can never block the loop.

* Input: the wait after an ESC follows the parser's own deadline (``key_feed``). Esc and Ctrl+C are handed to the stop
  lane in the input thread, before the app gets its message, so that a blocked event loop cannot stop a stop.
* Output: stock Textual blocks the loop after 30 queued writes when the terminal is stalled (a paused pane, a dead
  SSH). Here a frame that does not fit is dropped whole, and once the terminal takes output again the screen is
  painted in full.

Private names of Textual 8.2 are used (``_writer_thread``, its ``_queue``, ``_loop``); a test pins them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import sys
import time
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast

from textual import events
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual.app import ScreenStackError
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.message import Message

from peri_tui.tui.counted_output import CountedOutput
from peri_tui.tui.key_feed import KeyFeed, escape_wait

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_KEYS: Final = frozenset({"escape", "ctrl+c"})
SWITCH_PATIENCE_S: Final = 1.0
_DRAINED: Final = 2
_DRAIN_CHECK_S: Final = 0.05
_READ: Final = 4096


class StopKeys(Protocol):
    """What the driver needs of the stop lane; all of it is called in the input thread."""

    def press(self, key: str, t_mono: int, repeat: bool = False) -> bool:
        """Take a stop key pressed at ``t_mono`` (monotonic ns); True if it belonged to a stop."""
        ...

    def holds(self, key: str, t_mono: int) -> bool:
        """Tell whether this is the auto-repeat of a press that was taken."""
        ...

    @property
    def running(self) -> bool:
        """True while the next press would stop a task."""
        ...


class StopTap:
    """Input half, mixed into a driver: the tap on the key stream."""

    lane: ClassVar[StopKeys | None] = None
    _read_at: int = 0

    def tap(self, message: Message) -> bool:
        """Hand a stop key to the lane; False when the app must not see it (a held key repeats itself)."""
        lane = self.lane
        if lane is None or not isinstance(message, events.Key) or message.key not in STOP_KEYS:
            return True
        at = self._read_at or time.monotonic_ns()
        held = lane.holds(message.key, at)
        lane.press(message.key, at, repeat=held)
        return not held

    def run_input(
        self, fd: int, ended: Callable[[], bool], handle: Callable[[Message], None], feed: KeyFeed
    ) -> None:
        """Read the terminal until ``ended``; each message goes to ``handle`` in this thread."""
        with selectors.SelectSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not ended():
                if selector.select(feed.timeout()) and not self._read(fd, selector, handle, feed):
                    time.sleep(0.1)
                for message in feed.tick():
                    handle(message)
            selector.unregister(fd)
        feed.close()

    def _read(
        self, fd: int, selector: selectors.BaseSelector, handle: Callable[[Message], None], feed: KeyFeed
    ) -> bool:
        try:
            data = os.read(fd, _READ)
        except OSError:
            # The terminal hung up; SIGHUP tells the rest of the process.
            return False
        self._read_at = time.monotonic_ns()
        running = self.lane is not None and self.lane.running
        for message in feed.take(data, more=lambda: bool(selector.select(0)), running=running):
            handle(message)
        return bool(data)


class PeriDriver(StopTap, LinuxDriver):
    """Textual's Linux driver with the tap and the gate.

    Attributes:
        frames_dropped: frames that a stalled terminal did not get.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.frames_dropped = 0
        self._frame: list[str] | None = None
        self._owing = False
        self._output = CountedOutput(cast("IO[str]", self._file))
        # While the terminal's modes are switched, writes wait a little instead of being dropped.
        self._patient_until = 0.0

    # --- input ------------------------------------------------------------------------------------------------------

    def run_input_thread(self) -> None:
        """Read keys until the driver ends."""
        feed = KeyFeed(escape_wait(os.environ), debug=self._debug)
        self.run_input(self.fileno, self.exit_event.is_set, self.process_message, feed)

    def process_message(self, message: Message) -> None:
        """Tap a message, then pass it to the app."""
        if self.tap(message):
            super().process_message(message)

    def follow_size(self, drawn: Size) -> None:
        """Tell the app the terminal's size when it draws for another one.

        Signals of a window that is dragged merge, and one that comes while the app lays out can get lost.

        Args:
            drawn: the size of the screen as it is laid out.
        """
        size = Size(*self._get_terminal_size())
        if size != drawn and not self._in_band_window_resize:
            self.process_message(events.Resize(size, size))

    # --- output -----------------------------------------------------------------------------------------------------

    def write(self, data: str) -> None:
        """Queue output; never blocks. What belongs to one synchronised frame is queued as one piece."""
        if data == SYNC_START:
            self._frame = [data]
        elif self._frame is None:
            self._put(data)
        else:
            self._frame.append(data)
            if data == SYNC_END:
                whole, self._frame = "".join(self._frame), None
                self._put(whole)

    def paint(self, data: str) -> bool:
        """Queue output from any thread, only if there is room; for the first *Stopping* after a press."""
        writer = self._writer_thread
        if writer is None or self._owing:
            return False
        self._output.noted()
        try:
            writer._queue.put_nowait(data)
        except queue.Full:
            self._output.withdrawn()
            return False
        return True

    def when_shown(self, call: Callable[[], None]) -> None:
        """Call back in the loop once the terminal has taken every frame so far.

        While frames were dropped and the screen was not painted in full again, nothing is called: ask again later.
        """
        if not self._owing:
            self._output.when_flushed(lambda: self._in_loop(call))

    def _in_loop(self, call: Callable[[], None]) -> None:
        # The loop may be closed while the last frame is still on its way.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _put(self, data: str) -> None:
        writer = self._writer_thread
        if writer is None:
            return
        patience = self._patient_until - time.monotonic()
        if self._owing and patience <= 0:
            self.frames_dropped += 1
            return
        self._output.noted()
        try:
            writer._queue.put(data, block=patience > 0, timeout=max(patience, 0.001))
        except queue.Full:
            self._output.withdrawn()
            self._drop()

    def _drop(self) -> None:
        self.frames_dropped += 1
        if not self._owing:
            self._owing = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._repay)

    def _repay(self) -> None:
        writer = self._writer_thread
        if writer is None or not self._app._running:
            return
        if writer._queue.qsize() > _DRAINED:
            self._loop.call_later(_DRAIN_CHECK_S, self._repay)
            return
        self._owing = False
        # Without regions, a refresh marks the whole screen, so that every cell is written again.
        with contextlib.suppress(ScreenStackError):
            self._app.screen.refresh(repaint=True)

    def start_application_mode(self) -> None:
        """Enter the alternate screen and start the threads."""
        self._patient_until = time.monotonic() + SWITCH_PATIENCE_S
        # The writer thread, which the base class starts, takes the file from here.
        self._output = CountedOutput(cast("IO[str]", sys.__stderr__))
        self._file = cast("Any", self._output)
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._patient_until = 0.0

    def stop_application_mode(self) -> None:
        """Leave the alternate screen; gives up on a terminal that takes nothing."""
        self._patient_until = time.monotonic() + SWITCH_PATIENCE_S
        super().stop_application_mode()

    def close(self) -> None:
        """End the writer; one that hangs in a dead terminal is a daemon and is left behind."""
        writer, self._writer_thread = self._writer_thread, None
        if writer is not None:
            with contextlib.suppress(queue.Full):
                writer._queue.put(None, timeout=SWITCH_PATIENCE_S / 2)
                writer.join(SWITCH_PATIENCE_S / 2)
        self._owing = False
        self._patient_until = 0.0


def make_driver_class(lane: StopKeys | None) -> type[PeriDriver]:
    """Return a driver class (for ``App(driver_class=…)``) whose stop keys go to ``lane``."""
    return type("PeriDriver", (PeriDriver,), {"lane": lane})
