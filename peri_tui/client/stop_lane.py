"""The stop lane: a thread that can stop a task while everything else in the client is stuck.

The UI publishes in one attribute whom the next press belongs to (``aim``). The *input thread* calls ``press``: it
judges the press and writes the cancel to the lane's own connection itself, so that no thread hop lies between key and
wire. What may take time (connecting, acknowledgements, repeats, HTTP, the trace) is the lane thread's: see
``lane_courier``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from peri_tui.client.http_route import Post
from peri_tui.client.lane_courier import Ack, LaneCourier
from peri_tui.client.mint import fresh_id
from peri_tui.core.messages import Cancel
from peri_tui.core.stop_plan import Press, PressJudge
from peri_tui.log import Log

AimKind = Literal["none", "task", "dismiss"]

DISMISS_S: Final = 0.25
SETTLE_S: Final = 0.15
_HELD_NS: Final = 120_000_000
# The longest delay before a held key begins to repeat is a second.
_CHAIN_NS: Final = 1_100_000_000


@dataclass(frozen=True, slots=True)
class PressReport:
    """A press that became a cancel. ``sent``: the frame is in the kernel's hands; else the lane thread is at it."""

    press: Press
    task: str
    key: str
    t_mono: int
    request: str
    sent: bool


@dataclass(frozen=True, slots=True)
class _Aim:
    kind: AimKind
    task: str


@dataclass(frozen=True, slots=True)
class _Pressed:
    """A stop key and the task that it is for."""

    task: str
    key: str
    t_mono: int


class StopLane:
    """See the module. ``start`` it once; everything may be called from any thread.

    Args:
        socket_path: the agent's socket.
        log: trace and log files.
        on_press: called in the thread of ``press`` after the cancel was written; must not block.
        on_ack: called in the lane thread with the request's id and the agent's answer; must not block.
        post: sends a cancel over HTTP; ``net.post_cancel`` unless a test says otherwise.
        mono: monotonic nanoseconds.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        log: Log,
        on_press: Callable[[PressReport], None] | None = None,
        on_ack: Callable[[str, Ack], None] | None = None,
        post: Post | None = None,
        mono: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._log = log
        self._on_press = on_press
        self._mono = mono
        self._aim = _Aim("none", "")
        # Guards the judge, which both threads ask; never held while anything is sent.
        self._lock = threading.Lock()
        self._judge = PressJudge(settle=SETTLE_S)
        self._judged = ""
        self._waiting: _Pressed | None = None
        self._dismissal: _Pressed | None = None
        self._last_key: tuple[str, int] = ("", 0)
        self._chain = False
        self._courier = LaneCourier(
            socket_path, log, on_ack=on_ack, on_turn=self._judge_late, post=post, mono=mono
        )

    # --- called by the UI -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the lane thread; it connects at once."""
        self._courier.start()

    def close(self) -> None:
        """End the lane thread and its connection."""
        self._courier.close()

    def aim(self, kind: AimKind, task: str = "") -> None:
        """Publish whom the next press belongs to.

        Args:
            kind: ``task``: stop it. ``dismiss``: an overlay takes one Esc first. ``none``: nobody.
            task: the task that a press stops (for ``dismiss``: if the UI does not take the press in time).
        """
        self._aim = _Aim(kind, task)

    def taken(self) -> None:
        """Say that the UI took the last Esc for its overlay."""
        self._dismissal = None

    def retarget(self, socket_path: Path) -> None:
        """Go over to another agent; a cancel that is not acknowledged is sent to it."""
        self._courier.retarget(socket_path)

    def settled(self, task: str) -> None:
        """Say that the task ended: nothing more is sent for it, and the next press is a first one."""
        self._courier.settle(task)
        with self._lock:
            if self._judged == task:
                self._judged = ""
                self._waiting = None

    @property
    def connected(self) -> bool:
        """True while the lane's own connection is open."""
        return self._courier.connected

    # --- called in the input thread ---------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while a press would stop a task."""
        return bool(self._aim.task)

    def holds(self, key: str, t_mono: int) -> bool:
        """Tell whether this press is the auto-repeat of a key whose press was a stop."""
        last, at = self._last_key
        return self._chain and key == last and t_mono - at < _HELD_NS

    def press(self, key: str, t_mono: int, repeat: bool = False) -> bool:
        """Take a stop key; returns True if it belongs to the stop of a task.

        Args:
            key: its name.
            t_mono: monotonic nanoseconds of the press.
            repeat: the terminal says that it is an auto-repeat.
        """
        aim = self._aim
        self._follow(key, t_mono)
        if not aim.task:
            return False
        pressed = _Pressed(aim.task, key, t_mono)
        if aim.kind == "dismiss" and key == "escape":
            self._dismissal = pressed
            self._courier.wake()
            return False
        self._chain = True
        self._take(pressed, repeat)
        return True

    def _follow(self, key: str, t_mono: int) -> None:
        last, at = self._last_key
        self._last_key = (key, t_mono)
        if key != last or t_mono - at > _CHAIN_NS:
            self._chain = False

    def _take(self, pressed: _Pressed, repeat: bool = False) -> None:
        with self._lock:
            if self._judged != pressed.task:
                self._judge.reset()
                self._judged = pressed.task
            verdict = self._judge.press(pressed.t_mono / 1e9, repeat)
            self._waiting = pressed if verdict is Press.WAIT else None
        if verdict in (Press.STOP, Press.FORCE):
            self._launch(verdict, pressed)
        elif verdict is Press.WAIT:
            self._courier.wake()

    def _launch(self, verdict: Press, pressed: _Pressed) -> None:
        mode = "force" if verdict is Press.FORCE else "graceful"
        request = Cancel(id=fresh_id(), task=pressed.task, mode=mode, t_ui=pressed.t_mono)
        sent = self._courier.launch(request, pressed.key, pressed.t_mono)
        self._report(PressReport(verdict, pressed.task, pressed.key, pressed.t_mono, request.id, sent))
        # Only now: the lane thread writes files, and would compete with the first frame for the interpreter.
        self._courier.wake()

    def _report(self, report: PressReport) -> None:
        if self._on_press is None:
            return
        try:
            self._on_press(report)
        except Exception as error:
            # A loop that is closing must not take the input thread along.
            self._log.event("press report failed", layer=1, task=report.task, error=repr(error))

    # --- called in the lane thread ----------------------------------------------------------------------------------

    def _judge_late(self) -> float | None:
        """Judge what only time can tell; return the seconds until there is more to judge."""
        now = self._mono()
        dismissal = self._dismissal
        if dismissal is not None and now - dismissal.t_mono >= DISMISS_S * 1e9:
            self._dismissal = None
            self._log.event("overlay did not take the key", layer=1, task=dismissal.task)
            self._take(dismissal)
        with self._lock:
            waiting = self._waiting
            forced = waiting is not None and self._judge.settled(now / 1e9) is Press.FORCE
            if forced:
                self._waiting = None
        if forced and waiting is not None:
            self._launch(Press.FORCE, waiting)
        return self._next_judgement(now)

    def _next_judgement(self, now: int) -> float | None:
        dismissal, settles = self._dismissal, self._judge.settles_at
        waits = []
        if dismissal is not None:
            waits.append(DISMISS_S - (now - dismissal.t_mono) / 1e9)
        if settles is not None and self._waiting is not None:
            waits.append(settles - now / 1e9)
        return min(waits, default=None)
