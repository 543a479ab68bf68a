"""The embedded state store: one SQLite file in WAL mode, shared by the agents of one user.

A transaction that makes a stop or an end durable is synced to the disk (``synchronous=FULL``); the others survive the
kill of the process, but not a power cut (``NORMAL``).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from peri_tui.agent.scheduler import schema
from peri_tui.agent.scheduler.schema import INSTANCE_COLUMNS, TASK_COLUMNS, instance_row, task_row
from peri_tui.agent.scheduler.sqlite_thread import SqliteThread
from peri_tui.agent.scheduler.store import (
    OPEN_STATES,
    TOMBSTONE_KEPT_S,
    CancelKind,
    CancelResult,
    InstanceRow,
    TaskRow,
    content_of,
    never_started_end,
)
from peri_tui.core.messages import (
    Submit,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    decode_event,
    encode,
)
from peri_tui.core.states import FINAL, Refusal, StopReason, TaskState, TaskVersion
from peri_tui.errors import (
    Conflict,
    IllegalTransition,
    StaleEpoch,
    StaleVersion,
    UnknownTask,
)

_SYNCED: Final = FINAL | {TaskState.CANCELLING, TaskState.CANCEL_FAILED}
_OPEN: Final = ", ".join(f"'{state}'" for state in OPEN_STATES)


class SqliteStore:
    """``StateStore`` on one file.

    Args:
        path: the file; its folder must exist. Created with mode 0600.
        clock: wall-clock seconds, for the times in the rows.
        busy_ms: how long one operation waits for another process before it gives up.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, busy_ms: int = 2000) -> None:
        self._clock = clock
        self._file = SqliteThread(path, busy_ms=busy_ms)
        self._write = self._file.write
        self._read = self._file.read

    async def open(self) -> None:
        """Connect, and create what is missing.

        Raises:
            StoreUnavailable: the file cannot be opened, is no store, or was written by a newer Peri.
        """
        await self._file.open(schema.create)

    async def close(self) -> None:
        """Finish what was asked, then disconnect. Closing twice is harmless."""
        await self._file.close()

    # --- agents -----------------------------------------------------------------------------------------------------

    async def register(self, instance: InstanceRow) -> None:
        """Make an agent known."""
        values = (
            instance.instance, instance.pid, instance.start_time, instance.boot_id, instance.workspace,
            instance.socket, instance.started, int(instance.orphaned),
        )  # fmt: skip
        sql = f"INSERT OR REPLACE INTO instances ({INSTANCE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        await self._write(lambda db: db.execute(sql, values))

    async def unregister(self, instance: str) -> bool:
        """Forget an agent that owns nothing open. False: it does, so a successor must be able to find it."""
        owned = f"SELECT 1 FROM tasks WHERE owner = ? AND state IN ({_OPEN})"
        sql = f"DELETE FROM instances WHERE instance = ? AND NOT EXISTS ({owned})"

        def work(db: sqlite3.Connection) -> bool:
            db.execute(sql, (instance, instance))
            return db.execute("SELECT 1 FROM instances WHERE instance = ?", (instance,)).fetchone() is None

        return await self._write(work)

    async def set_orphaned(self, instance: str, orphaned: bool) -> None:
        """Record whether an agent lost its client."""
        sql = "UPDATE instances SET orphaned = ? WHERE instance = ?"
        await self._write(lambda db: db.execute(sql, (int(orphaned), instance)))

    async def instances(self) -> list[InstanceRow]:
        """Return all known agents, oldest first."""
        sql = f"SELECT {INSTANCE_COLUMNS} FROM instances ORDER BY started, instance"
        return await self._read(lambda db: [instance_row(row) for row in db.execute(sql)])

    # --- tasks ------------------------------------------------------------------------------------------------------

    async def submit(self, submit: Submit, owner: str) -> TaskRow:
        """Queue a task durably; see the contract."""
        return await self._write(lambda db: self._submit(db, submit, owner))

    async def get(self, task: str) -> TaskRow | None:
        """Return a task, or None when the id is unknown."""
        return await self._read(lambda db: _find(db, task))

    async def transition(
        self,
        task: str,
        to: TaskState,
        *,
        version: int,
        epoch: int,
        event: TaskStateChanged,
        reason: str | None = None,
        cancel_id: str | None = None,
    ) -> TaskRow:
        """Take one arrow with its event; see the contract."""

        def work(db: sqlite3.Connection) -> TaskRow:
            row = _checked(db, task, to, version, epoch)
            changes: dict[str, Any] = {"stop_reason": reason, "cancel_id": cancel_id}
            changes = {key: value for key, value in changes.items() if value is not None}
            if to is TaskState.RUNNING and not row.started:
                changes["started"] = self._clock()
            return self._move(db, row, to, [event], **changes)[0]

        return await self._write(work, synced=to in _SYNCED)

    async def request_cancel(
        self, task: str, *, reason: StopReason, cancel_id: str, mode: str = "graceful"
    ) -> CancelResult:
        """Make a stop durable, whatever the task's state is; see the contract."""
        return await self._write(lambda db: self._cancel(db, task, reason, cancel_id, mode), synced=True)

    async def append(self, task: str, events: Sequence[TaskEvent], *, epoch: int) -> list[TaskEvent]:
        """Append events and return them numbered; see the contract."""

        def work(db: sqlite3.Connection) -> list[TaskEvent]:
            row = _known(db, task)
            if row.epoch != epoch:
                raise StaleEpoch(f"task {task} has another owner (epoch {row.epoch}, not {epoch})")
            if row.has_ended:
                raise IllegalTransition(f"task {task} has ended ({row.state}), no event can follow")
            numbered = _insert(db, task, events, row.last_seq, self._clock())
            db.execute("UPDATE tasks SET last_seq = ? WHERE task = ?", (row.last_seq + len(numbered), task))
            return numbered

        return await self._write(work)

    async def finish(
        self,
        task: str,
        to: TaskState,
        end: TaskEnded,
        *,
        version: int,
        epoch: int,
        history: list[dict[str, Any]] | None = None,
    ) -> TaskRow:
        """Record the end, its event and the conversation in one transaction; see the contract."""

        def work(db: sqlite3.Connection) -> TaskRow:
            row = _checked(db, task, to, version, epoch)
            if history is not None:
                body = msgspec.json.encode(history)
                db.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?)", (row.session, body))
            return self._end(db, row, to, end)[0]

        return await self._write(work, synced=True)

    async def events(self, task: str, after: int = 0, limit: int = 1000) -> list[TaskEvent]:
        """Return the events with ``seq`` above ``after``, oldest first."""
        sql = "SELECT body FROM events WHERE task = ? AND seq > ? ORDER BY seq LIMIT ?"
        bodies = await self._read(lambda db: [row[0] for row in db.execute(sql, (task, after, limit))])
        return [decode_event(body) for body in bodies]

    async def history(self, session: str) -> list[dict[str, Any]]:
        """Return the conversation of a session; empty when there is none."""
        sql = "SELECT body FROM conversations WHERE session = ?"
        found = await self._read(lambda db: db.execute(sql, (session,)).fetchone())
        return msgspec.json.decode(found[0], type=list[dict[str, Any]]) if found else []

    async def tasks(
        self, *, workspace: str | None = None, session: str | None = None, limit: int = 100
    ) -> list[TaskRow]:
        """Return the newest ``limit`` tasks, oldest first."""
        wanted = {"workspace": workspace, "session": session}
        wanted = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in wanted) or "1"
        sql = f"SELECT {TASK_COLUMNS} FROM tasks WHERE {where} ORDER BY number DESC LIMIT ?"
        found = await self._read(lambda db: db.execute(sql, (*wanted.values(), limit)).fetchall())
        return [task_row(row) for row in reversed(found)]

    async def unacked_ends(self, session: str) -> list[TaskEnded]:
        """Return the ends that no client of the session has acknowledged, oldest first."""
        sql = (
            "SELECT body FROM tasks JOIN events ON events.task = tasks.task AND seq = end_seq "
            "WHERE session = ? AND end_seq > 0 AND NOT end_acked ORDER BY number"
        )
        bodies = await self._read(lambda db: [row[0] for row in db.execute(sql, (session,))])
        return [end for end in map(decode_event, bodies) if isinstance(end, TaskEnded)]

    async def ack_end(self, task: str) -> None:
        """Record that a client has applied the end. An unknown task is ignored."""
        await self._write(lambda db: db.execute("UPDATE tasks SET end_acked = 1 WHERE task = ?", (task,)))

    async def last_session(self, workspace: str) -> str | None:
        """Return the session of the workspace's newest task."""
        sql = "SELECT session FROM tasks WHERE workspace = ? ORDER BY number DESC LIMIT 1"
        found = await self._read(lambda db: db.execute(sql, (workspace,)).fetchone())
        return str(found[0]) if found else None

    async def take_over(self, dead_instance: str, new_owner: str) -> list[TaskRow]:
        """Give a dead agent's unfinished tasks to ``new_owner``; see the contract."""
        sql = (
            f"SELECT {TASK_COLUMNS} FROM tasks WHERE owner = ? "
            f"AND state IN ({_OPEN}, '{TaskState.CANCEL_FAILED}') ORDER BY number"
        )

        def work(db: sqlite3.Connection) -> list[TaskRow]:
            rows = [task_row(row) for row in db.execute(sql, (dead_instance,)).fetchall()]
            db.execute("DELETE FROM instances WHERE instance = ?", (dead_instance,))
            return [self._adopt(db, row, new_owner) for row in rows]

        return await self._write(work, synced=True)

    async def cancelling_of(self, owner: str) -> list[TaskRow]:
        """Return the owner's tasks that are to be stopped."""
        sql = f"SELECT {TASK_COLUMNS} FROM tasks WHERE owner = ? AND state = 'cancelling' ORDER BY number"
        found = await self._read(lambda db: db.execute(sql, (owner,)).fetchall())
        return [task_row(row) for row in found]

    # --- inside a transaction, on the store's thread ----------------------------------------------------------------

    def _submit(self, db: sqlite3.Connection, submit: Submit, owner: str) -> TaskRow:
        content = content_of(submit)
        known = db.execute("SELECT content FROM tasks WHERE task = ?", (submit.task,)).fetchone()
        if known is not None:
            if known[0] != content:
                raise Conflict(f"task {submit.task} is known with other content")
            return _known(db, submit.task)
        db.execute(
            "INSERT INTO tasks (task, session, workspace, prompt, state, version, epoch, owner, submit, content, "
            "created) VALUES (?, ?, ?, ?, 'queued', 1, 1, ?, ?, ?, ?)",
            (
                submit.task, submit.session, submit.workspace, submit.prompt, owner,
                msgspec.json.encode(submit), content, self._clock(),
            ),
        )  # fmt: skip
        stone = db.execute(
            "SELECT reason, cancel_id FROM tombstones WHERE task = ?", (submit.task,)
        ).fetchone()
        if stone is not None:
            return self._cancel_queued(db, _known(db, submit.task), *stone)[0]
        queued = TaskStateChanged(task=submit.task, state=TaskState.QUEUED, epoch=1, prompt=submit.prompt)
        numbered = _insert(db, submit.task, [queued], 0, self._clock())
        return _update(db, submit.task, last_seq=len(numbered))

    def _cancel(
        self, db: sqlite3.Connection, task: str, reason: StopReason, cancel_id: str, mode: str
    ) -> CancelResult:
        row = _find(db, task)
        if row is None:
            self._bury(db, task, reason, cancel_id)
            return CancelResult(CancelKind.TOMBSTONE, None, False, 0)
        if row.state.is_final:
            return CancelResult(CancelKind.NOOP, row, False, row.cut_seq, row.state)
        if row.state is TaskState.CANCELLING:
            if mode == "force" and row.mode != mode:
                row = _update(db, task, mode=mode)
            return CancelResult(CancelKind.ACCEPTED, row, False, row.cut_seq, row.state)
        if row.state is TaskState.QUEUED:
            moved, events = self._cancel_queued(db, row, reason, cancel_id)
        else:
            moved, events = self._begin_cancelling(db, row, reason, cancel_id, mode=mode)
        return CancelResult(CancelKind.ACCEPTED, moved, True, row.last_seq, row.state, tuple(events))

    def _bury(self, db: sqlite3.Connection, task: str, reason: str, cancel_id: str) -> None:
        now = self._clock()
        db.execute("DELETE FROM tombstones WHERE created < ?", (now - TOMBSTONE_KEPT_S,))
        db.execute("INSERT OR IGNORE INTO tombstones VALUES (?, ?, ?, ?)", (task, reason, cancel_id, now))

    def _cancel_queued(
        self, db: sqlite3.Connection, row: TaskRow, reason: str, cancel_id: str
    ) -> tuple[TaskRow, list[TaskEvent]]:
        end = never_started_end(row.task, reason=reason, cancel_id=cancel_id, ts=self._clock())
        return self._end(db, row, TaskState.CANCELLED, end)

    def _begin_cancelling(
        self, db: sqlite3.Connection, row: TaskRow, reason: str, cancel_id: str, **changes: Any
    ) -> tuple[TaskRow, list[TaskEvent]]:
        # Another try after a failed stop keeps the first reason and id: it is still the same stop.
        reason, cancel_id = row.stop_reason or reason, row.cancel_id or cancel_id
        event = TaskStateChanged(
            task=row.task,
            state=TaskState.CANCELLING,
            prev=row.state,
            epoch=changes.get("epoch", row.epoch),
            cause=reason,
            cut_seq=row.last_seq,
        )
        changes |= {"stop_reason": reason, "cancel_id": cancel_id, "cut_seq": row.last_seq}
        return self._move(db, row, TaskState.CANCELLING, [event], **changes)

    def _adopt(self, db: sqlite3.Connection, row: TaskRow, owner: str) -> TaskRow:
        changes = {"owner": owner, "epoch": row.epoch + 1}
        if row.state in (TaskState.RUNNING, TaskState.WAITING):
            return self._begin_cancelling(db, row, StopReason.OWNER_LOST, "", **changes)[0]
        return _update(db, row.task, version=row.version + 1, **changes)

    def _end(
        self, db: sqlite3.Connection, row: TaskRow, to: TaskState, end: TaskEnded
    ) -> tuple[TaskRow, list[TaskEvent]]:
        return self._move(
            db,
            row,
            to,
            [end],
            stop_reason=end.stop_reason or row.stop_reason,
            cancel_id=end.cancel_id or row.cancel_id,
            ended=self._clock(),
            end_seq=row.last_seq + 1,
            end_acked=0,
        )

    def _move(
        self, db: sqlite3.Connection, row: TaskRow, to: TaskState, events: Sequence[TaskEvent], **changes: Any
    ) -> tuple[TaskRow, list[TaskEvent]]:
        numbered = _insert(db, row.task, events, row.last_seq, self._clock())
        changes |= {"state": to, "version": row.version + 1, "last_seq": row.last_seq + len(numbered)}
        return _update(db, row.task, **changes), numbered


def _find(db: sqlite3.Connection, task: str) -> TaskRow | None:
    found = db.execute(f"SELECT {TASK_COLUMNS} FROM tasks WHERE task = ?", (task,)).fetchone()
    return task_row(found) if found else None


def _known(db: sqlite3.Connection, task: str) -> TaskRow:
    row = _find(db, task)
    if row is None:
        raise UnknownTask(f"no task {task}")
    return row


def _checked(db: sqlite3.Connection, task: str, to: TaskState, version: int, epoch: int) -> TaskRow:
    row = _known(db, task)
    verdict = TaskVersion(row.state, row.version, row.epoch).to(to, version=version, epoch=epoch)
    if verdict is Refusal.STALE_EPOCH:
        raise StaleEpoch(f"task {task} has another owner (epoch {row.epoch}, not {epoch})")
    if verdict is Refusal.STALE_VERSION:
        raise StaleVersion(f"task {task} is {row.state} at version {row.version}, not {version}")
    if verdict is Refusal.ILLEGAL:
        raise IllegalTransition(f"task {task} cannot go from {row.state} to {to}", state=row.state)
    return row


def _insert(
    db: sqlite3.Connection, task: str, events: Sequence[TaskEvent], last_seq: int, now: float
) -> list[TaskEvent]:
    numbered = [
        msgspec.structs.replace(event, seq=last_seq + place, ts=event.ts or now)
        for place, event in enumerate(events, 1)
    ]
    rows = [(task, event.seq, encode(event).encode()) for event in numbered]
    db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
    return numbered


def _update(db: sqlite3.Connection, task: str, **changes: Any) -> TaskRow:
    columns = ", ".join(f"{column} = ?" for column in changes)
    db.execute(f"UPDATE tasks SET {columns} WHERE task = ?", (*changes.values(), task))
    return _known(db, task)
