"""The tables of the SQLite store, and how one row becomes one value."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from peri_tui.agent.scheduler.store import InstanceRow, TaskRow
from peri_tui.core.states import TaskState
from peri_tui.errors import StoreUnavailable

VERSION: Final = 1

_TABLES: Final = (
    """CREATE TABLE tasks (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        task TEXT NOT NULL UNIQUE,
        session TEXT NOT NULL,
        workspace TEXT NOT NULL,
        prompt TEXT NOT NULL,
        state TEXT NOT NULL,
        version INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        owner TEXT NOT NULL,
        stop_reason TEXT NOT NULL DEFAULT '',
        cancel_id TEXT NOT NULL DEFAULT '',
        mode TEXT NOT NULL DEFAULT 'graceful',
        cut_seq INTEGER NOT NULL DEFAULT 0,
        submit BLOB NOT NULL,
        content BLOB NOT NULL,
        created REAL NOT NULL,
        started REAL NOT NULL DEFAULT 0,
        ended REAL NOT NULL DEFAULT 0,
        last_seq INTEGER NOT NULL DEFAULT 0,
        end_seq INTEGER NOT NULL DEFAULT 0,
        end_acked INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX tasks_by_owner ON tasks (owner, state)",
    "CREATE INDEX tasks_by_session ON tasks (session, number)",
    "CREATE INDEX tasks_by_workspace ON tasks (workspace, number)",
    """CREATE TABLE events (
        task TEXT NOT NULL,
        seq INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (task, seq)
    ) WITHOUT ROWID""",
    """CREATE TABLE tombstones (
        task TEXT PRIMARY KEY,
        reason TEXT NOT NULL,
        cancel_id TEXT NOT NULL,
        created REAL NOT NULL
    )""",
    """CREATE TABLE conversations (
        session TEXT PRIMARY KEY,
        body BLOB NOT NULL
    )""",
    """CREATE TABLE instances (
        instance TEXT PRIMARY KEY,
        pid INTEGER NOT NULL,
        start_time INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        workspace TEXT NOT NULL,
        socket TEXT NOT NULL,
        started REAL NOT NULL,
        orphaned INTEGER NOT NULL
    )""",
)

TASK_COLUMNS: Final = (
    "task, session, workspace, prompt, state, version, epoch, owner, stop_reason, cancel_id, submit, created, "
    "started, ended, last_seq, end_acked, cut_seq, mode"
)
INSTANCE_COLUMNS: Final = "instance, pid, start_time, boot_id, workspace, socket, started, orphaned"


def create(db: sqlite3.Connection) -> None:
    """Create the tables in a new file; check the version of an old one. Runs inside a transaction.

    Raises:
        StoreUnavailable: the file was written by a newer Peri.
    """
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if found == VERSION:
        return
    if found:
        file = db.execute("PRAGMA database_list").fetchone()[2]
        raise StoreUnavailable(
            f"{file}: the state store has format {found}, this Peri knows {VERSION}: use a newer Peri"
        )
    for statement in _TABLES:
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")


def task_row(values: tuple[Any, ...]) -> TaskRow:
    """Return the task in a row of ``TASK_COLUMNS``."""
    fields = dict(zip(TASK_COLUMNS.split(", "), values, strict=True))
    fields |= {"state": TaskState(fields["state"]), "end_acked": bool(fields["end_acked"])}
    return TaskRow(**fields)


def instance_row(values: tuple[Any, ...]) -> InstanceRow:
    """Return the agent in a row of ``INSTANCE_COLUMNS``."""
    fields = dict(zip(INSTANCE_COLUMNS.split(", "), values, strict=True))
    return InstanceRow(**fields | {"orphaned": bool(fields["orphaned"])})
