"""Background jobs on the screen: their rows in the list of tasks, and the question when leaving with services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Button, Static
from textual.widgets.option_list import Option

from peri_tui.core.messages import JobInfo
from peri_tui.core.sanitize import one_line
from peri_tui.tui.screens.question import QuestionScreen

JOB: Final = "job-"
_GLYPHS: Final = {"running": ("▶ ", "$accent"), "exited": ("◐ ", "$warning"), "ended": ("○ ", "$peri-muted")}


def job_options(jobs: Sequence[JobInfo]) -> list[Option]:
    """Return a heading and one row a job, newest first; nothing without jobs."""
    if not jobs:
        return []
    heading = Option(Content.assemble(("Background jobs", "$peri-muted bold")), id=JOB, disabled=True)
    return [heading, *(Option(job_row(job), id=JOB + job.job) for job in reversed(jobs))]


def job_row(job: JobInfo) -> Content:
    """Return one line: state, CPU, memory, what it is."""
    glyph, colour = _GLYPHS.get(job.state, ("? ", "$warning"))
    word = "service" if job.service and job.state != "ended" else job.state
    how = f"  ({job.how})" if job.how and job.state != "running" else ""
    return Content.assemble(
        (glyph, colour),
        (f"{word:<12} ", "$success" if word == "service" else "$peri-muted"),
        (f"{job.job:<4} {_numbers(job):<22} ", "$peri-muted"),
        one_line(job.command, 56) + how,
    )


def _numbers(job: JobInfo) -> str:
    if job.state == "ended":
        return f"pid {job.pid}"
    return f"cpu {job.cpu:.1f} s  {job.rss / 2**20:.0f} MiB"


class QuitScreen(QuestionScreen):
    """Leave, and end what runs on? Default no. Esc stays, too."""

    BINDINGS: ClassVar[Any] = [
        Binding("n", "choose('no')", "No", show=False),
        Binding("y", "choose('yes')", "Yes", show=False),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, services: Sequence[JobInfo], clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._services = services

    def box_title(self) -> str:
        """Return a title of our own words."""
        return "Quit?"

    def compose_box(self) -> Iterable[Widget]:
        """Build the list of what runs, and the buttons."""
        some = "A service runs" if len(self._services) == 1 else f"{len(self._services)} services run"
        yield Static(f"{some} and would end with Peri:", classes="q-title", markup=False)
        with VerticalScroll(classes="q-detail", can_focus=False):
            rows = [Content(f"  {_said(job)}") for job in self._services]
            yield Static(Content("\n").join(rows))
        yield Static("Ctrl+Q again ends what runs and leaves now.", classes="q-facts", markup=False)
        with Horizontal(classes="q-buttons"):
            yield Button("Stay  n", id="deny", name="no", compact=True)
            yield Button("End and quit  y", id="once", name="yes", compact=True)


def _said(job: JobInfo) -> str:
    return f"{job.job}  pid {job.pid}  {one_line(job.command, 90)}"
