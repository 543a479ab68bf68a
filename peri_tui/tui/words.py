"""Glyph, colour and word of a task's state: the same everywhere."""

from __future__ import annotations

from peri_tui.core.states import TaskState
from peri_tui.tui.view_model import TaskView


def task_glyph(task: TaskView) -> tuple[str, str]:
    """Return the glyph and its colour."""
    if task.end is None:
        if task.is_stopping:
            return "◐", "$accent"
        if task.state is TaskState.WAITING:
            return "?", "$warning"
        return ("○", "$peri-muted") if task.state is TaskState.QUEUED else ("●", "$accent")
    if task.end.state == TaskState.COMPLETED:
        return "✓", "$success"
    if task.end.state == TaskState.FAILED:
        return "✗", "$error"
    return ("■", "$peri-muted") if task.end.seq == 0 or task.verified else ("✗", "$error")


def task_word(task: TaskView) -> str:
    """Return the word."""
    if task.end is None:
        return "stopping" if task.is_stopping else task.state.value
    if task.end.state == TaskState.CANCELLED:
        return "stopped" if task.end.seq == 0 or task.verified else "not verified"
    return {TaskState.COMPLETED: "done", TaskState.FAILED: "failed"}.get(
        TaskState(task.end.state), "not verified"
    )
