"""The words of the stop card, as a pure function of a task: what may be said, and nothing more.

*Stopped* is a word that only ``TaskView.verified`` unlocks. *As it was* is a sentence that only a verified rollback
without any path left aside unlocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peri_tui.core.messages import Files, TaskEnded
from peri_tui.core.states import TaskState
from peri_tui.tui.view_model import Lamp, LampState, TaskView, files_of

GLYPHS: Final[dict[LampState, str]] = {
    LampState.PENDING: "○",
    LampState.ACTIVE: "◐",
    LampState.OK: "✓",
    LampState.FAILED: "✗",
}
PATHS_SHOWN: Final = 6
_REASONS: Final[dict[str, str]] = {
    "limit_turns": "the limit of turns was reached",
    "limit_tokens": "the limit of tokens was reached",
    "limit_seconds": "the limit of seconds was reached",
    "silence": "the model was silent for too long",
    "model_error": "the model failed",
    "internal_error": "an error inside the agent",
    "owner_lost": "its agent process died",
    "agent_killed": "its agent process was killed",
    "disconnect": "the screen was gone",
    "shutdown": "the agent was shut down",
}


@dataclass(frozen=True, slots=True)
class StopReport:
    """What the card shows. ``tone``: ok, warn or fail; ``files``, ``residue`` and ``ended`` are lines of untrusted text.

    ``ended``: each process that was ended, with the signal that did it. ``services``: what runs on, by the user's wish.
    """

    title: str
    tone: str
    lamps: tuple[Lamp, ...]
    files: tuple[str, ...]
    residue: tuple[str, ...]
    can_force: bool
    ended: tuple[str, ...] = ()
    services: tuple[str, ...] = ()


def duration(ms: float | None) -> str:
    """Return milliseconds as people read them: ``4 ms``, ``310 ms``, ``5.0 s``; empty for none."""
    if ms is None:
        return ""
    return f"{ms / 1000:.1f} s" if ms >= 999.5 else f"{ms:.0f} ms"


def clock(seconds: float) -> str:
    """Return a running time as ``00:42``, from an hour on ``1:00:42``."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02d}:{rest % 60:02d}"
    return f"{hours}:{text}" if hours else text


def report(task: TaskView) -> StopReport:
    """Return the card of a task that is over.

    Raises:
        ValueError: the task is not over; there is nothing that may be said yet.
    """
    end = task.end
    if end is None:
        raise ValueError(f"task {task.task} is not over")
    return StopReport(
        title=headline(task, end),
        tone=_tone(task, end),
        lamps=task.concerned if task.pressed else task.lamps,
        files=_files(task, end),
        residue=tuple(end.residue),
        can_force=end.state == TaskState.CANCEL_FAILED,
        ended=tuple(end.killed) if end.state != TaskState.COMPLETED else (),
        services=tuple(end.services),
    )


def headline(task: TaskView, end: TaskEnded) -> str:
    """Return the first line of the card."""
    if end.state == TaskState.COMPLETED:
        return "Finished before the stop took effect"
    if not task.verified:
        return "Not verified · " + _gap(task)
    if end.state == TaskState.FAILED:
        return f"Failed · {_reason(end)} · verified clean"
    seconds = _seconds(task, end)
    took = f" in {seconds:.2f} s" if seconds else ""
    why = "" if end.stop_reason in ("user", "") else f" · {_reason(end)}"
    return f"Stopped{took} · verified{why}"


def _seconds(task: TaskView, end: TaskEnded) -> float:
    if not task.pressed or end.stop_reason in ("user", ""):
        return end.stop_seconds
    # What ended it was not the press itself but what followed from it: the user's time began with the key.
    return max([end.stop_seconds, *((lamp.ms or 0.0) / 1e3 for lamp in task.lamps[2:])])


def _gap(task: TaskView) -> str:
    lamp = task.waits_for()
    if lamp is not None:
        return f"{lamp.layer.title}: {lamp.said or 'no evidence came'}"
    return "the agent could not prove the end"


def _reason(end: TaskEnded) -> str:
    return _REASONS.get(end.stop_reason, end.message or end.stop_reason or "an error")


def _tone(task: TaskView, end: TaskEnded) -> str:
    if end.state == TaskState.COMPLETED:
        return "ok"
    if not task.verified:
        return "fail"
    files = files_of(task)
    return "warn" if files.not_restored or files.conflicts or end.state == TaskState.FAILED else "ok"


def _files(task: TaskView, end: TaskEnded) -> tuple[str, ...]:
    files = files_of(task)
    lines = []
    if _as_it_was(task, end, files):
        return (
            (f"{_count(files.restored)} restored. The workspace is as it was.",)
            if files.restored
            else ("No file was touched.",)
        )
    if files.restored:
        lines.append(f"{_count(files.restored)} restored")
    if files.not_restored:
        lines.append(
            f"{_count(files.not_restored)} not restored, changed by commands: {_names(files.not_restored)}"
        )
    if files.conflicts:
        lines.append(
            f"{_count(files.conflicts)} changed by you meanwhile, left as yours: {_names(files.conflicts)}"
        )
    if files.kept:
        lines.append(f"{_count(files.kept)} kept as the task left them: {_names(files.kept)}")
    return tuple(lines)


def _as_it_was(task: TaskView, end: TaskEnded, files: Files) -> bool:
    aside = files.not_restored or files.conflicts or files.kept or end.residue
    shell = any(item.by == "shell" for item in task.files)
    return task.verified and end.state == TaskState.CANCELLED and not aside and not shell


def _count(paths: list[str]) -> str:
    return "1 file" if len(paths) == 1 else f"{len(paths)} files"


def _names(paths: list[str]) -> str:
    more = len(paths) - PATHS_SHOWN
    return ", ".join(paths[:PATHS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def as_text(task: TaskView) -> str:
    """Return the whole report as plain lines, for the clipboard and the conversation."""
    card = report(task)
    lines = [card.title, f"task {task.task}"]
    lines += [
        f"{lamp.layer.title:<10} {GLYPHS[lamp.state]} {duration(lamp.ms):>7}  {lamp.said}".rstrip()
        for lamp in card.lamps
    ]
    ended = (f"ended: {line}" for line in card.ended)
    kept = (f"kept as a service: {line}" for line in card.services)
    return "\n".join([*lines, *card.files, *(f"left: {line}" for line in card.residue), *ended, *kept])
