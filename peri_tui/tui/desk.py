"""The one writer of the screen's state: turns what the user does and what the agent says into the next state.

No Textual here. The desk holds the state and the conversation, talks to the session, and publishes each new state
through a callback. Handlers of widgets call it and return; whatever must wait runs as a task that the caller spawns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

from peri_tui.core import faults
from peri_tui.core.messages import (
    Asked,
    CancelAccepted,
    CancelNoop,
    Delta,
    Resolved,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    Welcome,
)
from peri_tui.core.states import TaskState
from peri_tui.core.stop_plan import ACK_DEADLINE, Press, PressJudge
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import AgentUnreachable, PeriError
from peri_tui.tui.conversation import Conversation
from peri_tui.tui.ports import AimKind, Lane, LinkStatus, Opener, PressReport, Session, Tracer
from peri_tui.tui.reducer import PAINT_LIMIT_MS, is_cut, reduce
from peri_tui.tui.stop_report import report
from peri_tui.tui.view_model import (
    Acknowledged,
    CancelLost,
    Fact,
    Known,
    LampState,
    LinkChanged,
    Painted,
    Pressed,
    Submitted,
    TaskView,
    Ticked,
    ViewState,
)

# An event of these kinds is applied at once, before any text that waits for its turn.
URGENT: Final = (TaskStateChanged, Asked, Resolved, TaskEnded)

_TOLD: Final = ("restarting", "restarted", "failed", "escalated")

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Desk:
    """State, conversation and the acts of the user.

    Args:
        opener: starts the agent and returns the client's session.
        spawn: runs a coroutine as a task of the app; its errors are reported, never fatal.
        publish: called with each new state.
        clock: monotonic nanoseconds.
        trace: appends a trace record of layer 1.
        lane: told whom the next stop key belongs to.
        approve: the approval mode of new tasks.
        block: what the injected fault does to the loop when a stop is handled.
    """

    def __init__(
        self,
        opener: Opener,
        *,
        spawn: Spawn,
        publish: Callable[[ViewState], None],
        clock: Callable[[], int],
        trace: Tracer,
        lane: Lane | None = None,
        approve: str = "ask",
        block: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self.state = ViewState()
        self.conversation = Conversation()
        self.history: list[str] = []
        self._opener = opener
        self._session: Session | None = None
        self._spawn = spawn
        self._publish = publish
        self._clock = clock
        self._trace = trace
        self._lane = lane
        self._approve = approve
        self._block = block
        self._judge = PressJudge()
        self._judged = ""
        self._heard_out: set[str] = set()
        self._told: set[str] = set()
        self._said: set[str] = set()
        self._killing = ""
        self.give_back: Callable[[str], None] = lambda _prompt: None

    # --- state ---------------------------------------------------------------------------------------------------------

    def fact(self, event: TaskEvent | Fact) -> None:
        """Apply one event to the state and publish it; the lane learns whom the next press belongs to."""
        self.facts((event,))

    def facts(self, events: Iterable[TaskEvent | Fact]) -> None:
        """Apply events in order and publish the state that they lead to, once."""
        events = tuple(events)
        state, now = self.state, self._clock()
        ended = []
        for event in events:
            state = reduce(state, event, now)
            if isinstance(event, TaskEnded):
                ended.append(event.task)
        self._set(state)
        for task in ended:
            self._ended(task)
        if any(isinstance(event, Acknowledged | CancelLost) for event in events):
            # An end that came before the answer to its cancel was waiting for it.
            self.settle()

    def _ended(self, task: str) -> None:
        if self._session is not None:
            self._session.acknowledge_end(task)
        if self._lane is not None:
            self._lane.settled(task)

    def _set(self, state: ViewState) -> None:
        if state is self.state:
            return
        self.state = state
        self._aim()
        self._publish(state)

    def _aim(self) -> None:
        if self._lane is not None:
            task = self.state.running
            kind: AimKind = "task" if task is not None else "none"
            self._lane.aim(kind, task.task if task is not None else "")

    def tell(self, event: TaskEvent) -> None:
        """Apply one event to the conversation; text after the cut of a stop is left out."""
        if isinstance(event, Delta) and is_cut(self.state.tasks.get(event.task), event):
            return
        self._say_prompt(event.task)
        self.conversation.apply(event)
        if isinstance(event, TaskEnded):
            self._heard_out.add(event.task)
            self._told.discard(event.task)
            self.settle()

    def _say_prompt(self, task: str) -> None:
        # Tasks of an earlier screen arrive as a replay; each begins with what was asked.
        view = self.state.tasks.get(task)
        if task not in self._said and view is not None and view.prompt:
            self._said.add(task)
            self.conversation.say(view.prompt, task)

    def settle(self) -> None:
        """Write the closing line of every task whose end may be shown, and go on with what waits."""
        for task in self.state.tasks.values():
            heard_out = task.task in self._heard_out and task.task not in self._told
            if task.end is not None and task.settled and heard_out:
                self._told.add(task.task)
                self._close(task, task.end)
        self._advance()

    def _close(self, task: TaskView, end: TaskEnded) -> None:
        if end.state == TaskState.COMPLETED and not task.pressed:
            return
        card = report(task)
        detail = f": {end.message}" if end.message and end.state == TaskState.FAILED else ""
        self.conversation.end(" · ".join([card.title + detail, *card.files]), card.tone, task.task)
        if task.pressed and not task.produced and end.state == TaskState.CANCELLED:
            self.give_back(task.prompt)

    # --- prompts -------------------------------------------------------------------------------------------------------

    def send(self, prompt: str) -> None:
        """Start a task, or queue the prompt: while one runs, prompts are held, or the agent is not there yet."""
        self.history.append(prompt)
        self._set(replace(self.state, queued=(*self.state.queued, prompt)))
        self._advance()

    def _submit(self, session: Session, prompt: str) -> None:
        task = session.new_task_id()
        self.fact(Submitted(task, prompt))
        self._say_prompt(task)
        self._publish(self.state)
        self._spawn(self._submitted(session, task, prompt))

    async def _submitted(self, session: Session, task: str, prompt: str) -> None:
        try:
            await session.submit(prompt, approve=self._approve, task=task)
        except AgentUnreachable as error:
            # It may run all the same: it stays on screen and can be stopped.
            self._note(f"not confirmed: {error}", "warn")
        except PeriError as error:
            # Refused, so nothing ran: this end is known here and nowhere else.
            self.fact(TaskEnded(task=task, state=TaskState.FAILED, message=str(error)))
            self._note(f"not sent: {error}", "fail")
            self.give_back(prompt)

    def _note(self, text: str, tone: str = "") -> None:
        self.conversation.notice(text, tone)
        self._publish(self.state)

    def release(self) -> None:
        """Send the held prompts on (one after the other)."""
        self._set(replace(self.state, held=False))
        self._advance()

    def drop_queued(self) -> str:
        """Take the last waiting prompt back out of the queue; empty when none waits."""
        *rest, last = self.state.queued or ("",)
        self._set(replace(self.state, queued=tuple(rest), held=self.state.held and bool(rest)))
        return last

    def restore_queue(self, queued: tuple[str, ...]) -> None:
        """Take over the prompts that a former run left behind; held, because nobody asked to send them now."""
        if queued:
            self._set(replace(self.state, queued=queued, held=True))

    def _advance(self) -> None:
        session = self._session
        if session is None or self.state.link == "connecting":
            return
        if self.state.held or not self.state.queued or self.state.running is not None:
            return
        first, *rest = self.state.queued
        self._set(replace(self.state, queued=tuple(rest)))
        self._submit(session, first)

    # --- stop ----------------------------------------------------------------------------------------------------------

    def stop(self, *, force: bool = False, repeat: bool = False) -> bool:
        """Stop the task that a press belongs to, from this loop. False when there is nothing to stop."""
        task = self.state.running or self._unverified()
        if task is None:
            return False
        now = self._clock()
        mode = "force" if force else self._judge_press(task, now, repeat)
        if mode in ("stop", "force"):
            self._pressed(task.task, now, mode, lane=False)
        return True

    def _unverified(self) -> TaskView | None:
        task = self.state.task
        failed = task is not None and task.end is not None and task.end.state == TaskState.CANCEL_FAILED
        return task if failed and self.state.card else None

    def _judge_press(self, task: TaskView, now: int, repeat: bool) -> str:
        if self._judged != task.task:
            self._judge.reset()
            self._judged = task.task
        verdict = self._judge.press(now / 1e9, repeat)
        return {Press.STOP: "stop", Press.FORCE: "force"}.get(verdict, "ignored")

    def on_press(self, press: PressReport) -> None:
        """Show a press that the stop lane took. The lane sends, repeats and records it; here it is only shown."""
        self._pressed(press.task, press.t_mono, "force" if press.press is Press.FORCE else "stop", lane=True)

    def _pressed(self, task: str, mono: int, mode: str, *, lane: bool) -> None:
        if faults.active("ui.block_loop"):
            self._block(3.0)
        first = task in self.state.tasks and not self.state.tasks[task].pressed
        self.fact(Pressed(task, mono, mode))
        if lane:
            # The lane repeats by itself; only the session may signal or kill an agent that stays silent.
            self._spawn(self._escalate(task, mono, mode))
            return
        if first and mode == "stop":
            self._trace(task, int(Layer.UI), Ev.PRESSED, mono=mono)
        self._spawn(self._cancel(task, mono, mode))

    async def _escalate(self, task: str, mono: int, mode: str) -> None:
        await asyncio.sleep(ACK_DEADLINE)
        view = self.state.tasks.get(task)
        answered = view is not None and view.lamps[1].state is LampState.OK
        if view is None or (view.is_over if mode == "force" else answered):
            return
        await self._cancel(task, mono, mode)

    async def _cancel(self, task: str, mono: int, mode: str) -> None:
        if self._session is None:
            return
        word = "force" if mode == "force" else "graceful"
        try:
            answer = await self._session.cancel(task, mode=word, pressed_mono=mono)
        except PeriError as error:
            self.fact(CancelLost(task, self._clock(), str(error)))
        else:
            self.acknowledged(answer)

    def acknowledged(self, answer: CancelAccepted | CancelNoop, attempts: int = 1, mono: int = 0) -> None:
        """Apply the agent's answer to a cancel, whichever route brought it."""
        self.fact(Acknowledged(answer, mono or self._clock(), attempts))
        if isinstance(answer, CancelNoop) and answer.state == "tombstone":
            # The agent has never seen this task and never will: it did not start, so there is nothing to prove.
            end = TaskEnded(
                task=answer.task, state=TaskState.CANCELLED, stop_reason="user", message="not started"
            )
            self.fact(end)
            self.tell(end)

    def painted(self) -> None:
        """Record that the frame with *Stopping* is on the screen (called after that frame)."""
        for task in list(self.state.tasks.values()):
            if not task.awaits_frame:
                continue
            now = self._clock()
            late = (now - task.pressed) / 1e6 > PAINT_LIMIT_MS
            facts: dict[str, Any] = {"ok": False, "said": "the screen was blocked"} if late else {}
            self._trace(task.task, int(Layer.UI), Ev.PAINTED, mono=now, **facts)
            self.fact(Painted(task.task, now))
        self.settle()

    def unpainted(self) -> bool:
        """Tell whether a press waits for its frame."""
        return any(task.awaits_frame for task in self.state.tasks.values())

    def show(self, task: str) -> None:
        """Let bar, strip and card show this task."""
        view = self.state.tasks.get(task)
        if view is not None:
            card = (
                task
                if view.end is not None and view.end.seq and (view.pressed or view.end.stop_reason)
                else ""
            )
            self._set(replace(self.state, shown=task, card=card))

    def dismiss_card(self) -> None:
        """Put the stop card away."""
        self._set(replace(self.state, card=""))

    # --- questions, link -----------------------------------------------------------------------------------------------

    def answer(self, question: Asked, outcome: str) -> None:
        """Answer an open question; one that was closed meanwhile is left alone."""
        task = self.state.tasks.get(question.task)
        if task is None or task.question is None or task.question.qid != question.qid or task.is_stopping:
            return
        self._spawn(self._answer(question, outcome))

    async def _answer(self, question: Asked, outcome: str) -> None:
        if self._session is None:
            return
        try:
            await self._session.answer(question.task, question.qid, outcome)
        except PeriError as error:
            self._note(f"the answer did not arrive: {error}", "fail")

    def trust(self, trusted: bool) -> None:
        """Answer the question whether the folder's own instructions may be read."""
        self._set(replace(self.state, ask_trust=()))
        self._spawn(self._trust(trusted))

    async def _trust(self, trusted: bool) -> None:
        if self._session is None:
            return
        try:
            await self._session.trust(trusted)
        except PeriError as error:
            self._note(f"the answer did not arrive: {error}", "fail")

    async def connect(self, on_event: Callable[[TaskEvent], None]) -> None:
        """Start the agent, connect, and show what it knows; then send what was typed meanwhile."""
        try:
            self._session = await self._opener(on_event, self.on_link)
            welcome = await self._session.connect()
        except PeriError as error:
            self.fact(LinkChanged("failed", str(error)))
            self._note(f"no agent: {error}", "fail")
        else:
            self.welcomed(welcome)
            self._advance()

    async def close(self) -> None:
        """Close the session, if there is one."""
        if self._session is not None:
            await self._session.close()

    def welcomed(self, welcome: Welcome) -> None:
        """Show a (new) agent's tasks and notes."""
        for item in welcome.tasks:
            if item.prompt and item.task not in self.state.tasks:
                self.history.append(item.prompt)
        for note in welcome.notes:
            self.conversation.notice(note)
        self.fact(Known(tuple(welcome.tasks), tuple(welcome.ask_trust)))
        self.fact(LinkChanged("up"))

    def on_link(self, news: LinkStatus) -> None:
        """Show news of the link; a stop that nobody answers is a failure of layer 2."""
        if news.state == "unanswered" and news.task:
            self.fact(CancelLost(news.task, self._clock(), news.detail or "the agent does not answer"))
        elif news.state in _TOLD:
            self._note(f"agent {news.state}: {news.detail}".rstrip(": "), "warn")
        if news.state == "killing":
            names = self._names(news.tasks)
            self._note(f"would end with the agent: {names}. Ctrl+N within 3 s keeps it", "fail")
        self._killing = news.task if news.state == "killing" else ""
        if news.state != "unanswered":
            self.fact(LinkChanged({"open": "up"}.get(news.state, news.state), news.detail))
        self._advance()

    def _names(self, tasks: tuple[str, ...]) -> str:
        views = [(task, self.state.tasks.get(task)) for task in tasks]
        return ", ".join(view.prompt[:40] if view and view.prompt else task for task, view in views)

    def keep_agent(self) -> None:
        """Decline the kill of the agent that was announced."""
        if self._session is not None and self._killing:
            self._session.decline_kill(self._killing)
            self._note("the agent is kept; the stop goes on asking", "warn")

    def tick(self) -> None:
        """Let time pass: silence is judged."""
        self.fact(Ticked())
