"""The side panel of a wide screen: tasks and changed files, newest first, as many as fit."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from peri_tui.tui.drawing import one_line
from peri_tui.tui.view_model import ChangedFile, ViewState
from peri_tui.tui.words import task_glyph, task_word

WIDTH = 26


class SidePanel(Vertical):
    """Two lists; only what fits is built."""

    def compose(self) -> ComposeResult:
        """Build both lists."""
        yield Static("", id="side-tasks", markup=False)
        yield Static("", id="side-files", markup=False)

    def on_mount(self) -> None:
        """Follow the state."""
        self._shown: tuple[object, ...] = ()
        self._view = ViewState()
        self.watch(self.app, "view", self._show)

    def on_resize(self) -> None:
        """Another height fits another number of lines."""
        self._shown = ()
        self._show(self._view)

    def _show(self, view: ViewState) -> None:
        self._view = view
        files = view.task.files if view.task is not None else ()
        rows = [(task.task, task_glyph(task), task.prompt) for task in view.tasks.values()]
        shown = (tuple(rows), view.queued, files, view.shown, self.size.height)
        if shown == self._shown:
            return
        self._shown = shown
        half = max(3, self.size.height // 2)
        self.query_one("#side-tasks", Static).update(tasks_content(view, half))
        self.query_one("#side-files", Static).update(files_content(files, half))


def tasks_content(view: ViewState, lines: int) -> Content:
    """Return the list of tasks, newest first, at most ``lines`` lines."""
    rows = [Content.assemble(("Tasks", "$peri-muted bold"))]
    rows += [
        Content.assemble(("○ ", "$peri-muted"), (one_line("queued: " + prompt, WIDTH - 4), "$peri-muted"))
        for prompt in view.queued
    ]
    for task in reversed(list(view.tasks.values())):
        glyph, colour = task_glyph(task)
        style = "$foreground" if task.task == view.shown else "$peri-muted"
        words = one_line(task.prompt or task_word(task), WIDTH - 4)
        rows.append(Content.assemble((f"{glyph} ", colour), (words, style)))
    return Content("\n").join(_bounded(rows, lines))


def files_content(files: tuple[ChangedFile, ...], lines: int) -> Content:
    """Return the list of changed files, at most ``lines`` lines."""
    if not files:
        return Content("")
    rows = [Content.assemble(("Changed", "$peri-muted bold"))]
    # Drawn with each change, so it may cost what is seen, not what there is: a task can change thousands of files.
    room = lines - 1 if len(files) < lines else lines - 2
    for item in files[:room]:
        mark = {"added": "A", "modified": "M", "deleted": "D"}.get(item.kind, "?")
        by = " !" if item.by == "shell" else ""
        rows.append(
            Content.assemble(
                (f"{mark} ", "$accent"),
                (one_line(item.path, WIDTH - 6), "$foreground"),
                (by, "$warning bold"),
            )
        )
    if len(files) > room:
        rows.append(_more(len(files) - room))
    return Content("\n").join(rows)


def _bounded(rows: list[Content], lines: int) -> list[Content]:
    if len(rows) <= lines:
        return rows
    return [*rows[: lines - 1], _more(len(rows) - lines + 1)]


def _more(count: int) -> Content:
    return Content.assemble((f"  {count} more", "$peri-muted"))
