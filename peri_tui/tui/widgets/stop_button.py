"""The Stop button: enabled only while a press would do something, and worded by the state of the task."""

from __future__ import annotations

from textual.message import Message
from textual.widgets import Button

from peri_tui.tui.view_model import TaskView, ViewState


class StopButton(Button):
    """Posts ``Pressed`` of its own, so that no other button can be taken for it."""

    class Stop(Message):
        """The button was clicked. As with the key, a second, deliberate click forces; a double click does not."""

    def __init__(self) -> None:
        super().__init__("Stop  Esc", compact=True, disabled=True)
        self.can_focus = False
        # Textual ignores clicks while its press effect lasts; a stop is never ignored.
        self.active_effect_duration = 0
        self._force = False

    def on_mount(self) -> None:
        """Follow the state."""
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        task = view.running
        word, self._force, enabled = button_state(task)
        self.disabled = not enabled
        self.set_class(self._force, "-force")
        if str(self.label) != word:
            self.label = word

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Say so, as a stop."""
        event.stop()
        self.post_message(self.Stop())


def button_state(task: TaskView | None) -> tuple[str, bool, bool]:
    """Return word, whether a press forces, and whether a press does anything."""
    if task is None or task.is_over:
        return "Stop  Esc", False, False
    if task.is_stopping:
        return ("Forcing…", True, False) if task.forced else ("Force  Esc", True, True)
    return "Stop  Esc", False, True
