"""Background jobs: started at once, bounded, ended with their task, and kept only when the user made them services."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peri_tui.agent.processes import jobs as jobs_module
from peri_tui.agent.processes.jobs import Jobs, TaskJobs
from peri_tui.agent.processes.ledger import Ledger, ledger_folder, read_ledger
from peri_tui.agent.processes.spawn import (
    Ladder,
    LimitReport,
    Limits,
    Processes,
    ProcessRef,
    child_env,
)
from peri_tui.agent.tools.jobs import MAX_OUTPUT
from peri_tui.config import Paths, find_paths
from peri_tui.core.messages import Asked, JobChanged, ToolEnded
from peri_tui.errors import ProcessError
from tests.doubles.body import TASK, Body, calls, says
from tests.e2e.outside import marked, state_of

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

QUICK = Ladder(interrupt_s=0.3, terminate_s=0.2, confirm_s=5.0)
OTHER = "01J0000000000000000000THER"


@pytest.fixture
def marker() -> str:
    return f"mark-{uuid.uuid4().hex}"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path / "home")})
    found.make()
    return found


@pytest.fixture
async def processes(paths: Paths, marker: str) -> AsyncIterator[Processes]:
    me = ProcessRef(os.getpid(), 1, "agent")
    ledger = Ledger(ledger_folder(paths), instance="A", boot="b", agent=me)
    registry = Processes(ladder=QUICK, ledger=ledger)
    yield registry
    assert (await registry.close()).outcome == "empty"
    assert marked(marker) == []
    ledger.close()


@pytest.fixture
async def jobs(processes: Processes, tmp_path: Path) -> AsyncIterator[Jobs]:
    jobs = Jobs(processes, tmp_path / "tmp")
    yield jobs
    await processes.close()
    await jobs.close()
    assert list(tmp_path.glob("tmp/*")) == []


Run = Callable[..., Any]


@pytest.fixture
def make(
    tmp_path: Path, processes: Processes, jobs: Jobs, request: pytest.FixtureRequest
) -> Callable[..., Body]:
    (tmp_path / "ws").mkdir()

    def made(*script: list[Any], **how: Any) -> Body:
        body = Body(tmp_path / "ws", script, processes=processes, **how)
        body.context.env = child_env(os.environ, TASK)
        body.context.jobs = TaskJobs(jobs, TASK, body.emit)
        request.addfinalizer(body.close)
        return body

    return made


def tool(name: str, **arguments: Any) -> tuple[str, str]:
    return (name, msgspec.json.encode(arguments).decode())


def background(command: str) -> tuple[str, str]:
    return tool("shell", command=command, background=True)


async def until(holds: Callable[[], object], timeout: float = 15.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.01)


async def begin(jobs: Jobs, command: str, events: list[Any], task: str = TASK) -> Any:
    argv = ["sh", "-c", command]
    env = child_env(os.environ, task)
    return await jobs.start(task, argv, cwd="/", env=env, text=command, emit=events.append)


# --- the tools ------------------------------------------------------------------------------------------------------


async def test_a_job_runs_on_is_looked_at_and_ended(make: Callable[..., Body], marker: str) -> None:
    body = make(
        calls(background(f"echo up; touch here; sh -c 'sleep 1000; : {marker}'; :")),
        calls(tool("shell", command="while [ ! -e here ]; do sleep 0.01; done; sleep 0.1")),
        calls(tool("job_output", job="j1")),
        calls(tool("job_stop", job="j1")),
        calls(tool("job_output", job="j1")),
        says("ok"),
    )
    began = time.monotonic()
    await body.run()
    assert time.monotonic() - began < 30
    started, _, looked, stopped, after = body.tool_messages()
    (first, *_) = body.of(JobChanged)
    assert f"job j1, pid {first.pid}" in started
    assert looked == f"up\n[j1: running, pid {first.pid}]"
    assert "[j1: ended, " in stopped
    assert " processes ended, 0 left]" in stopped
    assert "[j1: ended, signal" in after
    assert state_of(first.pid) in ("", "Z")
    assert marked(marker) == []
    assert [event.status for event in body.of(ToolEnded)] == ["ok"] * 5


async def test_the_window_stays_open_while_a_job_lives(make: Callable[..., Body]) -> None:
    body = make(calls(background("sleep 1000")), says("ok"))
    await body.run()
    (body.workspace / "late.txt").write_text("x")
    assert [change.path for change in body.files.window_close()] == ["late.txt"]


async def test_a_job_is_asked_for_like_any_command_and_says_that_it_runs_on(
    make: Callable[..., Body],
) -> None:
    body = make(calls(background("sleep 1000")), says("ok"), approve="ask", answers=["deny"])
    await body.run()
    (asked,) = body.of(Asked)
    assert (asked.title, asked.detail) == ("Run a command in the background?", "sleep 1000")
    assert "runs on until the task ends" in asked.note
    assert body.of(JobChanged) == []
    looks = make(calls(tool("job_output", job="j1"), tool("job_stop", job="j1")), says("ok"), approve="ask")
    await looks.run()
    assert looks.of(Asked) == []
    assert looks.tool_messages() == ["Error: unknown job 'j1'; known: none"] * 2


async def test_output_without_end_is_bounded(make: Callable[..., Body]) -> None:
    body = make(
        calls(background("yes x | head -c 3000000; touch done; sleep 1000")),
        calls(tool("shell", command="while [ ! -e done ]; do sleep 0.01; done; sleep 0.2")),
        calls(tool("job_output", job="j1")),
        says("ok"),
    )
    await body.run()
    told = body.tool_messages()[-1]
    assert len(told) < MAX_OUTPUT + 500
    assert "left out" in told


async def test_a_command_that_cannot_start_is_no_job(make: Callable[..., Body], tmp_path: Path) -> None:
    body = make(calls(background("")), calls(background("x\0y")), says("ok"))
    await body.run()
    assert all(text.startswith("Error: shell: ") for text in body.tool_messages())
    assert body.of(JobChanged) == []


async def test_a_body_without_jobs_says_so(make: Callable[..., Body]) -> None:
    body = make(calls(background("sleep 1"), tool("job_output", job="j1")), says("ok"))
    body.context.jobs = None
    await body.run()
    assert body.tool_messages() == ["Error: background jobs are not available here"] * 2


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_f050_a_stop_ends_every_kind_of_command_and_lists_it(
    jobs: Jobs, processes: Processes, marker: str
) -> None:
    events: list[Any] = []
    plain = await processes.spawn(TASK, ["sleep", "1000"], cwd="/", env=child_env(os.environ, TASK))
    job = await begin(jobs, f"exec sleep 1000 # {marker}", events)
    left = await begin(jobs, f"(sh -c 'sleep 1000; : {marker}' &) ; exit 3", events)
    await until(lambda: left.state == "exited")
    assert left.how == "exit 3"
    evidence = await processes.stop(TASK)
    assert evidence.outcome == "empty"
    assert {plain.ref.pid, job.command.ref.pid} <= {ref.pid for ref in evidence.ended}
    assert len(evidence.ended) >= 4
    await until(lambda: {e.job for e in events if e.state == "ended"} == {job.id, left.id})
    with pytest.raises(ProcessError, match="stopped"):
        await begin(jobs, "true", events)


async def test_f078_a_service_outlives_the_stop_and_the_next_task_until_it_is_ended(
    jobs: Jobs, processes: Processes, marker: str, paths: Paths
) -> None:
    events: list[Any] = []
    job = await begin(jobs, f"exec sleep 1000 # {marker}", events)
    other = await begin(jobs, "exec sleep 1000", events)
    pid = job.command.ref.pid
    jobs.promote(job)
    jobs.promote(job)
    assert [event.service for event in events if event.job == job.id] == [False, True]
    assert jobs.kept(TASK) == [f"j1: pid {pid} exec sleep 1000 # {marker}"]
    assert jobs.kept(OTHER) == []
    evidence = await processes.stop(TASK)
    assert [ref.pid for ref in evidence.ended] == [other.command.ref.pid]
    await begin(jobs, "exec sleep 1000", events, OTHER)
    assert len((await processes.stop(OTHER)).ended) == 1
    assert state_of(pid) not in ("", "Z")
    assert [one.id for one in jobs.services()] == [job.id]
    book = read_ledger(ledger_folder(paths) / "A.jsonl")
    assert book is not None
    assert [(entry.task, entry.tag) for entry in book.entries] == [("service:j1", TASK)]
    assert (await jobs.stop(job)).outcome == "empty"
    assert (await jobs.stop(job)).outcome == "empty"
    assert state_of(pid) in ("", "Z")
    assert jobs.services() == []


async def test_what_is_over_or_being_stopped_cannot_become_a_service(
    jobs: Jobs, processes: Processes
) -> None:
    over = await begin(jobs, "true", [])
    await until(lambda: not over.live)
    stopping = await begin(jobs, "trap '' INT TERM; sleep 1000", [])
    processes.interrupt(TASK)
    for job in (over, stopping):
        with pytest.raises(ProcessError, match="cannot become a service"):
            jobs.promote(job)
    assert jobs.services() == []
    assert (await processes.stop(TASK)).outcome == "empty"


async def test_a_model_neither_ends_a_service_nor_sees_another_tasks_job(jobs: Jobs) -> None:
    mine, theirs = TaskJobs(jobs, TASK, [].append), TaskJobs(jobs, OTHER, [].append)
    job = await mine.start(["sleep", "1000"], cwd="/", env=child_env({}, TASK), text="sleep")
    with pytest.raises(ProcessError, match="unknown job 'j1'; known: none"):
        theirs.find("j1")
    jobs.promote(job)
    with pytest.raises(ProcessError, match="only the user ends it"):
        await mine.stop(mine.find("j1"))
    assert job.live


async def test_a_job_has_no_end_of_its_time_and_keeps_its_other_limits(
    paths: Paths, marker: str, tmp_path: Path
) -> None:
    heard: list[LimitReport] = []
    limits = Limits(processes=50, seconds=0.5)
    registry = Processes(ladder=QUICK, limits=limits, on_limit=heard.append)
    jobs = Jobs(registry, tmp_path / "tmp")
    job = await begin(jobs, f"sleep 1000; : {marker}", [])
    other = await registry.spawn("other", ["sleep", "1000"], cwd="/", env={"PATH": os.environ["PATH"]})
    await until(lambda: any(report.level == "limit" for report in heard))
    assert {report.task for report in heard} == {other.task}
    await job.command.sample()
    assert job.live
    assert (job.command.limits.seconds, job.command.limits.processes) == (0.0, 50)
    await registry.close()
    await jobs.close()
    assert marked(marker) == []


async def test_too_many_jobs_are_refused(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 1)
    await begin(jobs, "exec sleep 1000", [])
    with pytest.raises(ProcessError, match="1 background jobs of this task run already"):
        await begin(jobs, "exec sleep 1000", [])


# --- what is told ---------------------------------------------------------------------------------------------------


async def test_news_is_told_and_no_more(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "SAMPLE_S", 0.05)
    events: list[Any] = []
    job = await begin(jobs, "exec sleep 1000", events)
    await until(lambda: events[-1].rss > 0)
    count = len(events)
    await asyncio.sleep(0.5)
    assert len(events) <= count + 1
    await jobs.stop(job)
    await until(lambda: events[-1].state == "ended")
    assert {event.pid for event in events} == {job.command.ref.pid}
    assert events[0].state == "running"
    (listed,) = await jobs.list()
    assert (listed.state, listed.how, listed.command) == ("ended", "signal 2", "exec sleep 1000")


async def test_the_list_says_what_they_take_now_and_forgets_the_old(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "KEPT_ENDED", 2)
    busy = await begin(jobs, "while :; do :; done", [])
    await until(lambda: busy.command.live)
    for _ in range(5):
        over = await begin(jobs, "true", [])
        await until(lambda: not over.live)  # noqa: B023
        assert over.watcher
        await over.watcher
    listed = await jobs.list()
    assert [one.state for one in listed] == ["running", "ended", "ended"]
    assert listed[0].rss > 0
    assert listed[0].processes == 1
    assert 0 <= time.time() - listed[0].started < 60


async def test_a_jobs_temporary_folder_goes_with_the_job_not_with_the_task(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = await begin(jobs, f'echo "$TMPDIR" > {tmp_path}/where; exec sleep 1000', [])
    await until(lambda: (tmp_path / "where").exists() and (tmp_path / "where").read_text())
    folder = Path((tmp_path / "where").read_text().strip())
    assert folder.is_dir()
    assert folder.parent == tmp_path / "tmp"
    await jobs.stop(job)
    await until(lambda: not folder.exists())
