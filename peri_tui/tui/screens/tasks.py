"""The list of tasks and background jobs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Final

from textual.binding import Binding
from textual.content import Content
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from peri_tui.core.messages import JobInfo
from peri_tui.core.sanitize import one_line
from peri_tui.tui.job_desk import JobDesk
from peri_tui.tui.screens.jobs import JOB, job_options
from peri_tui.tui.screens.overlay import Overlay
from peri_tui.tui.view_model import ViewState
from peri_tui.tui.words import task_glyph, task_word

REFRESH_S: Final = 1.0


class TasksScreen(Overlay[str | None]):
    """All tasks of the session, newest first; Enter shows one in bar and strip. Below them, the background jobs.

    Args:
        view: what the screen knows.
        clock: monotonic nanoseconds.
        jobs: lists, promotes and stops jobs.
        spawn: runs a coroutine as a task of the app.
        say: shows a short notice.
    """

    BINDINGS: ClassVar[Any] = [
        Binding("ctrl+t,q", "dismiss(None)", "Close", show=False),
        Binding("s", "job('stop')", "Stop the job", show=False),
        Binding("p", "job('promote')", "Keep the job as a service", show=False),
    ]

    def __init__(
        self,
        view: ViewState,
        clock: Callable[[], int],
        *,
        jobs: JobDesk,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(clock)
        self._view = view
        self._desk = jobs
        self._spawn = spawn
        self._say = say
        self._jobs: Sequence[JobInfo] = ()

    def box_title(self) -> str:
        """Return the title."""
        return "Tasks"

    def compose_box(self) -> Iterable[Widget]:
        """Build the list."""
        yield OptionList(*self._task_options(), id="task-options", markup=False)
        keys = Static("s stop the job   p keep it as a service that outlives its task", id="job-keys")
        keys.display = False
        yield keys

    def on_mount(self) -> None:
        """Ask for the jobs now and then: their numbers change."""
        self._refresh_jobs()
        self.set_interval(REFRESH_S, self._refresh_jobs)

    def _task_options(self) -> list[Option]:
        options = [
            Option(
                Content.assemble(
                    ("○ ", "$peri-muted"), ("waiting      ", "$peri-muted"), one_line(prompt, 60)
                ),
                disabled=True,
            )
            for prompt in self._view.queued
        ]
        for task in reversed(list(self._view.tasks.values())):
            glyph, colour = task_glyph(task)
            row = Content.assemble(
                (f"{glyph} ", colour), (f"{task_word(task):<12} ", "$peri-muted"), one_line(task.prompt, 60)
            )
            options.append(Option(row, id=task.task))
        return options or [Option("No task yet.", disabled=True)]

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show the chosen task; a job is acted on by its keys."""
        if not (event.option_id or "").startswith(JOB):
            self.dismiss(event.option_id)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _refresh_jobs(self) -> None:
        self._spawn(self._load())

    async def _load(self) -> None:
        jobs = await self._desk.list()
        if self.is_attached:
            self._show(jobs)

    def _show(self, jobs: Sequence[JobInfo]) -> None:
        if list(jobs) == list(self._jobs):
            return
        same = [job.job for job in jobs] == [job.job for job in self._jobs]
        self._jobs = jobs
        rows = self.query_one("#task-options", OptionList)
        options = job_options(jobs)
        if same:
            for option in options[1:]:
                rows.replace_option_prompt(option.id or "", option.prompt)
            return
        marked = rows.highlighted_option.id if rows.highlighted_option is not None else None
        rows.clear_options()
        rows.add_options([*self._task_options(), *options])
        known = {option.id for option in rows.options}
        if marked in known and marked is not None:
            rows.highlighted = rows.get_option_index(marked)
        self.query_one("#job-keys").display = bool(jobs)

    def action_job(self, action: str) -> None:
        """Stop the job under the cursor, or make it a service."""
        option = self.query_one("#task-options", OptionList).highlighted_option
        name = (option.id or "").removeprefix(JOB) if option is not None else ""
        job = next((job for job in self._jobs if job.job == name), None)
        if job is not None and job.state != "ended":
            self._spawn(self._act(job, action))

    async def _act(self, job: JobInfo, action: str) -> None:
        trouble = await self._desk.act(job, action)
        done = "stopped" if action == "stop" else "kept as a service: it outlives its task"
        self._say(f"{job.job}: {trouble}" if trouble else f"{job.job} {done}")
        await self._load()
