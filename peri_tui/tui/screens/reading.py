"""Overlays that only show: help, the trace of a stop, changed files with their diffs, tasks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from peri_tui.core.trace import Layer, TraceRecord, diagnose
from peri_tui.tui.actions import ACTIONS, PROMPT_KEYS
from peri_tui.tui.drawing import one_line
from peri_tui.tui.screens.overlay import Overlay
from peri_tui.tui.view_model import ChangedFile
from peri_tui.tui.widgets.line_view import Line, LineView, diff_lines

HELP_WIDTH: Final = 40


class HelpScreen(Overlay[None]):
    """Every key and command, from the registry."""

    BINDINGS: ClassVar[Any] = [Binding("f1,question_mark,q", "dismiss(None)", "Close", show=False)]

    def box_title(self) -> str:
        """Return the title."""
        return "Help"

    def compose_box(self) -> Iterable[Widget]:
        """Build the list."""
        yield LineView(help_lines())


def help_lines() -> list[Line]:
    """Return the lines of the help."""
    lines: list[Line] = [[("Prompt", "user bold")]]
    lines += [[(f"  {key:<20}", "accent"), (words, "foreground")] for key, words in PROMPT_KEYS]
    lines += [[], [("Keys", "user bold")]]
    for action in ACTIONS:
        first, *rest = textwrap.wrap(action.title, HELP_WIDTH)
        lines.append([(f"  {_keys(action.shown_key, action.slash):<20}", "accent"), (first, "foreground")])
        lines += [[(" " * 22 + line, "foreground")] for line in rest]
    lines += [
        [],
        [("While a task runs, Esc belongs to the stop, in every dialog.", "muted")],
        [("One press stops; a second, deliberate one forces. Held keys", "muted")],
        [("count once. Your draft and your queue are kept.", "muted")],
    ]
    return lines


def _keys(key: str, slash: str) -> str:
    return "  ".join(part for part in (key.replace("^", "Ctrl+"), slash) if part) or "(palette)"


class TraceScreen(Overlay[None]):
    """The records of the last stop, layer by layer, and the first gap in words."""

    BINDINGS: ClassVar[Any] = [Binding("q,d", "dismiss(None)", "Close", show=False)]

    def __init__(self, task: str, records: Sequence[TraceRecord], clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._name_of_task = task
        self._records = records

    def box_title(self) -> str:
        """Return the title."""
        return f"Trace of {self._name_of_task}"

    def compose_box(self) -> Iterable[Widget]:
        """Build the list."""
        yield LineView(trace_lines(self._records))


def trace_lines(records: Sequence[TraceRecord]) -> list[Line]:
    """Return the lines of a trace: time since the press, layer, event, what it said."""
    if not records:
        return [[("No trace was recorded for this task.", "muted")]]
    found = diagnose(records)
    first = next((record.mono for record in records if record.ev == "pressed"), records[0].mono)
    lines: list[Line] = []
    if found.complete:
        lines.append([("✓ every layer acknowledged", "success bold")])
    elif found.failed is not None:
        lines.append([(f"✗ {found.failed.title}: {found.missing}", "error bold")])
    lines.append([])
    for record in records:
        layer = Layer(record.layer).title if record.layer in range(1, 6) else str(record.layer)
        ok = record.data.get("ok", True) is True
        said = str(record.data.get("said", ""))
        lines.append(
            [
                (f"{(record.mono - first) / 1e6:10.1f} ms  ", "muted"), (f"{layer:<10} ", "accent"),
                (f"{record.ev:<16} ", "foreground" if ok else "error bold"), (said, "muted"),
            ]
        )  # fmt: skip
    return lines


class DiffScreen(Overlay[None]):
    """The changed files of a task, and the diff of the chosen one."""

    BINDINGS: ClassVar[Any] = [Binding("f2,q", "dismiss(None)", "Close", show=False)]

    def __init__(self, files: tuple[ChangedFile, ...], clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._files = files

    def box_title(self) -> str:
        """Return the title."""
        return "Changed files"

    def compose_box(self) -> Iterable[Widget]:
        """Build list and diff."""
        if not self._files:
            yield Static("This task has changed no file.", markup=False)
            return
        with Horizontal(classes="two"):
            yield OptionList(*(Option(_file(item)) for item in self._files), id="diff-files", markup=False)
            yield LineView(file_lines(self._files[0]))

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the diff of the file under the cursor."""
        self.query_one(LineView).show(file_lines(self._files[event.option_index]))


def _file(item: ChangedFile) -> Content:
    mark = {"added": "A", "modified": "M", "deleted": "D"}.get(item.kind, "?")
    return Content.assemble((f"{mark} ", "$accent"), one_line(item.path, 34))


def file_lines(item: ChangedFile) -> list[Line]:
    """Return the diff of a file, or why there is none."""
    if item.diff:
        return diff_lines(item.diff)
    if item.by == "shell":
        return [
            [(f"{item.path}: {item.kind} by a command.", "foreground")],
            [("Peri has no copy of what it was before: not restored by a stop.", "warning")],
        ]
    return [[(f"{item.path}: {item.kind}", "foreground")], [("no diff was sent", "muted")]]
