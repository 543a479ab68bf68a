"""What keys, commands and messages of widgets do: one short method each, named in the registry of actions.

No handler waits: all are plain functions. What must wait is spawned.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import TextArea

from peri_tui.core.sanitize import one_line
from peri_tui.tui.actions import Action, by_slash, slash_words
from peri_tui.tui.screens.jobs import QuitScreen
from peri_tui.tui.screens.reading import DiffScreen, HelpScreen, TraceScreen
from peri_tui.tui.screens.tasks import TasksScreen
from peri_tui.tui.stop_report import as_text
from peri_tui.tui.widgets.hints import Hints
from peri_tui.tui.widgets.prompt import Prompt
from peri_tui.tui.widgets.stop_button import StopButton
from peri_tui.tui.widgets.stop_card import StopCard

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from textual.app import App
    from textual.worker import Worker

    from peri_tui.core.trace import TraceRecord
    from peri_tui.tui.desk import Desk
    from peri_tui.tui.drafts import DraftSaver
    from peri_tui.tui.job_desk import JobDesk
    from peri_tui.tui.ports import Lane
    from peri_tui.tui.screens.main import MainScreen
    from peri_tui.tui.view_model import ViewState

    Base = App[int]
else:
    Base = object

TWICE_NS: Final = 2_000_000_000
LANE_PATIENCE_S: Final = 0.05


class Handlers(Base):
    """Mixed into the app."""

    if TYPE_CHECKING:
        view: ViewState
        desk: Desk
        jobs: JobDesk
        drafts: DraftSaver
        main: MainScreen
        lane: Lane | None
        clock: Callable[[], int]
        read_trace: Callable[[str], Sequence[TraceRecord]]

        @property
        def prompt(self) -> Prompt: ...
        def spawn(self, work: Coroutine[Any, Any, None]) -> Worker[None]: ...
        def say(self, text: str) -> None: ...
        def show_text(self) -> None: ...
        async def leave(self, *, services: bool = True) -> None: ...

    leaving = False
    unasked = False
    typed = ""
    _interrupted_at: int | None = None

    # --- stop ------------------------------------------------------------------------------------------------------------

    def action_stop_key(self, _key: str) -> None:
        """Esc: stop while a task runs; else close what is open, and go back to the prompt."""
        if self.view.running is not None:
            self._stop_by_key()
        elif isinstance(self.screen, ModalScreen):
            self.screen.dismiss(None)
        else:
            self.prompt.focus()

    def action_interrupt(self) -> None:
        """Ctrl+C: stop; idle with text: clear it (kept in the history); idle and empty: twice quits."""
        if self.view.running is not None:
            self._stop_by_key()
        elif self.prompt.text.strip():
            self.desk.history.append(self.prompt.text)
            self.prompt.replace_text("")
        else:
            self._interrupt_idle()

    def _interrupt_idle(self) -> None:
        now, before = self.clock(), self._interrupted_at
        self._interrupted_at = now
        if before is not None and now - before < TWICE_NS:
            self.action_quit_peri()
            return
        self._hint("Ctrl+C again quits")
        self.set_timer(TWICE_NS / 1e9, lambda: self._hint(""))

    def _stop_by_key(self) -> None:
        # With a lane the press is on its way already, and its report is on its way to us; without one it is ours.
        if self.lane is None:
            self.desk.stop()
            return
        task = self.view.running
        if task is not None and not task.pressed:
            self.set_timer(LANE_PATIENCE_S, lambda: self._stop_unless_taken(task.task))

    def _stop_unless_taken(self, task: str) -> None:
        now = self.view.tasks.get(task)
        if now is not None and now.can_stop:
            self.desk.stop()

    def on_stop_button_stop(self, message: StopButton.Stop) -> None:
        """The button: a stop; clicked again deliberately, a force."""
        message.stop()
        self.desk.stop()

    def action_stop_task(self) -> None:
        """Stop by name (palette, ``/stop``)."""
        if not self.desk.stop():
            self.say("nothing runs")

    def action_force(self) -> None:
        """Force by name."""
        self.desk.stop(force=True)

    def action_keep_agent(self) -> None:
        """Decline the end of a silent agent."""
        self.desk.keep_agent()

    def on_stop_card_asked(self, message: StopCard.Asked) -> None:
        """A letter on the card."""
        message.stop()
        if message.what == "copy":
            self._copy_report()
        elif message.what == "details":
            self.action_trace()
        elif message.what == "force":
            self.desk.stop(force=True)
        else:
            self.desk.dismiss_card()
            self.prompt.focus()

    def _copy_report(self) -> None:
        task = self.view.tasks.get(self.view.card)
        if task is not None and task.is_over:
            self.copy_to_clipboard(one_screen(as_text(task)))
            self.say("report copied")

    # --- prompts -----------------------------------------------------------------------------------------------------------

    def on_prompt_sent(self, message: Prompt.Sent) -> None:
        """Enter: a command, or a prompt."""
        message.stop()
        text = message.text
        word = text.split()[0]
        if word.startswith("/") and "/" not in word[1:]:
            self._slash(word)
        elif text.startswith("!"):
            self.prompt.replace_text(text)
            self.say("! shell commands are not built yet; ask the model to run it")
        else:
            self._transcript_follows()
            self.desk.send(text)

    def _slash(self, word: str) -> None:
        if word in ("/undo", "/redo", "/new"):
            self.say(f"{word} is not built yet" + ("; outside: peri undo" if word == "/undo" else ""))
            return
        action = by_slash(word)
        if action is None:
            self.say(f"unknown command {one_line(word, 40)}; known: {' '.join(slash_words())}")
        elif action.id == "stop":
            self.action_stop_task()
        else:
            self.perform(action)

    def perform(self, action: Action) -> None:
        """Run an action of the registry."""
        getattr(self, f"action_{action.handler}")()

    def _transcript_follows(self) -> None:
        self.main.transcript.follow()

    def on_prompt_help_asked(self, message: Prompt.HelpAsked) -> None:
        """``?`` in an empty prompt."""
        message.stop()
        self.action_help()

    def on_text_area_changed(self, message: TextArea.Changed) -> None:
        """Keep the draft."""
        self.typed = message.text_area.text
        self.drafts.changed(self.typed, self.view.queued)

    def action_send_queued(self) -> None:
        """Send the held prompts on."""
        self.desk.release()

    def action_take_back(self) -> None:
        """Put the last waiting prompt back into the input."""
        last = self.desk.drop_queued()
        self.prompt.replace_text("\n".join(part for part in (self.prompt.text, last) if part))

    def action_history(self) -> None:
        """Search backwards."""
        self.prompt.search_back()

    # --- overlays ----------------------------------------------------------------------------------------------------------

    def _toggle(self, kind: type[ModalScreen[Any]]) -> bool:
        if isinstance(self.screen, kind):
            self.screen.dismiss(None)
            return True
        # A question must be answered first; another overlay is replaced by none.
        return isinstance(self.screen, ModalScreen)

    def action_help(self) -> None:
        """Open or close the help."""
        if not self._toggle(HelpScreen):
            self.push_screen(HelpScreen(self.clock))

    def action_tasks(self) -> None:
        """Open or close the list of tasks."""
        if not self._toggle(TasksScreen):
            screen = TasksScreen(self.view, self.clock, jobs=self.jobs, spawn=self.spawn, say=self.say)
            self.push_screen(screen, self._show_task)

    def _show_task(self, task: str | None) -> None:
        if task is not None:
            self.desk.show(task)

    def action_diff(self) -> None:
        """Open or close the changed files."""
        if not self._toggle(DiffScreen) and self.view.task is not None:
            self.push_screen(DiffScreen(self.view.task.files, self.clock))

    def action_trace(self) -> None:
        """Show the trace of the shown task."""
        task = self.view.tasks.get(self.view.card) or self.view.task
        if task is None:
            self.say("no task yet")
        elif not self._toggle(TraceScreen):
            self.spawn(self._open_trace(task.task))

    async def _open_trace(self, task: str) -> None:
        records = await asyncio.to_thread(self.read_trace, task)
        self.push_screen(TraceScreen(task, records, self.clock))

    # --- the rest ----------------------------------------------------------------------------------------------------------

    def action_tool_output(self) -> None:
        """Show or fold the output of tools."""
        self.desk.conversation.fold()
        self.show_text()

    def action_focus_card(self) -> None:
        """Go to the stop card, if it is there."""
        card = self.main.query_one(StopCard)
        if card.display:
            card.focus()

    def action_redraw(self) -> None:
        """Draw everything again."""
        self.refresh(layout=True)
        self.screen.refresh(repaint=True, layout=True)

    def action_quit_peri(self) -> None:
        """Quit; a running task is stopped first, services are asked about, and a second time leaves at once."""
        if self.view.running is None or self.leaving:
            again = self.leaving or isinstance(self.screen, QuitScreen)
            self.leaving = False
            self.spawn(self.leave() if again else self.ask_and_leave())
            return
        self.leaving = True
        self.desk.stop()
        self._hint("stopping the task first; Ctrl+Q again leaves now")

    def quit_unasked(self) -> None:
        """Quit because a signal said so: nobody may be there to answer."""
        self.unasked = True
        self.action_quit_peri()

    async def ask_and_leave(self) -> None:
        """Leave; where services run, only after the user has seen what would end and said yes."""
        services = await self.jobs.services()
        if not services or self.unasked:
            await self.leave(services=bool(services))
        elif not isinstance(self.screen, ModalScreen):
            self.push_screen(QuitScreen(services, self.clock), self._answer_quit)
        else:
            self.say("services run: close what is open, then quit")

    def _answer_quit(self, outcome: str | None) -> None:
        if outcome == "yes":
            self.spawn(self.leave())

    def _hint(self, text: str) -> None:
        try:
            self.main.query_one(Hints).hint(text)
        except NoMatches:
            return


def one_screen(text: str) -> str:
    """Return a report for the clipboard: cleaned line by line."""
    return "\n".join(one_line(line, 2000) for line in text.split("\n"))
