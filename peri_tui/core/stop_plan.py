"""A stop's deadlines: which press means what, and what the client does when an acknowledgement is late.

Pure: the caller brings times (seconds of a monotonic clock) and does what a ``Step`` says. The plan of the client::

    0.00 s   control, again after 0.05, 0.1, 0.2, 0.4, 0.8, 1, 1 … s (± 20 %) until it is acknowledged
    0.30 s   HTTP as well, then every second
    3.00 s   embedded agent: SIGTERM, its own shutdown stops the tasks          (a served agent is never signalled)
    5.00 s   embedded agent: name the other tasks that would end too, wait 3 s for a "no"
    8.00 s   embedded agent: kill its session, recover from the journal         (5.00 s when no other task runs)
    then     say which layer is missing; where nothing was killed, control and HTTP go on: never silently given up

An acknowledgement ends the escalation for good: from there on the agent owns the deadlines, and the client only
reports when nothing was heard for ``SILENCE`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain, count, islice, takewhile
from math import inf
from typing import Final

from peri_tui.core.backoff import delays

# Deadlines of the layers in the agent, in seconds.
MODEL_DEADLINE: Final = 1.0
LADDER: Final = 3.0
PROOF: Final = 5.0
ROLLBACK_PROGRESS: Final = 5.0
ACK_DEADLINE: Final = 0.3

# Escalation in the client, in seconds since the press.
HTTP_AFTER: Final = 0.3
HTTP_EVERY: Final = 1.0
SIGNAL_AFTER: Final = 3.0
WARN_AFTER: Final = 5.0
DECLINE_WITHIN: Final = 3.0
KILL_PROOF: Final = 1.0
SILENCE: Final = LADDER + PROOF + 2.0

# Presses, in seconds.
FORCE_AFTER: Final = 0.4
REPEAT_WITHIN: Final = 0.12

_EPS: Final = 1e-9


class Press(StrEnum):
    """What a press of the stop key means."""

    STOP = "stop"
    FORCE = "force"
    IGNORE = "ignore"
    WAIT = "wait"
    """Looks like a force, but may be the first auto-repeat of a held key: ask ``settled`` a little later."""


class PressJudge:
    """Tells a second, deliberate press from a held key. One judge a stop; ``reset`` for the next.

    A terminal without the kitty protocol sends a held key as plain presses: one, then nothing for the initial delay
    (225–1000 ms by desktop), then some 30 a second. By rate alone the first repeat looks like a deliberate press.
    With ``settle`` it is told apart by what follows it.

    Args:
        settle: seconds for which a force waits to see that no repeat follows; 0: it counts at once.
    """

    def __init__(self, *, settle: float = 0.0) -> None:
        self._settle = settle
        self.reset()

    def reset(self) -> None:
        """Forget all presses: the next one is a stop."""
        self._first: float | None = None
        self._last = 0.0
        self._waiting: float | None = None
        self._forced = False

    @property
    def settles_at(self) -> float | None:
        """When to ask ``settled``, or None while nothing waits."""
        return None if self._waiting is None else self._waiting + self._settle

    def press(self, t: float, repeat: bool = False) -> Press:
        """Judge one press at ``t`` (seconds); ``repeat`` is the terminal's own word that it is an auto-repeat.

        Returns STOP for the first, FORCE once for a deliberate later one (WAIT if ``settle`` is set), else IGNORE.
        """
        if self._first is None:
            self._first = self._last = t
            return Press.STOP
        held = repeat or t - self._last < REPEAT_WITHIN - _EPS
        self._last = t
        if held:
            self._waiting = None
            return Press.IGNORE
        if self._forced or t - self._first < FORCE_AFTER - _EPS:
            return Press.IGNORE
        if self._settle > 0:
            self._waiting = t
            return Press.WAIT
        self._forced = True
        return Press.FORCE

    def settled(self, t: float) -> Press:
        """Return FORCE, once, if a waiting press turned out to be deliberate by ``t``, else IGNORE."""
        if self.settles_at is None or t < self.settles_at - _EPS:
            return Press.IGNORE
        self._waiting = None
        self._forced = True
        return Press.FORCE


class Action(StrEnum):
    """What the client does next for a stop."""

    SEND_CONTROL = "send_control"
    SEND_HTTP = "send_http"
    SIGNAL_AGENT = "signal_agent"
    WARN_KILL = "warn_kill"
    KILL_AGENT = "kill_agent"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Step:
    """One act: what, when (milliseconds since the press), and which attempt of its kind (from 1)."""

    action: Action
    at_ms: float
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of a stop so far. Times are milliseconds since the press.

    ``acked``: an acknowledgement of any route (also *nothing to stop*). ``ended``: ``task.end`` came. ``others``:
    other tasks would end with the agent. ``warned_ms``: when their names were on screen. ``declined``: the user said
    no to the kill. ``last_word_ms``: when the agent last said anything of this task.
    """

    acked: bool = False
    ended: bool = False
    others: bool = False
    warned_ms: float | None = None
    declined: bool = False
    last_word_ms: float = 0.0


class StopPlan:
    """The escalation of one stop.

    Args:
        embedded: the agent is this client's own child; only then is it ever signalled or killed.
        random: returns a number from 0 to below 1, for the jitter of retries.
        horizon: seconds after which nothing is tried again.
    """

    def __init__(
        self, embedded: bool, *, random: Callable[[], float] = lambda: 0.5, horizon: float = inf
    ) -> None:
        self._embedded = embedded
        self._tries = (
            _Tries(Action.SEND_CONTROL, accumulate(chain([0.0], delays(random=random))), horizon),
            _Tries(Action.SEND_HTTP, count(HTTP_AFTER, HTTP_EVERY), horizon),
        )

    def next(self, taken: Collection[Step], heard: Heard) -> Step | None:
        """Return the earliest step that is still to come; None when the plan is through.

        Pure: the same arguments give the same step. The caller does it at ``at_ms``, unless something was heard
        meanwhile; then it asks again. ``KILL_AGENT`` never comes before ``WARN_KILL`` where other tasks run, and
        no step against the agent ever comes for a served one, or after an acknowledgement.
        """
        return min(self._left(taken, heard), key=_when, default=None)

    def due(self, elapsed_ms: float, taken: Collection[Step], heard: Heard) -> Step | None:
        """Return the step to do now, or None.

        Of retries that fell due together (the client was held up) only the newest is returned: one is enough.
        """
        late = [step for step in self._left(taken, heard) if step.at_ms <= elapsed_ms]
        if not late:
            return None
        action = min(late, key=_when).action
        return max((step for step in late if step.action is action), key=_when)

    def _left(self, taken: Collection[Step], heard: Heard) -> list[Step]:
        if heard.ended:
            return []
        done: dict[Action, int] = {}
        for step in taken:
            done[step.action] = max(step.attempt, done.get(step.action, 0))
        return [step for step in self._plan(done, heard) if step.attempt > done.get(step.action, 0)]

    def _plan(self, done: Mapping[Action, int], heard: Heard) -> list[Step]:
        if heard.acked:
            return [Step(Action.REPORT, heard.last_word_ms + SILENCE * 1000)]
        again = () if Action.KILL_AGENT in done else self._tries
        retries = [step for tries in again for step in tries.after(done.get(tries.action, 0))]
        if not self._embedded:
            return [*retries, _step(Action.REPORT, WARN_AFTER)]
        return [*retries, _step(Action.SIGNAL_AGENT, SIGNAL_AFTER), *self._last_steps(done, heard)]

    def _last_steps(self, done: Collection[Action], heard: Heard) -> list[Step]:
        killed = Action.KILL_AGENT in done
        if heard.declined and not killed:
            return [_step(Action.REPORT, WARN_AFTER)]
        if heard.others and heard.warned_ms is None and not killed:
            return [_step(Action.WARN_KILL, WARN_AFTER)]
        # Who was warned has the whole time to say no, however late the warning was on screen.
        kill_at = WARN_AFTER if heard.warned_ms is None else heard.warned_ms / 1000 + DECLINE_WITHIN
        kill, report = _step(Action.KILL_AGENT, kill_at), _step(Action.REPORT, kill_at + KILL_PROOF)
        return [kill, report] if killed else [kill]


class _Tries:
    """The retries of one route, made as they are needed: a press must not wait for a long plan."""

    _AHEAD: Final = 16

    def __init__(self, action: Action, times: Iterator[float], horizon: float) -> None:
        self.action = action
        self._steps: list[Step] = []
        self._times = takewhile(lambda at: at <= horizon, times)

    def after(self, attempt: int) -> list[Step]:
        """Return the next few steps after an attempt."""
        wanted = attempt + self._AHEAD - len(self._steps)
        for at in islice(self._times, max(0, wanted)):
            self._steps.append(_step(self.action, at, len(self._steps) + 1))
        return self._steps[attempt : attempt + self._AHEAD]


def _step(action: Action, at: float, attempt: int = 1) -> Step:
    return Step(action, round(at * 1000, 3), attempt)


def _when(step: Step) -> float:
    return step.at_ms


class ActiveTime:
    """Counts the seconds in which this process itself ran.

    A client that was stopped (SIGSTOP, a laptop asleep) must not hold the pause against the agent: of a gap between
    two ticks only ``max_gap`` seconds count.

    Args:
        start: the moment of the press, in seconds.
        max_gap: the longest gap that is not a pause; the caller ticks more often than that.
    """

    def __init__(self, start: float, *, max_gap: float = 1.0) -> None:
        self._last = start
        self._max_gap = max_gap
        self._active = 0.0

    def tick(self, now: float) -> float:
        """Return the active seconds since ``start``."""
        self._active += min(max(0.0, now - self._last), self._max_gap)
        self._last = max(self._last, now)
        return self._active
