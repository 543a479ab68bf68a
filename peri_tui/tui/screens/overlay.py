"""What all overlays share: a box above, and below it the bar, the Stop button and the strip, always in reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget

from peri_tui.tui.widgets.layer_strip import LayerStrip
from peri_tui.tui.widgets.task_bar import TaskBar

ResultT = TypeVar("ResultT")


class Overlay(ModalScreen[ResultT]):
    """Esc is the app's: it stops while a task runs, else it closes the overlay."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(classes="overlay")
        self.clock = clock

    def compose(self) -> ComposeResult:
        """Build box and bar."""
        with Vertical(classes="overlay-space"), Vertical(classes="box") as box:
            box.border_title = self.box_title()
            yield from self.compose_box()
        with Vertical(classes="overlay-foot"):
            yield TaskBar(self.clock)
            yield LayerStrip()

    def box_title(self) -> str:
        """Return the words in the frame; never untrusted text."""
        return ""

    def compose_box(self) -> Iterable[Widget]:
        """Build the inside."""
        return ()
