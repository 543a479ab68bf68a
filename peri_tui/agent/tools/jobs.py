"""job_output and job_stop: looking at a background job of the task, and ending it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.history import bound
from peri_tui.agent.processes.jobs import Job, TaskJobs
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.errors import ToolError

MAX_OUTPUT: Final = 30_000


class JobArgs(msgspec.Struct):
    """Arguments of both tools."""

    job: Annotated[str, Meta(description="The job's id, as shell gave it, such as j1")]


class JobOutput(Tool[JobArgs]):
    """Tells whether a job runs, and what it has printed so far, bounded."""

    name = "job_output"
    description = "See whether a background job still runs, and what it has printed so far."
    arguments = JobArgs

    def summary(self, args: JobArgs) -> str:
        """Return the job's id."""
        return shown(args.job)

    async def run(self, args: JobArgs, ctx: ToolContext) -> ToolResult:
        """Return state and output."""
        job = jobs_of(ctx).find(args.job)
        return ToolResult(report(job), f"{job.id} {job.state}")


class JobStop(Tool[JobArgs]):
    """Ends a job of the task with its whole process tree."""

    name = "job_stop"
    description = "End a background job that you started, with all of its processes."
    arguments = JobArgs

    def summary(self, args: JobArgs) -> str:
        """Return the job's id."""
        return shown(args.job)

    async def run(self, args: JobArgs, ctx: ToolContext) -> ToolResult:
        """End it and say what was proven."""
        jobs = jobs_of(ctx)
        job = jobs.find(args.job)
        was_over = not job.live
        evidence = await jobs.stop(job)
        left = [f"pid {one.pid} {one.command} ({one.reason})" for one in evidence.survivors]
        said = "had ended already" if was_over else f"{len(evidence.ended)} processes ended, {len(left)} left"
        lines = [report(job), f"[{job.id}: {said}]", *(f"[not ended: {line}]" for line in left)]
        return ToolResult("\n".join(lines), f"{job.id}: {said}", ok=not left)


def jobs_of(ctx: ToolContext) -> TaskJobs:
    """Return the task's jobs. Raises ToolError where there can be none."""
    if ctx.jobs is None:
        raise ToolError("background jobs are not available here")
    return ctx.jobs


def report(job: Job) -> str:
    """Return a job's output and its state, as the model reads it."""
    output = bound(job.command.output.text(), MAX_OUTPUT).rstrip("\n") or "(no output)"
    how = f", {job.how}" if job.how and job.state != "running" else ""
    return f"{output}\n[{job.id}: {job.state}{how}, pid {job.command.ref.pid}]"
