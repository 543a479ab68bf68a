"""``peri stop``, ``peri tasks``, ``peri trace``: from another terminal, whatever state the TUI is in.

Plain synchronous code: agents are found by their files and proven by their sockets, asked over HTTP, and where none
lives the state store is read (never written).
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from peri_tui.client.http_route import cancel_over_http, list_over_http
from peri_tui.client.launcher import AgentRecord, living, read_records
from peri_tui.client.mint import fresh_id
from peri_tui.config import Paths
from peri_tui.core.ids import is_ulid
from peri_tui.core.messages import Cancel, CancelAccepted, Failure, TaskSummary
from peri_tui.core.sanitize import one_line
from peri_tui.core.states import EXIT_DONE, EXIT_NOT_CLEAN, EXIT_STOPPED, EXIT_TRY_AGAIN, TaskState
from peri_tui.core.trace import Diagnosis, Ev, Layer, TraceRecord, diagnose
from peri_tui.errors import AgentUnreachable, InputError, StoreUnavailable, UnknownTask
from peri_tui.log import Log, read_trace

HTTP_S: Final = 2.0
END_S: Final = 20.0
_POLL_S: Final = 0.05
_SHOWN: Final = 50
_DONE: Final = frozenset({TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED})


def stop(paths: Paths, *, task: str | None = None, every: bool = False, force: bool = False) -> int:
    """Stop one task or all; waits for the ends and says how each ended.

    Args:
        paths: the user's folders.
        task: its id, or a beginning or end of it that fits one running task only; default: the newest running task.
        every: all running tasks of every agent.
        force: skip every grace period.

    Returns:
        130 all stopped and verified, 0 nothing was running, 74 something is left, 75 an agent does not answer.

    Raises:
        UnknownTask: ``task`` fits no task.
        AgentUnreachable: no agent answers for it.
    """
    agents = living(paths, read_records(paths))
    tasks = _known(paths, agents)
    chosen = _choose(tasks, task, every)
    if not chosen:
        sys.stdout.write("nothing is running\n")
        return EXIT_DONE
    if not agents:
        raise AgentUnreachable("no agent is running; the next start of peri ends and restores what it left")
    log = Log(paths.log / "client.jsonl", paths.trace, f"peri stop {os.getpid()}")
    codes = [_stop_one(paths, log, agents, summary, force) for summary in chosen]
    codes += [_wait(paths, summary) for summary, code in zip(chosen, codes, strict=True) if code == EXIT_DONE]
    return next((code for code in (EXIT_NOT_CLEAN, EXIT_TRY_AGAIN, EXIT_STOPPED) if code in codes), EXIT_DONE)


def _stop_one(
    paths: Paths, log: Log, agents: Sequence[AgentRecord], summary: TaskSummary, force: bool
) -> int:
    pressed = time.monotonic_ns()
    mode = "force" if force else "graceful"
    request = Cancel(id=fresh_id(), task=summary.task, mode=mode, t_ui=pressed)
    log.trace(summary.task, Layer.UI, Ev.PRESSED, mono=pressed, key="peri stop", mode=mode)
    # The owner first; every other agent can route the cancel, or end what a dead owner left.
    for agent in sorted(agents, key=lambda record: record.instance != summary.owner):
        log.trace(summary.task, Layer.CLIENT, Ev.SENT, route="http", attempt=1, id=request.id)
        try:
            answer = cancel_over_http(paths.socket(agent.instance), request, timeout=HTTP_S)
        except AgentUnreachable as error:
            sys.stderr.write(f"peri: {error}\n")
            continue
        return _answered(log, summary, answer)
    sys.stderr.write(f"peri: no agent answered the stop of {summary.task}\n")
    return EXIT_TRY_AGAIN


def _answered(log: Log, summary: TaskSummary, answer: object) -> int:
    if isinstance(answer, Failure):
        sys.stderr.write(f"peri: {summary.task}: {one_line(answer.msg, 200)}\n")
        return EXIT_TRY_AGAIN
    log.trace(
        summary.task, Layer.CLIENT, Ev.ACKED, route="http", attempts=1, said="accepted by agent, 1 attempt"
    )
    if isinstance(answer, CancelAccepted):
        sys.stdout.write(f"stopping {_line(summary)}\n")
    return EXIT_DONE


def _wait(paths: Paths, summary: TaskSummary) -> int:
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        found = next((one for one in _from_store(paths) if one.task == summary.task), None)
        if found is None or found.state in _DONE:
            word = found.state if found is not None else "stopped before it started"
            sys.stdout.write(f"{word} {summary.task}\n")
            return EXIT_STOPPED if found is None or found.state == TaskState.CANCELLED else EXIT_DONE
        if found.state == TaskState.CANCEL_FAILED:
            sys.stdout.write(f"not verified {summary.task}: see 'peri trace {summary.task}'\n")
            return EXIT_NOT_CLEAN
        time.sleep(_POLL_S)
    sys.stdout.write(f"still stopping after {END_S:g} s {summary.task}: see 'peri trace {summary.task}'\n")
    return EXIT_NOT_CLEAN


def _choose(tasks: Sequence[TaskSummary], task: str | None, every: bool) -> list[TaskSummary]:
    running = [one for one in tasks if one.state not in _DONE]
    if every:
        return running
    if task is None:
        return running[:1]
    if is_ulid(task):
        # An id that nobody knows is sent all the same: its submission may be on the way.
        return [next((one for one in tasks if one.task == task), TaskSummary(task=task, state="unknown"))]
    found = [one for one in running if task and (one.task.startswith(task) or one.task.endswith(task))]
    if len(found) != 1:
        raise UnknownTask(f"{task!r} fits {len(found)} running tasks; see 'peri tasks'")
    return found


def list_tasks(paths: Paths, *, as_json: bool = False) -> int:
    """Print running and recent tasks, newest first.

    Raises:
        StoreUnavailable: no agent lives and the state store cannot be read.
    """
    tasks = _known(paths, living(paths, read_records(paths)))[:_SHOWN]
    for summary in tasks:
        line = msgspec.json.encode(summary).decode() if as_json else _line(summary)
        sys.stdout.write(line + "\n")
    if not tasks and not as_json:
        sys.stdout.write("no tasks yet\n")
    return EXIT_DONE


def _line(summary: TaskSummary) -> str:
    when = time.strftime("%m-%d %H:%M", time.localtime(summary.created)) if summary.created else "-"
    reason = f" ({summary.stop_reason})" if summary.stop_reason else ""
    return (
        f"{summary.task}  {when}  {summary.state}{reason}  {one_line(summary.prompt, 60)}"
        f"  {one_line(summary.workspace, 60)}".rstrip()
    )


def _known(paths: Paths, agents: Sequence[AgentRecord]) -> list[TaskSummary]:
    found: dict[str, TaskSummary] = {}
    for agent in agents:
        try:
            for summary in list_over_http(paths.socket(agent.instance), timeout=HTTP_S):
                found.setdefault(summary.task, summary)
        except AgentUnreachable as error:
            sys.stderr.write(f"peri: {error}\n")
    if not found:
        found = {summary.task: summary for summary in _from_store(paths)}
    return sorted(found.values(), key=lambda summary: (summary.created, summary.task), reverse=True)


def _from_store(paths: Paths) -> list[TaskSummary]:
    if not paths.db.exists():
        return []
    try:
        db = sqlite3.connect(f"file:{_quoted(paths.db)}?mode=ro", uri=True, timeout=HTTP_S)
        try:
            rows = db.execute(
                "SELECT task, state, prompt, workspace, session, stop_reason, owner, created, ended FROM tasks"
                " ORDER BY created DESC LIMIT 500"
            ).fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{paths.db}: cannot be read: {error}") from None
    return [_summary(row) for row in rows]


def _summary(row: Sequence[Any]) -> TaskSummary:
    task, state, prompt, workspace, session, reason, owner, created, ended = row
    return TaskSummary(
        task=task, state=state, prompt=prompt[:200], workspace=workspace, session=session,
        stop_reason=reason or "", owner=owner if state not in _DONE else "", created=created, ended=ended or 0,
    )  # fmt: skip


def _quoted(file: Path) -> str:
    return str(file).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


# --- the trace ------------------------------------------------------------------------------------------------------


def show_trace(paths: Paths, *, task: str | None = None, as_json: bool = False) -> int:
    """Print what each layer did in a stop, and the first layer that did not answer.

    Args:
        paths: the user's folders.
        task: its id; default: the last stop.
        as_json: one JSON object: layers, failed layer, records.

    Returns:
        0 when every layer acknowledged, 74 when one did not.

    Raises:
        UnknownTask: no such trace, or no stop yet.
        InputError: ``task`` is no id.
    """
    name = _last_stop(paths) if task is None else task
    if not is_ulid(name):
        raise InputError(f"{name!r} is no task id") if name else UnknownTask("nothing was stopped yet")
    records = read_trace(paths.trace, name)
    if not records:
        raise UnknownTask(f"task {name} has no trace: it was never stopped, or is not known here")
    found = diagnose(records, headless=_is_headless(records))
    sys.stdout.write(_as_json(name, records, found) if as_json else _as_text(name, records, found))
    return EXIT_DONE if found.complete else EXIT_NOT_CLEAN


def _last_stop(paths: Paths) -> str:
    def age(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:
            return 0.0

    for file in sorted(paths.trace.glob("*.jsonl"), key=age, reverse=True):
        if is_ulid(file.stem) and any(
            record.ev == Ev.PRESSED for record in read_trace(paths.trace, file.stem)
        ):
            return file.stem
    return ""


def _is_headless(records: Sequence[TraceRecord]) -> bool:
    # A signal or ``peri stop`` is no key: there is no screen that has to paint.
    keys = {str(record.data.get("key", "")) for record in records if record.ev == Ev.PRESSED}
    return bool(keys) and keys <= {"SIGINT", "SIGTERM", "peri stop"}


def _as_json(task: str, records: Sequence[TraceRecord], found: Diagnosis) -> str:
    value = {
        "task": task,
        "complete": found.complete,
        "failed": found.failed.title if found.failed is not None else None,
        "missing": found.missing,
        "last_before": found.last_before,
        "elapsed_ms": round(found.elapsed_ms, 3),
        "layers": found.layers,
        "records": list(records),
    }
    return msgspec.json.encode(value).decode() + "\n"


def _as_text(task: str, records: Sequence[TraceRecord], found: Diagnosis) -> str:
    start = next((record.mono for record in records if record.ev == Ev.PRESSED), records[0].mono)
    lines = [f"task {task}"]
    for lamp in found.layers:
        ms = "" if lamp.ms is None else f"{lamp.ms:8.1f} ms"
        lines.append(
            f"  {'ok  ' if lamp.ok else 'FAIL'} {Layer(lamp.layer).title:<9} {ms:>11}  {lamp.said or lamp.missing}".rstrip()
        )
    if found.failed is not None:
        lines.append(f"{found.failed.title} did not answer: {found.missing}")
        lines.append(f"last before the gap: {found.last_before}, {found.elapsed_ms:.1f} ms after the press")
    for record in records:
        data = " ".join(f"{key}={one_line(str(value), 80)}" for key, value in record.data.items())
        lines.append(
            f"{(record.mono - start) / 1e6:10.1f} ms  {Layer(record.layer).title:<9} {record.ev:<16} {data}".rstrip()
        )
    return "\n".join(lines) + "\n"
