"""The guard: what a tree may take, who is told, and that nothing runs far beyond it."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from peri_tui.agent.processes.guard import LimitReport
from peri_tui.agent.processes.spawn import ExitStatus, Limits, child_env
from tests.contract.process_kit import is_ready, make_marker, registry, run, until
from tests.e2e.outside import marked

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

MIB = 1 << 20


@pytest.fixture
def marker() -> str:
    return make_marker()


async def test_memory_is_told_at_four_fifths_then_at_the_limit_and_overshoot_is_small(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(memory=400 * MIB), on_limit=told.append) as processes:
        command = await run(processes, "hog:2000", marker)
        await until(lambda: any(one.level == "limit" for one in told))
        processes.interrupt("T")
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        # Research row 35: a hog at full speed, limit 800 MB, must be stopped below 1,000 MB.
        over = next(one for one in told if one.level == "limit")
        assert 400 * MIB <= over.value <= 500 * MIB
        assert (over.task, over.which, over.limit) == ("T", "memory", 400 * MIB)
        assert command.name.startswith(over.command)
        assert "full" not in command.output.text()


async def test_far_beyond_the_limit_the_supervisor_kills_by_itself(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(memory=100 * MIB), on_limit=told.append) as processes:
        command = await run(processes, "hog:4000", marker)
        await command.wait()  # nobody stops it here
        await until(lambda: not command.live)
        assert told[-1].level == "hard"
        assert told[-1].value < 100 * MIB * 1.25 + 150 * MIB
        assert marked(marker) == []
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"


async def test_without_a_listener_a_command_over_its_limit_is_stopped(marker: str) -> None:
    async with registry(marker, limits=Limits(seconds=0.3)) as processes:
        command = await run(processes, "sleeper", marker)
        await until(lambda: not command.live)
        assert command.rungs


async def test_too_many_processes_are_counted_over_the_whole_tree(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(processes=20), on_limit=told.append) as processes:
        await run(processes, "breeds:22", marker)
        await until(lambda: [one.level for one in told] == ["warn", "limit"])
        assert 20 <= told[1].value <= 23
        assert (await processes.stop("T")).outcome == "empty"


async def test_a_fork_bomb_is_killed_by_its_supervisor(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(processes=20), on_limit=told.append) as processes:
        command = await run(processes, "burst:300", marker)
        await until(lambda: not command.live)
        assert told[-1].level == "hard"
        assert marked(marker) == []


async def test_processor_time_counts_when_it_is_limited(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(cpu=0.2), on_limit=told.append) as processes:
        await processes.spawn("T", ["sh", "-c", "while :; do :; done", marker], cwd="/", env={})
        await until(lambda: told and told[-1].level == "limit")
        assert told[-1].which == "cpu"


async def test_output_is_counted_also_after_it_is_not_kept_any_more(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(output=30 * MIB), on_limit=told.append) as processes:
        command = await run(processes, "flood", marker)
        await until(lambda: command.output.total)
        command.output.detach()
        await until(lambda: [one.level for one in told] == ["warn", "limit"])
        assert told[1].which == "output"
        assert told[1].value >= 30 * MIB
        processes.force("T")
        assert (await processes.stop("T")).outcome == "empty"


async def test_several_commands_of_a_task_count_together(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(processes=5), on_limit=told.append) as processes:
        for _ in range(3):
            await is_ready(await run(processes, "plain", marker))
        await processes.sample("T")
        await processes.sample("T")
        assert [(one.which, one.level, one.value) for one in told] == [("processes", "limit", 6)]
        await is_ready(await run(processes, "plain", marker, "U"))
        await processes.sample("U")
        assert len(told) == 1


async def test_limits_can_be_lifted_while_it_runs(marker: str) -> None:
    told: list[LimitReport] = []
    async with registry(marker, limits=Limits(seconds=0.6), on_limit=told.append) as processes:
        command = await run(processes, "sleeper", marker)
        await is_ready(command)
        command.limit(Limits())
        await asyncio.sleep(1.0)
        assert [one for one in told if one.level != "warn"] == []
        assert command.live


async def test_a_command_yields_to_peri_and_leaves_no_core_file(marker: str) -> None:
    script = "nice; cat /proc/self/oom_score_adj; ulimit -c; ulimit -f"
    async with registry(marker) as processes:
        command = await processes.spawn("T", ["bash", "-c", script], cwd="/", env=child_env(os.environ, "T"))
        assert await command.wait() == ExitStatus(0, None)
        await command.settle()
        nice, score, core, size = command.output.text().split()
        assert int(nice) == min(19, os.nice(0) + 5)
        assert int(score) == 800
        assert int(core) == 0
        assert int(size) <= (10 << 30) // 1024


async def test_a_look_is_cheap_for_who_does_not_work(marker: str) -> None:
    async with registry(marker) as processes:
        command = await run(processes, "wide:50", marker)
        await is_ready(command)
        assert command.supervisor is not None
        before = _ticks(command.supervisor.pid)
        await asyncio.sleep(2.0)
        spent = (_ticks(command.supervisor.pid) - before) / os.sysconf("SC_CLK_TCK")
        assert spent < 0.4  # 50 processes looked at four times; a busy guard would use a whole core


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])
