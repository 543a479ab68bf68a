"""The one pure function that changes what the screen knows.

``reduce`` takes the state, an event of the wire or a local fact, and the monotonic time, and returns the next state.
A lamp turns *ok* on evidence only: the agent's acknowledgement, a trace record of its layer that says what was seen,
and at last the evidence in ``task.end``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from peri_tui.core.messages import (
    Asked,
    CancelNoop,
    Delta,
    FileChanged,
    JobChanged,
    Progressed,
    Resolved,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    ToolEnded,
    ToolStarted,
    Traced,
    UsageCounted,
)
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.tui.view_model import (
    DARK,
    Acknowledged,
    CancelLost,
    ChangedFile,
    Fact,
    Known,
    Lamp,
    LampState,
    LinkChanged,
    Painted,
    Pressed,
    Submitted,
    TaskView,
    Ticked,
    ViewState,
    five,
    light,
)

# A press whose feedback was painted later than this is a failure of layer 1, whatever the other layers did.
PAINT_LIMIT_MS: Final = 2000.0
# A layer that says nothing for this long after the press is shown as silent (the agent's own deadlines are shorter).
SILENCE_LIMIT_MS: Final = 10_000.0
RATE_WINDOW_S: Final = 3.0


def reduce(state: ViewState, event: TaskEvent | Fact, now: int) -> ViewState:
    """Return the state after ``event``, seen at ``now`` (monotonic nanoseconds). Pure; unknown tasks are added."""
    match event:
        case Submitted():
            fresh = TaskView(event.task, prompt=event.prompt, started=now, alive=now)
            return replace(state.with_task(fresh), shown=event.task, card="")
        case Known():
            return _known(state, event, now)
        case LinkChanged():
            return replace(state, link=event.state, link_detail=event.detail)
        case Ticked():
            return _ticked(state, now)
        case Acknowledged():
            return _update(state, event.answer.task, lambda task: _acknowledged(task, event))
        case CancelLost():
            return _update(state, event.task, lambda task: _cancel_lost(task, event))
        case Pressed():
            return _update(state, event.task, lambda task: _pressed(task, event))
        case Painted():
            return _update(state, event.task, lambda task: _painted(task, event))
        case _:
            return _task_event(state, event, now)


def _update(state: ViewState, name: str, change: Any) -> ViewState:
    task = state.tasks.get(name)
    return state if task is None else state.with_task(change(task))


def _known(state: ViewState, event: Known, now: int) -> ViewState:
    tasks = dict(state.tasks)
    for item in event.tasks:
        if item.task in tasks:
            continue
        word = TaskState(item.state)
        end = None
        if word.is_final or word is TaskState.CANCEL_FAILED:
            end = TaskEnded(task=item.task, state=item.state, stop_reason=item.stop_reason)
        tasks[item.task] = TaskView(
            item.task, prompt=item.prompt, state=word, confirmed=True, started=now, alive=now, end=end
        )
    shown = state.shown or next(reversed(tasks), "")
    return replace(state, tasks=tasks, shown=shown, ask_trust=event.ask_trust)


def _ticked(state: ViewState, now: int) -> ViewState:
    task = state.running
    if task is None or not task.pressed or (now - max(task.pressed, task.alive)) / 1e6 < SILENCE_LIMIT_MS:
        return state
    lamps = tuple(
        replace(lamp, state=LampState.FAILED, words="silent", said="says nothing since 10 s")
        if lamp.state in (LampState.PENDING, LampState.ACTIVE)
        else lamp
        for lamp in task.lamps
    )
    return state if lamps == task.lamps else state.with_task(replace(task, lamps=five(lamps)))


def _pressed(task: TaskView, event: Pressed) -> TaskView:
    if event.mode == "force":
        return replace(task, forced=True)
    if task.pressed or (task.end is not None and not task.end.stop_reason):
        return task
    if task.end is not None:
        # The loop learned of the press after the end: the press was taken by the lane, this screen was late.
        by_it = task.end.stop_reason == "user"
        task = replace(task, pressed=event.mono)
        said = "delivered: the task ended by it" if by_it else "the task had ended already"
        task = light(task, Layer.CLIENT, LampState.OK, "", said, event.mono)
        return light(task, Layer.UI, LampState.ACTIVE, "", "key taken", event.mono)
    task = replace(task, pressed=event.mono, lamps=DARK)
    task = light(task, Layer.UI, LampState.ACTIVE, "", "key taken", event.mono)
    return light(task, Layer.CLIENT, LampState.ACTIVE, "sending", "sending", event.mono)


def _painted(task: TaskView, event: Painted) -> TaskView:
    if not task.pressed or task.lamps[0].state is LampState.OK:
        return task
    late = (event.mono - task.pressed) / 1e6
    if late > PAINT_LIMIT_MS:
        said = f"the screen was blocked: shown after {late / 1000:.1f} s"
        return light(task, Layer.UI, LampState.FAILED, "blocked", said, event.mono)
    return light(task, Layer.UI, LampState.OK, "", "key taken, shown", event.mono)


def _acknowledged(task: TaskView, event: Acknowledged) -> TaskView:
    answer = event.answer
    if isinstance(answer, CancelNoop):
        said = f"nothing to stop: the task is {answer.state}"
        return light(task, Layer.CLIENT, LampState.OK, "", said, event.mono)
    plural = "" if event.attempts == 1 else "s"
    said = f"accepted by the agent, {event.attempts} attempt{plural}"
    if answer.routed:
        said += f", routed to {answer.routed}"
    task = replace(task, cut_seq=answer.cut_seq or task.cut_seq, cancel_id=answer.cancel_id)
    if task.lamps[1].state is LampState.OK:
        return task
    return light(task, Layer.CLIENT, LampState.OK, "", said, event.mono)


def _cancel_lost(task: TaskView, event: CancelLost) -> TaskView:
    if task.lamps[1].state is LampState.OK:
        return task
    return light(task, Layer.CLIENT, LampState.FAILED, "no answer", event.why, event.mono)


# --- events of the wire ------------------------------------------------------------------------------------------------


def _task_event(state: ViewState, event: TaskEvent, now: int) -> ViewState:
    task = state.tasks.get(event.task)
    if task is None:
        task = TaskView(event.task, started=now, alive=now)
        state = replace(state, shown=state.shown or event.task)
    if event.seq and event.seq <= task.seq and not isinstance(event, TaskEnded):
        return state
    was_over = task.is_over
    task = replace(task, seq=max(task.seq, event.seq), alive=now)
    task = _apply(task, event, now)
    state = state.with_task(task)
    # What was over when this screen came is history: it raises no card and holds nothing.
    return _ended_state(state, task) if isinstance(event, TaskEnded) and not was_over else state


def _apply(task: TaskView, event: TaskEvent, now: int) -> TaskView:
    match event:
        case TaskStateChanged():
            return _state_changed(task, event, now)
        case Delta():
            return _delta(task, event)
        case ToolStarted():
            return replace(task, produced=True, doing=event.name, detail=event.summary)
        case ToolEnded():
            return _tool_ended(task, event)
        case FileChanged():
            return _file_changed(task, event)
        case UsageCounted():
            return _usage(task, event, now)
        case Progressed():
            return replace(
                task, step=event.step, doing=event.doing, detail=event.detail, cpu=event.cpu, rss=event.rss,
                processes=event.processes,
            )  # fmt: skip
        case JobChanged():
            others = tuple(job for job in task.jobs if job.job != event.job)
            return replace(task, jobs=(*others, event))
        case Asked():
            return replace(task, question=event)
        case Resolved():
            return replace(task, question=None)
        case Traced():
            return _traced(task, event)
        case TaskEnded():
            return _ended(task, event, now)


def _state_changed(task: TaskView, event: TaskStateChanged, now: int) -> TaskView:
    word = TaskState(event.state)
    running = word is TaskState.RUNNING and task.state is TaskState.QUEUED
    question = task.question if word in (TaskState.WAITING, TaskState.RUNNING) else None
    if word is TaskState.CANCELLING and task.end is not None and task.end.seq:
        # A retry of a stop that could not be verified: a new attempt, with new lamps.
        task = replace(task, end=None, pressed=now if task.pressed else 0, lamps=DARK)
        if task.pressed:
            task = light(task, Layer.UI, LampState.ACTIVE, "", "key taken", now)
            task = light(task, Layer.CLIENT, LampState.OK, "", "accepted by the agent", now)
    return replace(
        task, state=word, confirmed=True, prompt=event.prompt or task.prompt, question=question,
        started=now if running else task.started, cut_seq=event.cut_seq or task.cut_seq,
    )  # fmt: skip


def is_cut(task: TaskView | None, event: Delta) -> bool:
    """Tell whether this text was produced after the cut of a stop: counted, never shown."""
    return task is not None and task.cut_seq > 0 and event.seq > task.cut_seq


def _delta(task: TaskView, event: Delta) -> TaskView:
    if is_cut(task, event):
        return replace(task, dropped=task.dropped + 1)
    return task if task.produced or event.ch == "notice" else replace(task, produced=True)


def _tool_ended(task: TaskView, event: ToolEnded) -> TaskView:
    if not event.diff:
        return task
    path = diff_path(event.diff)
    files = tuple(replace(item, diff=event.diff) if item.path == path else item for item in task.files)
    if path and all(item.path != path for item in files):
        files = (*files, ChangedFile(path, "modified", "edit", diff=event.diff))
    return replace(task, files=files)


def diff_path(diff: str) -> str:
    """Return the path that a unified diff is about (its ``+++`` line, else ``---``), or an empty text."""
    for mark in ("+++ ", "--- "):
        for line in diff.splitlines()[:6]:
            if line.startswith(mark) and not line.startswith(mark + "/dev/null"):
                name = line[4:].split("\t")[0]
                return name[2:] if name[:2] in ("a/", "b/") else name
    return ""


def _file_changed(task: TaskView, event: FileChanged) -> TaskView:
    old = next((item for item in task.files if item.path == event.path), None)
    diff = old.diff if old else ""
    changed = ChangedFile(event.path, event.kind, event.by, event.added, event.removed, diff)
    if old is None:
        return replace(task, files=(*task.files, changed))
    return replace(task, files=tuple(changed if item is old else item for item in task.files))


def _usage(task: TaskView, event: UsageCounted, now: int) -> TaskView:
    since, before = task.rate_mark
    rate, mark = task.rate, task.rate_mark
    seconds = (now - since) / 1e9
    if since == 0:
        mark = (now, event.tokens_out)
    elif seconds >= RATE_WINDOW_S / 3:
        rate, mark = max(0.0, (event.tokens_out - before) / seconds), (now, event.tokens_out)
    return replace(
        task,
        tokens_in=event.tokens_in,
        tokens_out=event.tokens_out,
        exact=event.exact,
        rate=rate,
        rate_mark=mark,
    )


_PROOF: Final[dict[Ev, Layer]] = {
    Ev.CAS: Layer.SCHEDULER,
    Ev.MODEL_QUIET: Layer.MODEL,
    Ev.RESOURCES_CLEAN: Layer.ROLLBACK,
}
_WORDS: Final[dict[Ev, str]] = {
    Ev.RECEIVED: "received",
    Ev.TOKEN_SET: "told the task",
    Ev.TASK_UNWOUND: "unwound",
    Ev.SOCKET_SHUTDOWN: "closing",
    Ev.TREE_SIGNALLED: "processes",
    Ev.TREE_EMPTY: "processes gone",
    Ev.TREE_SURVIVED: "processes left",
    Ev.ROLLBACK_BEGUN: "files",
    Ev.ROLLBACK_DONE: "files done",
    Ev.CLEANUP: "cleaning",
}


def _traced(task: TaskView, event: Traced) -> TaskView:
    try:
        ev, layer = Ev(event.ev), Layer(event.layer)
    except ValueError:
        return task  # A newer agent: counted by the client, shown by nobody.
    if layer in (Layer.UI, Layer.CLIENT) or not (task.pressed or task.state is TaskState.CANCELLING):
        return task
    ok = event.data.get("ok", True) is True
    said = str(event.data.get("said", ""))
    if not ok or ev is Ev.TREE_SURVIVED:
        return light(task, layer, LampState.FAILED, _WORDS.get(ev, "failed"), said, event.mono)
    old = task.lamps[layer - 1]
    if _PROOF.get(ev) is layer:
        return light(task, layer, LampState.OK, "", said or old.said, event.mono)
    if old.state in (LampState.OK, LampState.FAILED):
        return task
    words = _count(event.data) or _WORDS.get(ev, old.words)
    return light(task, layer, LampState.ACTIVE, words, said or old.said, event.mono)


def _count(data: Mapping[str, Any]) -> str:
    done, total = data.get("done"), data.get("total")
    return f"{done} of {total} files" if isinstance(done, int) and isinstance(total, int) else ""


def _ended(task: TaskView, event: TaskEnded, now: int) -> TaskView:
    if task.end is not None and task.end.seq == event.seq and task.end == event:
        return task
    task = replace(
        task, state=TaskState(event.state), confirmed=True, question=None, end=event,
        cancel_id=event.cancel_id or task.cancel_id, tokens_in=event.usage.tokens_in or task.tokens_in,
        tokens_out=event.usage.tokens_out or task.tokens_out, exact=event.usage.exact, doing="",
    )  # fmt: skip
    # What was put back is changed no longer.
    back = frozenset(event.files.restored)
    task = replace(task, files=tuple(item for item in task.files if item.path not in back))
    for item in event.evidence:
        if item.layer == Layer.CLIENT and task.pressed and event.stop_reason != "user":
            # Something else ended it: that says nothing of whether our cancel arrived.
            continue
        task = _evidence(task, item.layer, item.ok, item.ms, item.summary, item.missing)
    if event.state == TaskState.CANCELLED and event.verified and not event.evidence and not task.produced:
        # Stopped before it started (queued, or never taken): there is no model, process or file to prove.
        for layer in (Layer.SCHEDULER, Layer.MODEL, Layer.ROLLBACK):
            said = "cancelled before it started" if layer is Layer.SCHEDULER else "was not started"
            task = light(task, layer, LampState.OK, "", said, now)
    if task.pressed and event.stop_reason == "user" and task.lamps[1].state is LampState.ACTIVE:
        # The acknowledgement was overtaken by the end, which says the same: the cancel arrived.
        task = light(task, Layer.CLIENT, LampState.OK, "", "delivered: the task ended by it", now)
    return task


def _evidence(task: TaskView, number: int, ok: bool, ms: float, summary: str, missing: str) -> TaskView:
    try:
        layer = Layer(number)
    except ValueError:
        return task
    old = task.lamps[layer - 1]
    if layer is Layer.UI and task.pressed:
        # Nobody but this process knows what was painted.
        return task
    if layer is Layer.CLIENT and task.pressed:
        # The agent's word that the cancel came is as good as its acknowledgement, but heals nothing we saw fail.
        ok = ok and old.state is not LampState.FAILED
        summary, missing = old.said or summary, missing or old.said
    if task.pressed and old.ms is not None:
        # Counted from the key; the agent counts from the cause that it acted on, which may be a later one.
        ms = max(ms, old.ms)
    words = "" if ok else "failed"
    lamp = Lamp(
        layer, LampState.OK if ok else LampState.FAILED, words, summary if ok else (missing or summary), ms
    )
    return replace(task, lamps=five(tuple(lamp if item.layer is layer else item for item in task.lamps)))


def _ended_state(state: ViewState, task: TaskView) -> ViewState:
    stopped = task.end is not None and bool(task.end.stop_reason or task.pressed)
    if not stopped:
        return state
    # A stop never sends what waits: it is held until the user says so.
    return replace(state, card=task.task, held=state.held or bool(state.queued))
