"""The app: wiring only. State is the desk's, words are the report's, lines are the widgets'."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.segment import Segment, Segments
from textual.app import App
from textual.driver import Driver
from textual.reactive import reactive
from textual.screen import Screen
from textual.worker import Worker, WorkerState

from peri_tui.core.messages import CancelAccepted, CancelNoop
from peri_tui.core.sanitize import clean
from peri_tui.core.trace import TraceRecord
from peri_tui.errors import ConfigError
from peri_tui.tui import theming
from peri_tui.tui.actions import bindings
from peri_tui.tui.desk import Desk
from peri_tui.tui.drafts import DraftSaver
from peri_tui.tui.driver import PeriDriver
from peri_tui.tui.handlers import Handlers
from peri_tui.tui.job_desk import JobDesk
from peri_tui.tui.palette import PeriCommands
from peri_tui.tui.ports import DraftKeeper, Lane, Opener, PressReport, Tracer
from peri_tui.tui.pump import FLUSH_HZ, Pump
from peri_tui.tui.screens.main import MainScreen
from peri_tui.tui.screens.question import PermissionScreen, TrustScreen
from peri_tui.tui.second_net import SecondNet
from peri_tui.tui.view_model import ViewState
from peri_tui.tui.widgets.header import Place
from peri_tui.tui.widgets.prompt import Prompt

TICK_S: Final = 0.5
CLOSE_S: Final = 3.0


class PeriApp(Handlers, App[int]):
    """Layer 1.

    Args:
        opener: starts the agent and returns the session.
        place: what the header shows.
        drafts: keeps draft and queue.
        trace: appends trace records of layer 1.
        read_trace: returns the trace of a task; blocks, so it runs in a thread.
        lane: the stop lane, when a driver taps the keys for it.
        driver_class: the driver with the tap.
        theme: name of the theme at the start.
        theme_folders: where the user's themes are.
        initial: what stands in the prompt when no draft was kept.
        clock: monotonic nanoseconds.
        block: sleeps; what the injected fault of this layer does to the loop.

    Raises:
        ConfigError: a theme file is wrong, or the theme does not exist.
    """

    TITLE = "peri"
    CSS_PATH = "peri.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    COMMANDS: ClassVar[Any] = {PeriCommands}
    BINDINGS: ClassVar[Any] = bindings()

    view: reactive[ViewState] = reactive(ViewState(), always_update=True, repaint=False)
    text_version: reactive[int] = reactive(0, repaint=False)

    def __init__(
        self,
        opener: Opener,
        *,
        place: Place,
        drafts: DraftKeeper,
        trace: Tracer,
        read_trace: Callable[[str], Sequence[TraceRecord]] = lambda _task: (),
        lane: Lane | None = None,
        driver_class: type[Driver] | None = None,
        theme: str = "peri-dark",
        theme_folders: Sequence[Path] = (),
        initial: str = "",
        clock: Callable[[], int] = time.monotonic_ns,
        block: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(driver_class=driver_class)
        self.clock = clock
        self._place = place
        self.read_trace = read_trace
        self.lane = lane
        self._themes = theming.load_themes([theming.shipped_folder(), *theme_folders])
        self._wanted_theme = theme
        self._initial = initial
        self.jobs = JobDesk(opener)
        self.desk = Desk(
            self.jobs.open, spawn=self.spawn, publish=self._publish, clock=clock, trace=trace, lane=lane,
            approve=place.approve, block=block,
        )  # fmt: skip
        self.desk.give_back = self._give_back
        self.pump = Pump(self.desk.facts, self.desk.tell, self.show_text)
        self.drafts = DraftSaver(drafts, self.spawn, self.say)
        self.main = MainScreen(
            self.desk.conversation, lambda: self.desk.history, lambda: self.typed, place, clock
        )
        self._ctx: contextvars.Context | None = None
        self._begun = False
        self._asked: PermissionScreen | TrustScreen | None = None
        self._filters.append(SecondNet())
        self._use_themes()

    # --- start and end ---------------------------------------------------------------------------------------------------

    def _use_themes(self) -> None:
        for theme in self._themes:
            self.register_theme(theme)
        own = {theme.name for theme in self._themes}
        if self._wanted_theme not in own:
            known = ", ".join(sorted(own))
            raise ConfigError(f"theme: unknown theme {self._wanted_theme!r}; known: {known}")
        self.theme = self._wanted_theme
        # Textual's own themes have no contrast checked for our marks, so they are not offered.
        for name in set(self.available_themes) - own:
            self.unregister_theme(name)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return the values of our own variables for themes that do not set them."""
        return dict(theming.VARIABLE_DEFAULTS)

    def get_default_screen(self) -> Screen[Any]:
        """Return the main screen."""
        return self.main

    def on_mount(self) -> None:
        """Start the pump, load the draft, connect."""
        self._ctx = contextvars.copy_context()
        self.set_interval(1 / FLUSH_HZ, self.pump.flush)
        self.set_interval(TICK_S, self._tick)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self._begun = True
        self.spawn(self._start())
        # What exists now lives as long as the app: the collector need not look at it again (30–60 ms a time).
        if not self.is_headless:
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)

    async def _start(self) -> None:
        draft = await self.drafts.load()
        if not self.typed:
            self.prompt.replace_text(clean(draft.text or self._initial))
        self.desk.restore_queue(draft.queued)
        await self.desk.connect(self.pump.push)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Worker[None]:
        """Run a coroutine as a worker of the app; what it raises is told, never fatal."""
        return self.run_worker(work, exit_on_error=False)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Tell of a worker that failed; nothing else would."""
        if event.state is WorkerState.ERROR:
            self.say(f"internal error: {event.worker.error!r}")

    def _fatal_error(self) -> None:
        # Stock Textual prints every local variable; one of them may be a key, another a terminal sequence.
        error = self._exception
        lines = traceback.format_exception(error) if error is not None else ["internal error"]
        self._exit_renderables.append(Segments([Segment(clean("".join(lines)))]))
        self._close_messages_no_wait()

    async def leave(self, *, services: bool = True) -> None:
        """End services (there may be some), save the draft, close the session, end the app."""
        if services:
            await self.jobs.end_services()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.drafts.flush()
                await self.desk.close()
        except TimeoutError:
            pass
        finally:
            self.exit(0)

    # --- one way: state to widgets ---------------------------------------------------------------------------------------

    def _publish(self, state: ViewState) -> None:
        self.view = state
        self.show_text()

    def show_text(self) -> None:
        """Let the transcript look at the conversation, if it changed."""
        self.text_version = self.desk.conversation.version

    def watch_view(self, view: ViewState) -> None:
        """Open and close dialogs, note the draft, and see to it that a press is recorded as painted."""
        if not self._begun:
            return
        self._sync_dialog(view)
        self.drafts.changed(self.typed, view.queued)
        if self.desk.unpainted():
            self.screen.call_after_refresh(self._frame_done)
        if self.leaving and view.running is None:
            self.leaving = False
            self.spawn(self.ask_and_leave())

    def _sync_dialog(self, view: ViewState) -> None:
        task = view.running
        question = task.question if task is not None and not task.is_stopping else None
        shown = self._asked
        if isinstance(shown, PermissionScreen):
            if question is not None and question.qid == shown.question.qid:
                return
            self._close_asked()
        if question is not None:
            dialog = PermissionScreen(question, self.clock)
            self._open_asked(dialog, lambda outcome: self.desk.answer(question, outcome or "deny"))
        elif view.ask_trust and self._asked is None:
            self._open_asked(
                TrustScreen(view.ask_trust, self.clock), lambda outcome: self.desk.trust(outcome == "yes")
            )

    def _open_asked(
        self, dialog: PermissionScreen | TrustScreen, answer: Callable[[str | None], None]
    ) -> None:
        def closed(outcome: str | None) -> None:
            if self._asked is dialog:
                self._asked = None
                answer(outcome)

        self._close_asked()
        self._asked = dialog
        self.push_screen(dialog, closed)

    def _close_asked(self) -> None:
        shown, self._asked = self._asked, None
        if shown is not None and shown in self.screen_stack:
            while self.screen is not shown:
                self.pop_screen()
            self.pop_screen()

    def _tick(self) -> None:
        self.desk.tick()
        if isinstance(self._driver, PeriDriver):
            self._driver.follow_size(self.screen.size)
        if self.desk.unpainted():
            self.screen.call_after_refresh(self._frame_done)

    def _frame_done(self) -> None:
        """The frame was made; it counts as painted when the terminal has taken it."""
        if isinstance(self._driver, PeriDriver):
            self._driver.when_shown(self._frame_shown)
        else:
            self.desk.painted()

    def _frame_shown(self) -> None:
        if self._ctx is not None:
            self._ctx.run(self.desk.painted)

    def say(self, text: str) -> None:
        """Show a short notice; its text may come from anywhere."""
        self.notify(clean(text), markup=False)

    @property
    def prompt(self) -> Prompt:
        """The prompt, also while an overlay is open."""
        return self.main.query_one(Prompt)

    def _give_back(self, prompt: str) -> None:
        if not self.typed:
            self.prompt.replace_text(clean(prompt))

    # --- the stop lane, from its threads ---------------------------------------------------------------------------------

    def lane_pressed(self, report: PressReport) -> None:
        """Take a press that the lane made into a cancel; called in the input thread."""
        self._from_thread(self.desk.on_press, report)

    def lane_acked(self, _request: str, answer: CancelAccepted | CancelNoop) -> None:
        """Take the agent's answer to the lane; called in the lane's thread."""
        self._from_thread(self.desk.acknowledged, answer)

    def _from_thread(self, call: Callable[..., None], *args: Any) -> None:
        # A loop that is gone needs to know nothing.
        if self._loop is not None and self._ctx is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args, context=self._ctx)
