"""The stop lane's thread: carries cancels to the agent until they are acknowledged.

It keeps one synchronous control connection open ahead of need, answers heartbeats, repeats what is not acknowledged,
goes over to a fresh connection and to HTTP, and writes the trace. ``launch`` is called in another thread and writes
to the kept connection itself.

No token is shown: a process of the same user may stop, and must not be taken for a TUI that adopts the agent.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from peri_tui.client.http_route import Post, cancel_over_http
from peri_tui.client.lane_link import OPEN_TIMEOUT_S, LaneLink
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
from peri_tui.core.stop_plan import Action, Heard, Step, StopPlan
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log

Ack = CancelAccepted | CancelNoop

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 5.0
HTTP_TIMEOUT_S: Final = 1.0
FRESH_FROM_ATTEMPT: Final = 3
# A stop is under way: a handshake that takes longer must not hold up the other route.
FRESH_TIMEOUT_S: Final = 0.2
HORIZON_S: Final = 60.0


@dataclass(slots=True)
class Flight:
    """One cancel on its way to an acknowledgement. Times are monotonic nanoseconds.

    ``began``: the first write, from which repeats count (for a force it comes later than the press). ``over``: the
    task ended, so nothing more is sent, but a late acknowledgement is still taken.
    """

    request: Cancel
    key: str
    pressed: int
    plan: StopPlan
    taken: list[Step] = field(default_factory=list)
    began: int = 0
    sent: bool = False
    ready: bool = False
    over: bool = False
    acked: bool = False
    said: bool = False

    def coming(self) -> Step | None:
        """Return the next thing to do, None if there is nothing."""
        idle = self.acked or self.over or not self.ready
        return None if idle else self.plan.next(self.taken, Heard())

    def wait(self, now: int) -> float | None:
        """Return the seconds until ``coming`` is due."""
        step = self.coming()
        return None if step is None else max(0.0, step.at_ms / 1e3 - (now - self.began) / 1e9)

    def expired(self, now: int) -> bool:
        """Tell whether nobody waits for this any more."""
        return self.ready and now - self.began > HORIZON_S * 1e9


class LaneCourier:
    """See the module.

    Args:
        path: the agent's socket.
        log: trace and log files.
        on_ack: called in the thread with the request's id and the agent's answer.
        on_turn: called in the thread at each turn; returns the seconds until it wants to be called again.
        post: the HTTP cancel; ``net.post_cancel`` unless a test says otherwise.
        mono: monotonic nanoseconds.
    """

    def __init__(
        self,
        path: Path,
        log: Log,
        *,
        on_ack: Callable[[str, Ack], None] | None,
        on_turn: Callable[[], float | None],
        post: Post | None,
        mono: Callable[[], int],
    ) -> None:
        self._path = path
        self._log = log
        self._on_ack = on_ack
        self._on_turn = on_turn
        self._post = post
        self._mono = mono
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._link: LaneLink | None = None
        self._stale = False
        self._heard = self._beat = self._retry_at = 0
        self._delays = delays(random=random.random)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="peri-stop-lane", daemon=True)

    # --- called from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it connects at once."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and its connection."""
        self._closing = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(OPEN_TIMEOUT_S)

    @property
    def connected(self) -> bool:
        """True while the kept connection is open."""
        link = self._link
        return link is not None and link.usable

    def wake(self) -> None:
        """Make the thread look around."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def retarget(self, path: Path) -> None:
        """Go over to another agent; what is not acknowledged is sent to it."""
        self._path = path
        self._stale = True
        self.wake()

    def settle(self, task: str) -> None:
        """Send nothing more for a task."""
        with self._lock:
            for flight in self._flights.values():
                flight.over = flight.over or flight.request.task == task

    def launch(self, request: Cancel, key: str, pressed: int) -> bool:
        """Write a cancel to the kept connection in the caller's thread; True if the kernel has all of it.

        Else, and until it is acknowledged, the thread sees to it, as soon as the caller has called ``wake``. Waits at
        most a millisecond.
        """
        plan = StopPlan(embedded=False, random=random.random, horizon=HORIZON_S)
        flight = Flight(request, key, pressed, plan)
        with self._lock:
            self._flights[request.id] = flight
        link = self._link
        # Stamped before the write: an answer must never look older than the question.
        flight.began = self._mono()
        flight.sent = link is not None and link.send(encode(request))
        if flight.sent:
            flight.taken.append(Step(Action.SEND_CONTROL, 0.0))
        flight.ready = True
        return flight.sent

    # --- the thread -------------------------------------------------------------------------------------------------

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
        wanted = self._on_turn()
        for flight in list(self._flights.values()):
            self._advance(flight)
        self._keep()
        link = self._link
        watched: list[socket.socket | LaneLink] = [self._wake_read, *([link] if link is not None else [])]
        ready = select.select(watched, [], [], self._patience(wanted))[0]
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        while self._inbox:
            self._inbox.popleft()()
        if link is not None and link in ready:
            self._read(link)

    def _patience(self, wanted: float | None) -> float:
        now = self._mono()
        waits = [wanted, *(flight.wait(now) for flight in list(self._flights.values()))]
        waits.append(((self._beat if self._link is not None else self._retry_at) - now) / 1e9)
        return min(HEARTBEAT_S, max(0.0, min(wait for wait in waits if wait is not None)))

    # --- the connection ---------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        now = self._mono()
        link = self._link
        silent = link is not None and now - self._heard > SILENCE_S * 1e9
        if self._stale or silent or (link is not None and not link.usable):
            self._stale = False
            self._drop()
        if self._link is None and now >= self._retry_at:
            urgent = any(flight.coming() is not None for flight in list(self._flights.values()))
            self._connect(FRESH_TIMEOUT_S if urgent else OPEN_TIMEOUT_S)
        elif self._link is not None and now >= self._beat:
            self._beat = now + int(HEARTBEAT_S * 1e9)
            self._link.send(encode(Heartbeat(mono=now)), patience=0.05)

    def _connect(self, timeout: float) -> bool:
        try:
            link = LaneLink(self._path, timeout=timeout)
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

    def _advance(self, flight: Flight) -> None:
        now = self._mono()
        if flight.expired(now):
            self._forget(flight)
            return
        if flight.ready:
            self._say(flight)
        while (wait := flight.wait(self._mono())) is not None and wait <= 0:
            step = flight.coming()
            if step is None:
                return
            flight.taken.append(step)
            if step.action is Action.REPORT:
                # Whoever may signal the agent (the session) escalates; the lane goes on asking.
                self._log.event("stop not acknowledged", layer=2, task=flight.request.task)
            elif step.action is Action.SEND_HTTP:
                self._send_http(flight, step)
            else:
                self._send_again(flight, step)

    def _say(self, flight: Flight) -> None:
        # Files are written here and not in the input thread, with the times at which things happened.
        if flight.said:
            return
        flight.said = True
        request = flight.request
        self._log.trace(
            request.task, Layer.UI, Ev.PRESSED, mono=flight.pressed, key=flight.key, mode=request.mode
        )
        if flight.sent:
            self._trace_sent(flight, Step(Action.SEND_CONTROL, 0.0), flight.began)

    def _send_again(self, flight: Flight, step: Step) -> None:
        link = self._link
        if link is None or not link.usable or step.attempt >= FRESH_FROM_ATTEMPT:
            # A connection that swallowed two frames may be deaf in one direction only.
            self._drop()
            if self._connect(FRESH_TIMEOUT_S):
                self._log.trace(flight.request.task, Layer.CLIENT, Ev.RECONNECTED, route="lane")
        flight.request.attempt = step.attempt
        at = self._mono()
        if self._link is not None and self._link.send(encode(flight.request), patience=0.05):
            self._trace_sent(flight, step, at)

    def _trace_sent(self, flight: Flight, step: Step, at: int) -> None:
        again = flight.sent and step.attempt > 1
        flight.sent = True
        route = "http" if step.action is Action.SEND_HTTP else "lane"
        self._log.trace(
            flight.request.task, Layer.CLIENT, Ev.RETRIED if again or route == "http" else Ev.SENT,
            mono=at, route=route, attempt=step.attempt, id=flight.request.id,
        )  # fmt: skip

    def _send_http(self, flight: Flight, step: Step) -> None:
        self._trace_sent(flight, step, self._mono())
        threading.Thread(
            target=self._post_one, args=(flight.request,), name="peri-stop-http", daemon=True
        ).start()

    def _post_one(self, request: Cancel) -> None:
        try:
            answer = cancel_over_http(self._path, request, timeout=HTTP_TIMEOUT_S, post=self._post)
        except AgentUnreachable as error:
            self._log.event("http cancel failed", layer=2, task=request.task, error=str(error))
            return
        if isinstance(answer, CancelAccepted | CancelNoop):
            self._inbox.append(lambda: self._acknowledge(request.id, answer, "http"))
            self.wake()

    def _acknowledge(self, request: str, answer: Ack, route: str) -> None:
        flight = self._flights.get(request)
        if flight is None:
            return
        flight.acked = True
        self._say(flight)
        self._forget(flight)
        now = self._mono()
        tries = max((step.attempt for step in flight.taken), default=1)
        self._log.trace(
            answer.task, Layer.CLIENT, Ev.ACKED, mono=now, route=route, attempts=tries,
            state=answer.state, ms=round((now - flight.pressed) / 1e6, 3),
            said=f"accepted by agent, {tries} attempt{'s' if tries > 1 else ''}",
        )  # fmt: skip
        if self._on_ack is not None:
            self._on_ack(request, answer)

    def _forget(self, flight: Flight) -> None:
        with self._lock:
            self._flights.pop(flight.request.id, None)
