"""The main screen: conversation, stop card, running-task bar, strip, prompt, hints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from peri_tui.tui.conversation import Conversation
from peri_tui.tui.widgets.header import Header, Place
from peri_tui.tui.widgets.hints import Hints
from peri_tui.tui.widgets.layer_strip import LayerStrip
from peri_tui.tui.widgets.prompt import Prompt, PromptBar
from peri_tui.tui.widgets.side_panel import SidePanel
from peri_tui.tui.widgets.stop_card import StopCard
from peri_tui.tui.widgets.task_bar import TaskBar
from peri_tui.tui.widgets.transcript import Transcript

WIDE: Final = 100


class MainScreen(Screen[None]):
    """Holds the widgets; all of them read the app's state and can be built again at any time."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012

    def __init__(
        self,
        conversation: Conversation,
        history: Callable[[], Sequence[str]],
        typed: Callable[[], str],
        place: Place,
        clock: Callable[[], int],
    ) -> None:
        super().__init__(id="main")
        self._conversation = conversation
        self._history = history
        self._typed = typed
        self._place = place
        self._clock = clock

    def compose(self) -> ComposeResult:
        """Build everything, top to bottom."""
        yield Header(self._place)
        with Horizontal(id="body"):
            yield SidePanel()
            yield Transcript(self._conversation)
        yield StopCard()
        with Vertical(id="console"):
            yield TaskBar(self._clock)
            yield LayerStrip()
        yield PromptBar(Prompt(self._history, self._clock, text=self._typed()))
        yield Hints()

    def on_mount(self) -> None:
        """Typing goes to the prompt."""
        self.query_one(Prompt).focus()

    @property
    def transcript(self) -> Transcript:
        """The view of the conversation."""
        return self.query_one(Transcript)
