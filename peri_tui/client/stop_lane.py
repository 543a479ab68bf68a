"""The stop lane: a thread that can stop a task while everything else in the client is stuck.

It holds one synchronous control connection of its own, without an event loop. The UI publishes in one attribute whom
the next press belongs to (``aim``). The *input thread* calls ``press``: it judges the press and writes the cancel to
the socket itself, so that no thread hop lies between key and wire. The lane thread does all that may take time: it
connects ahead, answers heartbeats, waits for the acknowledgement, repeats, goes over to HTTP, writes the trace.

The lane shows no token: a process of the same user may stop, and must not be taken for a TUI that adopts the agent.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from peri_tui.client.http_route import Post, cancel_over_http
from peri_tui.client.lane_link import LaneLink
from peri_tui.client.mint import fresh_id
from peri_tui.core.backoff import delays
from peri_tui.core.messages import (
    PROTOCOL,
    Cancel,
    CancelAccepted,
    CancelNoop,
    Failure,
    Heartbeat,
    Hello,
    MalformedFrame,
    decode_from_agent,
    encode,
)
from peri_tui.core.stop_plan import Action, Heard, Press, PressJudge, Step, StopPlan
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log

AimKind = Literal["none", "task", "dismiss"]
Ack = CancelAccepted | CancelNoop

DISMISS_S: Final = 0.25
SETTLE_S: Final = 0.15
HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 5.0
HTTP_TIMEOUT_S: Final = 1.0
FRESH_FROM_ATTEMPT: Final = 3
_HELD_NS: Final = 120_000_000
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
class _Dismissal:
    """An Esc that belongs to an overlay, unless the UI does not take it in time."""

    task: str
    key: str
    t_mono: int


@dataclass(slots=True)
class _Flight:
    """One cancel on its way to an acknowledgement."""

    request: Cancel
    key: str
    pressed: int
    plan: StopPlan
    taken: list[Step] = field(default_factory=list)
    # Repeats count from the first write, which for a force comes later than the press.
    began: int = 0
    sent_at: int = 0
    ready: bool = False
    acked: bool = False
    said: bool = False

    def next(self) -> Step | None:
        return None if self.acked else self.plan.next(self.taken, Heard())

    def wait(self, now: int) -> float | None:
        step = self.next()
        if not self.ready:
            return None
        return None if step is None else max(0.0, step.at_ms / 1e3 - (now - self.began) / 1e9)


class StopLane:
    """See the module. ``start`` it once; ``press`` and ``aim`` may be called from any thread.

    Args:
        socket_path: the agent's socket.
        log: trace and log files.
        on_press: called in the thread of ``press`` after the cancel was written; must not block.
        on_ack: called in the lane thread with the press and the agent's answer; must not block.
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
        self._path = socket_path
        self._log = log
        self._on_press = on_press
        self._on_ack = on_ack
        self._post = post
        self._mono = mono
        self._aim: _Aim = _Aim("none", "")
        self._judge = PressJudge(settle=SETTLE_S)
        self._judged = ""
        self._lock = threading.Lock()
        self._dismissal: _Dismissal | None = None
        self._waiting: _Dismissal | None = None
        self._flights: dict[str, _Flight] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._link: LaneLink | None = None
        self._last_key: tuple[str, int] = ("", 0)
        self._chain = False
        self._stale = False
        self._heard = self._beat = 0
        self._retry_at = 0
        self._delays = delays(random=random.random)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peri-stop-lane", daemon=True)

    # --- called by the UI -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the lane thread; it connects at once."""
        self._thread.start()

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
        self._path = socket_path
        self._stale = True
        self._wake()

    def settled(self, task: str) -> None:
        """Say that the task ended: nothing more is sent for it, and the next press is a first one."""
        with self._lock:
            self._flights = {key: value for key, value in self._flights.items() if value.request.task != task}
            if self._judged == task:
                self._judged = ""

    def close(self) -> None:
        """End the lane thread and its connection."""
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    # --- called in the input thread ---------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while a press would stop a task."""
        return bool(self._aim.task)

    @property
    def connected(self) -> bool:
        """True while the lane's own connection is open."""
        link = self._link
        return link is not None and link.usable

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
        if aim.kind == "dismiss" and key == "escape":
            self._dismissal = _Dismissal(aim.task, key, t_mono)
            self._wake()
            return False
        self._chain = True
        return self._take(_Dismissal(aim.task, key, t_mono), repeat)

    def _follow(self, key: str, t_mono: int) -> None:
        last, at = self._last_key
        self._last_key = (key, t_mono)
        if key != last or t_mono - at > _CHAIN_NS:
            self._chain = False

    def _take(self, press: _Dismissal, repeat: bool = False) -> bool:
        with self._lock:
            if self._judged != press.task:
                self._judge.reset()
                self._judged = press.task
            verdict = self._judge.press(press.t_mono / 1e9, repeat)
            self._waiting = press if verdict is Press.WAIT else None
        if verdict in (Press.STOP, Press.FORCE):
            self._launch(verdict, press)
        elif verdict is Press.WAIT:
            self._wake()
        return True

    def _launch(self, verdict: Press, press: _Dismissal) -> None:
        mode = "force" if verdict is Press.FORCE else "graceful"
        request = Cancel(id=fresh_id(), task=press.task, mode=mode, t_ui=press.t_mono)
        flight = _Flight(
            request, press.key, press.t_mono, StopPlan(embedded=False, random=random.random, horizon=60)
        )
        with self._lock:
            self._flights[request.id] = flight
        link = self._link
        sent = link is not None and link.send(encode(request))
        if sent:
            flight.sent_at = self._mono()
            flight.taken.append(Step(Action.SEND_CONTROL, 0.0, 1))
        flight.began = self._mono()
        flight.ready = True
        self._wake()
        self._report(PressReport(verdict, press.task, press.key, press.t_mono, request.id, sent))

    def _report(self, report: PressReport) -> None:
        if self._on_press is None:
            return
        try:
            self._on_press(report)
        except Exception as error:
            # A loop that is closing must not take the input thread along.
            self._log.event("press report failed", layer=1, task=report.task, error=repr(error))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    # --- the lane thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                # Whatever this was, the lane is the last way to stop: drop the connection and go on.
                self._log.event("stop lane failed", layer=2, error=repr(error))
                self._drop()
                self._retry_at = self._mono() + 50_000_000
        self._drop()
        self._wake_read.close()
        self._wake_write.close()

    def _turn(self) -> None:
        self._keep()
        link = self._link
        watched: list[socket.socket | LaneLink] = [self._wake_read, *([link] if link is not None else [])]
        ready = select.select(watched, [], [], self._patience())[0]
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        while self._inbox:
            self._inbox.popleft()()
        if link is not None and link in ready:
            self._read(link)
        self._judge_late()
        for flight in list(self._flights.values()):
            self._advance(flight)

    def _patience(self) -> float:
        now = self._mono()
        waits = [flight.wait(now) for flight in list(self._flights.values())]
        waits.append((self._beat if self._link is not None else self._retry_at) / 1e9 - now / 1e9)
        if (dismissal := self._dismissal) is not None:
            waits.append(DISMISS_S - (now - dismissal.t_mono) / 1e9)
        if (settles := self._judge.settles_at) is not None:
            waits.append(settles - now / 1e9)
        return min(HEARTBEAT_S, max(0.0, min(wait for wait in waits if wait is not None)))

    def _judge_late(self) -> None:
        now = self._mono()
        dismissal = self._dismissal
        if dismissal is not None and now - dismissal.t_mono >= DISMISS_S * 1e9:
            self._dismissal = None
            self._log.event("overlay did not take the key", layer=1, task=dismissal.task)
            self._take(dismissal)
        with self._lock:
            waiting = self._waiting
            forced = waiting is not None and self._judge.settled(now / 1e9) is Press.FORCE
            if forced or self._judge.settles_at is None:
                self._waiting = None
        if forced and waiting is not None:
            self._launch(Press.FORCE, waiting)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        now = self._mono()
        if self._stale:
            self._stale = False
            self._drop()
        link = self._link
        if link is not None and (not link.usable or now - self._heard > SILENCE_S * 1e9):
            self._drop()
        if self._link is None and now >= self._retry_at:
            self._connect()
        elif self._link is not None and now >= self._beat:
            self._beat = now + int(HEARTBEAT_S * 1e9)
            self._link.send(encode(Heartbeat(mono=now)), patience=0.05)

    def _connect(self) -> bool:
        try:
            link = LaneLink(self._path)
        except OSError:
            self._retry_at = self._mono() + int(next(self._delays) * 1e9)
            return False
        link.send(encode(Hello(id=fresh_id(), proto=[PROTOCOL], client=f"lane {os.getpid()}")), patience=0.05)
        self._delays = delays(random=random.random)
        self._heard = self._mono()
        self._beat = self._heard + int(HEARTBEAT_S * 1e9)
        self._link = link
        return True

    def _drop(self) -> None:
        link, self._link = self._link, None
        self._retry_at = 0
        if link is not None:
            link.close()

    def _read(self, link: LaneLink) -> None:
        try:
            frames = link.receive()
        except OSError:
            self._drop()
            return
        self._heard = self._mono()
        for frame in frames:
            with contextlib.suppress(MalformedFrame):
                message = decode_from_agent(frame)
                if isinstance(message, CancelAccepted | CancelNoop):
                    self._acknowledge(message.re, message, "control")
                elif isinstance(message, Failure) and message.re in self._flights:
                    self._log.event("stop refused", layer=2, code=message.code, msg=message.msg)

    # --- a cancel's way ---------------------------------------------------------------------------------------------

    def _advance(self, flight: _Flight) -> None:
        if not flight.ready:
            return
        self._say(flight)
        while (wait := flight.wait(self._mono())) is not None and wait <= 0:
            step = flight.next()
            if step is None:
                break
            flight.taken.append(step)
            if step.action is Action.REPORT:
                # Whoever may signal the agent (the session) escalates; the lane goes on asking.
                self._log.event("stop not acknowledged", layer=2, task=flight.request.task)
            elif step.action is Action.SEND_HTTP:
                self._send_http(flight, step)
            else:
                self._send_again(flight, step)
        if not flight.acked and flight.next() is None:
            with self._lock:
                self._flights.pop(flight.request.id, None)

    def _say(self, flight: _Flight) -> None:
        # Files are written here and not in the input thread, with the times at which things happened.
        if flight.said:
            return
        flight.said = True
        request = flight.request
        self._log.trace(
            request.task, Layer.UI, Ev.PRESSED, mono=flight.pressed, key=flight.key, mode=request.mode
        )
        if flight.sent_at:
            self._trace_sent(flight, Step(Action.SEND_CONTROL, 0.0), flight.sent_at)

    def _send_again(self, flight: _Flight, step: Step) -> None:
        link = self._link
        if link is None or not link.usable or step.attempt >= FRESH_FROM_ATTEMPT:
            # A connection that swallowed two frames may be deaf in one direction only.
            self._drop()
            if self._connect():
                self._log.trace(flight.request.task, Layer.CLIENT, Ev.RECONNECTED, route="lane")
        flight.request.attempt = step.attempt
        if self._link is not None and self._link.send(encode(flight.request), patience=0.05):
            self._trace_sent(flight, step, self._mono())

    def _trace_sent(self, flight: _Flight, step: Step, at: int) -> None:
        first = not any(taken.action is Action.SEND_CONTROL for taken in flight.taken[:-1])
        route = "http" if step.action is Action.SEND_HTTP else "lane"
        ev = Ev.SENT if first and route == "lane" else Ev.RETRIED
        self._log.trace(
            flight.request.task, Layer.CLIENT, ev, mono=at, route=route, attempt=step.attempt, id=flight.request.id,
        )  # fmt: skip

    def _send_http(self, flight: _Flight, step: Step) -> None:
        self._trace_sent(flight, step, self._mono())
        threading.Thread(target=self._post_one, args=(flight,), name="peri-stop-http", daemon=True).start()

    def _post_one(self, flight: _Flight) -> None:
        request = flight.request
        try:
            answer = cancel_over_http(self._path, request, timeout=HTTP_TIMEOUT_S, post=self._post)
        except AgentUnreachable as error:
            self._log.event("http cancel failed", layer=2, task=request.task, error=str(error))
            return
        if isinstance(answer, CancelAccepted | CancelNoop):
            self._inbox.append(lambda: self._acknowledge(request.id, answer, "http"))
            self._wake()

    def _acknowledge(self, request: str, answer: Ack, route: str) -> None:
        with self._lock:
            flight = self._flights.pop(request, None)
        if flight is None:
            return
        flight.acked = True
        self._say(flight)
        now = self._mono()
        tries = max((step.attempt for step in flight.taken), default=1)
        self._log.trace(
            answer.task, Layer.CLIENT, Ev.ACKED, mono=now, route=route, attempts=tries,
            state=answer.state, ms=round((now - flight.pressed) / 1e6, 3),
            said=f"accepted by agent, {tries} attempt{'s' if tries > 1 else ''}",
        )  # fmt: skip
        if self._on_ack is not None:
            self._on_ack(request, answer)
