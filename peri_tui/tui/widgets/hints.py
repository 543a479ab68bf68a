"""The last line: what waits in the queue, and the keys that matter now."""

from __future__ import annotations

from rich.cells import cell_len
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
        groups: list[list[Part]] = []
        left = self.size.width - 1
        for group in hint_groups(self._view, self._hint):
            left -= sum(cell_len(text) for text, _style in group)
            if left < 0 and groups:
                break
            groups.append(group)
        return fit([part for group in groups for part in group], self.size.width)


def hint_groups(view: ViewState, hint: str) -> list[list[Part]]:
    """Return the groups of the line (a key and its word), the most important first."""
    if hint:
        return [[(hint, "$warning")]]
    groups: list[list[Part]] = []
    if view.queued:
        count = f"{len(view.queued)} {'held' if view.held else 'queued'}"
        sends = (
            [("  ^S ", "$peri-muted bold"), ("sends on   ", "$peri-muted")] if view.held else [("   ", "")]
        )
        groups.append([(count, "$warning bold"), *sends])
    groups.append(_key("Enter", "queues" if view.running is not None else "sends"))
    groups += [_key(action.shown_key, action.footer) for action in ACTIONS if action.footer]
    return [*groups, _key("/", "command"), _key("Shift+Enter", "line break")]


def _key(key: str, word: str) -> list[Part]:
    return [(f"{key} ", "$peri-muted bold"), (f"{word}   ", "$peri-muted")]
