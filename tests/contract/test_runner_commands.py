"""Commands through the real warden, edits through the real rollback layer, from the loop's side."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peri_tui.agent.history import validate
from peri_tui.agent.processes.spawn import Processes, child_env
from peri_tui.agent.rollback.transaction import Transaction
from peri_tui.agent.tools.search_worker import main
from peri_tui.agent.tools.shell import MAX_OUTPUT
from peri_tui.config import Paths
from peri_tui.core.messages import Asked, Delta, FileChanged, ToolEnded
from peri_tui.core.states import StopReason
from tests.doubles.body import TASK, Body, calls, says

pytestmark = pytest.mark.contract


def shell(command: str, **more: Any) -> tuple[str, str]:
    return ("shell", msgspec.json.encode({"command": command} | more).decode())


def search(pattern: str, glob: str = "") -> tuple[str, str]:
    return ("search", msgspec.json.encode({"pattern": pattern, "regex": True, "glob": glob}).decode())


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    registry = Processes()
    yield registry
    assert (await registry.close()).outcome == "empty"


@pytest.fixture
def make(tmp_path: Path, processes: Processes, request: pytest.FixtureRequest) -> Callable[..., Body]:
    (tmp_path / "ws").mkdir()

    def made(*script: list[Any], **how: Any) -> Body:
        body = Body(tmp_path / "ws", script, processes=processes, **how)
        body.context.env = child_env(os.environ | {"OPENAI_API_KEY": "sk-secret"}, TASK)
        request.addfinalizer(body.close)
        return body

    return made


Make = Callable[..., Body]


async def test_output_streams_and_changes_are_listed(make: Make) -> None:
    body = make(calls(shell("echo one; echo two >&2; echo x > new.txt; exit 3")), says("ok"))
    outcome = await body.run()
    assert outcome.touched
    shown = [d for d in body.of(Delta) if d.ch == "tool_out"]
    assert "".join(d.text for d in shown) == "one\ntwo\n"
    assert {d.part for d in shown} == {"call_0"}
    (told,) = body.tool_messages()
    assert told.startswith("one\ntwo\n[exit 3]\n")
    assert "[changed files: new.txt (added)]" in told
    assert [(c.path, c.kind, c.by) for c in body.of(FileChanged)] == [("new.txt", "added", "shell")]
    assert body.of(ToolEnded)[0].status == "error"
    assert body.of(ToolEnded)[0].summary == "exit 3, 1 files changed"


async def test_a_command_has_no_keyboard_no_key_and_the_workspace(make: Make) -> None:
    body = make(calls(shell("cat; pwd; env; ls /proc/self/fd | tr '\\n' ' '")), says("ok"))
    await body.run()
    (told,) = body.tool_messages()
    assert str(body.root.path) in told
    assert f"PERI_TASK={TASK}" in told
    assert "sk-secret" not in told
    assert told.endswith("\n0 1 2 3 \n[exit 0]")


async def test_a_grandchild_that_holds_the_output_is_not_waited_for(make: Make) -> None:
    body = make(calls(shell("sleep 60 & echo started")), says("ok"))
    began = time.monotonic()
    await body.run()
    assert time.monotonic() - began < 10
    (told,) = body.tool_messages()
    assert told.startswith("started\n[exit 0]\n[1 of its processes still run")


async def test_what_a_background_process_changes_later_is_listed_too(make: Make) -> None:
    later = "(while [ ! -e go ]; do sleep 0.01; done; echo x > late.txt; sleep 60) >/dev/null 2>&1 &"
    wait = "touch go; while [ ! -s late.txt ]; do sleep 0.01; done"
    body = make(calls(shell(later), shell(wait)), says("ok"))
    await body.run()
    assert "late.txt" in [c.path for c in body.of(FileChanged)]
    (body.workspace / "later.txt").write_text("x")  # the first command's process may still do this
    assert "later.txt" in [c.path for c in body.files.window_close()]


async def test_a_window_stays_open_while_background_processes_live(make: Make) -> None:
    body = make(calls(shell("sleep 60 >/dev/null 2>&1 &")), says("ok"))
    await body.run()
    (body.workspace / "late.txt").write_text("x")
    assert [c.path for c in body.files.window_close()] == ["late.txt"]


async def test_long_output_is_kept_in_a_file_that_the_result_names(make: Make, tmp_path: Path) -> None:
    registry = Processes(spill=tmp_path / "spill")
    body = make(calls(shell("seq 1 100000"), shell("echo short")), says("ok"))
    body.context.processes = registry
    await body.run()
    long, short = body.tool_messages()
    file = tmp_path / "spill" / TASK / "call_0.log"
    assert f"[all 588895 bytes of the output are kept in {file}]" in long
    assert "kept in" not in short
    await registry.close()
    assert file.read_bytes().endswith(b"\n100000\n")


async def test_output_without_end_is_bounded(make: Make) -> None:
    body = make(calls(shell("head -c 30000000 /dev/zero | tr '\\0' x; echo END")), says("ok"))
    await body.run()
    (told,) = body.tool_messages()
    assert len(told) < MAX_OUTPUT + 500
    assert "END\n[exit 0]" in told
    assert sum(len(d.text) for d in body.of(Delta)) < 400_000


async def test_output_that_is_no_text_is_shown_harmlessly(make: Make) -> None:
    body = make(calls(shell("printf 'a\\377b\\303'; sleep 0.1; printf '\\251\\n'")), says("ok"))
    await body.run()
    assert "".join(d.text for d in body.of(Delta) if d.ch == "tool_out") == "a\ufffdbé\n"


async def test_a_command_past_its_time_is_ended(make: Make) -> None:
    body = make(calls(shell("echo begun; sleep 60", timeout=0.5)), says("ok"))
    await body.run()
    (told,) = body.tool_messages()
    assert told.startswith("begun\n[timed out after 0.5 s")


async def test_a_stop_while_a_command_runs_unwinds_at_once(make: Make, processes: Processes) -> None:
    body = make(calls(shell("echo begun; sleep 60")), says("never"))
    task = body.start()
    async with asyncio.timeout(10):
        while not [d for d in body.of(Delta) if d.ch == "tool_out"]:
            await asyncio.sleep(0.01)
    body.stop()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await processes.stop(TASK)).outcome == "empty"
    messages = body.history.close(StopReason.USER)
    assert validate(messages) == []
    assert "had started" in messages[-2]["content"]
    assert body.of(ToolEnded)[-1].status == "cancelled"


async def test_a_stopped_task_starts_nothing_more(make: Make, processes: Processes) -> None:
    await processes.start()
    await processes.stop(TASK)
    body = make(calls(shell("touch marker")), says("ok"))
    await body.run()
    assert not (body.workspace / "marker").exists()
    assert "was stopped" in body.tool_messages()[-1]


async def test_a_search_by_expression_runs_in_its_own_process(make: Make) -> None:
    body = make(calls(search(r"d[e]f \w+", "*.py"), search("("), search("nowhere$")), says("ok"))
    (body.workspace / "a.py").write_text("def one\nx\ndef two\n")
    (body.workspace / "a.txt").write_text("def three\n")
    (body.workspace / "re.py").write_text("raise SystemExit('the workspace was imported')\n")
    await body.run()
    first, second, third = body.tool_messages()
    assert first == "a.py:1: def one\na.py:3: def two"
    assert "not a regular expression" in second
    assert third == "no hits"
    assert not body.of(Asked)


async def test_an_expression_that_never_ends_can_be_stopped(make: Make, processes: Processes) -> None:
    body = make(calls(search("(a+)+$")), says("never"))
    (body.workspace / "a.txt").write_text("a" * 60 + "b\n")
    task = body.start()
    async with asyncio.timeout(10):
        while not processes.list_refs(TASK):
            await asyncio.sleep(0.01)
    body.stop()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await processes.stop(TASK)).outcome == "empty"


async def test_edits_go_through_the_journal_and_come_back(make: Make, tmp_path: Path) -> None:
    home = tmp_path / "home"
    paths = Paths(home / "config", home / "data", home / "state", home / "run")
    paths.make()
    edit = ("edit_file", '{"path": "a.py", "old": "one", "new": "1"}')
    write = ("write_file", '{"path": "sub/new.py", "content": "x\\n"}')
    body = make(calls(("read_file", '{"path": "a.py"}'), edit, write), says("ok"))
    source = body.workspace / "a.py"
    source.write_bytes(b"one\r\ntwo")
    transaction = await body.in_thread(Transaction.open, paths, body.workspace, TASK)
    body.context.files = transaction
    outcome = await body.run()
    assert outcome.kind == "completed"
    assert [e.status for e in body.of(ToolEnded)] == ["ok", "ok", "ok"]
    assert source.read_bytes() == b"1\r\ntwo"
    assert transaction.touched() == ["a.py", "sub/new.py"]
    await body.in_thread(transaction.rollback, lambda done, total: None)
    assert source.read_bytes() == b"one\r\ntwo"
    assert not (body.workspace / "sub").exists()


def test_the_worker_prints_one_hit_more_than_are_shown(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "a").write_text("x\n" * 500)
    assert main(str(tmp_path), "", "x") == 0
    assert capsysbinary.readouterr().out.splitlines()[::200] == [b"a:1: x", b"a:201: x"]
