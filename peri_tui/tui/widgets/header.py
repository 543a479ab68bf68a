"""The first line: where we are, which model serves, what was used."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.widget import Widget

from peri_tui.core.sanitize import one_line
from peri_tui.tui.view_model import ViewState
from peri_tui.tui.widgets.task_bar import tokens


@dataclass(frozen=True, slots=True)
class Place:
    """What the header shows and does not change: folder and branch (untrusted), model, approval mode, version."""

    workspace: str = ""
    branch: str = ""
    model: str = ""
    approve: str = "ask"
    version: str = ""


class Header(Widget):
    """Left the place, right the model; details go first when it is narrow."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self._used = 0

    def on_mount(self) -> None:
        """Follow the state."""
        self.watch(self.app, "view", self._show)

    def _show(self, view: ViewState) -> None:
        used = sum(task.tokens_in + task.tokens_out for task in view.tasks.values())
        if used != self._used:
            self._used = used
            self.refresh()

    def render(self) -> Content:
        """Return the line for the present width."""
        place, width = self._place, self.size.width
        details = [
            one_line(place.model, 32),
            place.approve,
            f"{tokens(self._used)} tokens" if self._used else "",
        ]
        right = " · ".join(part for part in details if part)
        branch = one_line(place.branch, 24)
        left = width - 9 - cell_len(right) - (cell_len(branch) + 2 if branch else 0)
        folder = one_line(place.workspace, max(8, left))
        gap = width - 8 - cell_len(folder) - (cell_len(branch) + 2 if branch else 0) - cell_len(right)
        mode = "$error bold" if place.approve == "all" else "$peri-muted"
        before, _sep, after = right.partition(place.approve)
        return Content.assemble(
            (" peri", "$accent bold"), (f"  {folder}", "$foreground"),
            (f"  {branch}" if branch else "", "$peri-muted"), " " * max(1, gap),
            (before, "$peri-muted"), (_sep, mode), (after, "$peri-muted"),
        )  # fmt: skip
