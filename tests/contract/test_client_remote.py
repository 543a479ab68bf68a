"""``peri stop``, ``tasks`` and ``trace`` from another terminal: with agents, without, and with damaged files."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from peri_tui.client import remote
from peri_tui.client.launcher import AgentRecord, read_records
from peri_tui.config import Paths, find_paths
from peri_tui.core import messages as m
from peri_tui.core.trace import Ev
from peri_tui.errors import AgentUnreachable, InputError, StoreUnavailable, UnknownTask
from peri_tui.log import Log
from tests.doubles.fake_agent import FakeAgent

pytestmark = pytest.mark.contract

INSTANCE = "01J00000000000000000000000"
OLD, NEW = "01J0000000000000000000000A", "01J0000000000000000000000B"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path)})
    found.make()
    return found


@pytest.fixture
def agent(paths: Paths) -> Iterator[FakeAgent]:
    record = AgentRecord(instance=INSTANCE, pid=os.getpid(), workspace="/w", started=1.0)
    (paths.runtime / f"{INSTANCE}.json").write_bytes(msgspec.json.encode(record))
    with FakeAgent(paths.socket(INSTANCE)) as agent:
        yield agent


@pytest.fixture
def store(paths: Paths) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(paths.db)
    db.execute(
        "CREATE TABLE tasks (task, state, prompt, workspace, session, stop_reason, owner, created, ended)"
    )
    yield db
    db.close()


def add(db: sqlite3.Connection, task: str, state: str, created: float) -> None:
    db.execute(
        "INSERT INTO tasks VALUES (?, ?, ?, '/w', 's', '', ?, ?, 0)",
        (task, state, f"prompt \x1b[2J of {task[-1]}", INSTANCE, created),
    )
    db.commit()


def ends(db: sqlite3.Connection, task: str, state: str) -> None:
    db.execute("UPDATE tasks SET state = ? WHERE task = ?", (state, task))
    db.commit()


def test_stop_asks_the_agent_and_waits_for_the_end(
    paths: Paths, agent: FakeAgent, store: sqlite3.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    add(store, NEW, "cancelled", 2.0)
    agent.publish(m.TaskStateChanged(task=NEW, state="running"))
    assert remote.stop(paths) == 130
    assert [seen.request.task for seen in agent.cancels] == [NEW]
    assert f"cancelled {NEW}" in capsys.readouterr().out
    assert remote.show_trace(paths, task=NEW) == 74


def test_stop_all_stops_all_and_one_that_is_not_clean_is_74(
    paths: Paths, agent: FakeAgent, store: sqlite3.Connection
) -> None:
    add(store, OLD, "cancel_failed", 1.0)
    add(store, NEW, "cancelled", 2.0)
    agent.publish(
        m.TaskStateChanged(task=OLD, state="running"), m.TaskStateChanged(task=NEW, state="running")
    )
    assert remote.stop(paths, every=True, force=True) == 74
    assert {(seen.request.task, seen.request.mode) for seen in agent.cancels} == {
        (OLD, "force"),
        (NEW, "force"),
    }


def test_stop_by_a_piece_of_the_id(paths: Paths, agent: FakeAgent, store: sqlite3.Connection) -> None:
    add(store, OLD, "cancelled", 1.0)
    agent.publish(
        m.TaskStateChanged(task=OLD, state="running"), m.TaskStateChanged(task=NEW, state="running")
    )
    assert remote.stop(paths, task="00A") == 130
    assert [seen.request.task for seen in agent.cancels] == [OLD]
    with pytest.raises(UnknownTask, match="fits 2 running tasks"):
        remote.stop(paths, task="01J")


def test_stop_of_a_task_that_nobody_knows_leaves_it_to_the_agent(paths: Paths, agent: FakeAgent) -> None:
    assert remote.stop(paths, task=NEW) == 130
    assert [seen.request.task for seen in agent.cancels] == [NEW]


def test_an_agent_that_does_not_answer_is_75(
    paths: Paths, agent: FakeAgent, store: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HTTP_S", 0.2)
    add(store, NEW, "running", 1.0)
    agent.script.http_deaf = True
    assert remote.stop(paths) == 75


def test_nothing_running_is_said(paths: Paths, agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert remote.stop(paths) == 0
    assert capsys.readouterr().out == "nothing is running\n"


def test_without_an_agent_a_running_task_cannot_be_stopped_and_it_is_said(
    paths: Paths, store: sqlite3.Connection
) -> None:
    add(store, NEW, "running", 1.0)
    with pytest.raises(AgentUnreachable, match="no agent is running"):
        remote.stop(paths)


def test_tasks_come_from_the_agent_else_from_the_store(
    paths: Paths, store: sqlite3.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    add(store, OLD, "completed", 1.0)
    add(store, NEW, "failed", 2.0)
    assert remote.list_tasks(paths) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:26] for line in lines] == [NEW, OLD]
    assert "\x1b" not in "".join(lines)
    assert remote.list_tasks(paths, as_json=True) == 0
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == [
        "failed",
        "completed",
    ]


def test_no_tasks_yet(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    assert remote.list_tasks(paths) == 0
    assert capsys.readouterr().out == "no tasks yet\n"


def test_a_store_that_is_none_is_named(paths: Paths) -> None:
    paths.db.write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match=r"state\.db"):
        remote.list_tasks(paths)


def test_a_file_of_a_dead_agent_and_a_damaged_one_do_no_harm(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = AgentRecord(instance=INSTANCE, pid=1, workspace="/w", orphaned=True)
    (paths.runtime / f"{INSTANCE}.json").write_bytes(msgspec.json.encode(dead))
    (paths.runtime / "torn.json").write_bytes(b'{"instance":')
    assert [record.pid for record in read_records(paths)] == [1]
    assert remote.list_tasks(paths) == 0


def test_the_trace_names_the_layer_that_did_not_answer(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(paths.log / "l", paths.trace, "t")
    log.trace(NEW, 1, Ev.PRESSED, mono=1_000_000_000, key="escape")
    log.trace(NEW, 1, Ev.PAINTED, mono=1_001_000_000)
    log.trace(NEW, 2, Ev.SENT, mono=1_002_000_000, route="lane", attempt=1)
    assert remote.show_trace(paths) == 74
    text = capsys.readouterr().out
    assert "Scheduler did not answer: the cancel did not reach the agent" in text
    assert "last before the gap: Client sent, 2.0 ms after the press" in text
    assert remote.show_trace(paths, task=NEW, as_json=True) == 74
    value = json.loads(capsys.readouterr().out)
    assert (value["failed"], value["complete"], len(value["records"])) == ("Scheduler", False, 3)


def test_a_trace_that_is_not_there(paths: Paths) -> None:
    with pytest.raises(UnknownTask, match="nothing was stopped yet"):
        remote.show_trace(paths)
    with pytest.raises(UnknownTask, match="has no trace"):
        remote.show_trace(paths, task=NEW)
    with pytest.raises(InputError, match="no task id"):
        remote.show_trace(paths, task="../x")


def test_the_commands_import_no_textual() -> None:
    code = (
        "import sys, peri_tui.cli, peri_tui.client.remote, peri_tui.client.headless;"
        "print([name for name in ('textual', 'rich', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"
