"""The last line: what waits in the queue, and the keys that matter now."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from peri_tui.tui.actions import ACTIONS
from peri_tui.tui.view_model import ViewState
from peri_tui.tui.widgets.task_bar import Part, fit


class Hints(Widget):
    """Queue at the left, keys behind it; what does not fit is dropped from the right."""

    def __init__(self) -> None:
        super().__init__()
        self._view = ViewState()
        self._hint = ""

    def on_mount(self) -> None:
        """Follow the state."""
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        changed = (view.queued, view.held) != (self._view.queued, self._view.held)
        changed = changed or (view.running is None) != (self._view.running is None)
        self._view = view
        if changed:
            self.refresh()

    def hint(self, text: str) -> None:
        """Show a short word of Peri itself instead of the keys; empty: the keys again."""
        self._hint = text
        self.refresh()

    def render(self) -> Content:
        """Return the line for the present width."""
        return fit(hint_parts(self._view, self._hint), self.size.width)


def hint_parts(view: ViewState, hint: str) -> list[Part]:
    """Return the parts of the line, the most important first."""
    if hint:
        return [(hint, "$warning")]
    parts: list[Part] = []
    if view.queued:
        count = f"{len(view.queued)} {'held' if view.held else 'queued'}"
        parts.append((count, "$warning bold"))
        parts.append(("  ^S sends on   " if view.held else "   ", "$peri-muted"))
    parts.append(("Enter ", "$peri-muted bold"))
    parts.append(("queues   " if view.running is not None else "sends   ", "$peri-muted"))
    for action in ACTIONS:
        if action.footer:
            parts += [(f"{action.shown_key} ", "$peri-muted bold"), (f"{action.footer}   ", "$peri-muted")]
    parts += [("/ ", "$peri-muted bold"), ("command   ", "$peri-muted")]
    parts += [("Shift+Enter ", "$peri-muted bold"), ("line break", "$peri-muted")]
    return parts
