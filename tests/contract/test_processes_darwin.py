"""The macOS back end, end to end, on Linux: real supervisor, real ``ps``, real signals; macOS itself is not run.

What is shown here is the code, not the system: Linux' ``ps`` prints the same columns.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator

import pytest

from peri_tui.agent.processes.darwin import NOTES
from peri_tui.agent.processes.platforms import find_platform
from peri_tui.agent.processes.spawn import Command, Ladder, Processes, Rung, child_env
from peri_tui.errors import SpawnFailed
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("ps"), reason="leftovers are looked for in /proc"
    ),
]
QUICK = Ladder(interrupt_s=0.3, terminate_s=0.2, confirm_s=5.0)


@pytest.fixture
def marker() -> str:
    return f"mark-{uuid.uuid4().hex}"


@pytest.fixture
async def processes(marker: str) -> AsyncIterator[Processes]:
    before = len(os.listdir("/proc/self/fd"))
    registry = Processes(ladder=QUICK, platform=find_platform("darwin"))
    yield registry
    await registry.close()
    assert marked(marker) == []
    assert len(os.listdir("/proc/self/fd")) == before


async def run(registry: Processes, argv: list[str], task: str = "T", **options: object) -> Command:
    return await registry.spawn(task, argv, cwd="/", env=child_env(os.environ, task), **options)  # type: ignore[arg-type]


async def until_printed(command: Command, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in command.output.text():
            await asyncio.sleep(0.01)


async def test_a_command_runs_and_its_end_is_no_proof(processes: Processes) -> None:
    command = await run(processes, ["sh", "-c", "echo $PERI_TASK; exit 3"])
    assert (await command.wait()).code == 3
    assert await command.settle() == 0
    assert command.output.text() == "T\n"
    assert (await processes.stop("T")).outcome == "best_effort"


async def test_the_first_signal_ends_a_sleeper_and_the_list_names_it(
    processes: Processes, marker: str
) -> None:
    command = await run(processes, ["sh", "-c", "echo up; exec sleep 1000", marker])
    await until_printed(command, "up")
    evidence = await processes.stop("T")
    assert (evidence.outcome, evidence.rung) == ("best_effort", "SIGINT")
    assert evidence.signals == ("SIGINT",)
    assert [ref.pid for ref in evidence.ended] == [command.ref.pid]


async def test_one_that_ignores_signals_meets_every_rung(processes: Processes, marker: str) -> None:
    rungs: list[Rung] = []
    processes._on_rung = lambda _task, _command, rung, _elapsed: rungs.append(rung)
    command = await run(processes, ["sh", "-c", "trap '' INT TERM; echo up; sleep 1000; sleep 1000", marker])
    await until_printed(command, "up")
    evidence = await processes.stop("T")
    assert evidence.outcome == "best_effort"
    assert rungs == [Rung.INTERRUPT, Rung.TERMINATE, Rung.KILL]


@pytest.mark.parametrize("argv", ["setsid sleep 1000", "nohup sleep 1000"])
async def test_a_child_in_a_session_of_its_own_is_found(processes: Processes, marker: str, argv: str) -> None:
    command = await run(processes, ["sh", "-c", f"{argv} & echo up; wait", marker])
    await until_printed(command, "up")
    await command.sample()
    processes.force("T")
    evidence = await processes.stop("T")
    assert evidence.outcome == "best_effort"
    assert len(evidence.ended) == 2


async def test_what_the_shell_leaves_is_counted_and_can_be_stopped(processes: Processes, marker: str) -> None:
    command = await run(processes, ["sh", "-c", "sleep 1000 & echo up", marker])
    assert (await command.wait()).code == 0
    assert await command.settle() == 1
    assert (await processes.stop("T")).outcome == "best_effort"
    assert not command.live


async def test_hanging_up_kills_as_the_end_of_the_agent_would(processes: Processes, marker: str) -> None:
    command = await run(processes, nasty("sleeper", marker))
    assert marked(marker)
    command.abandon()
    async with asyncio.timeout(10):
        while marked(marker):
            await asyncio.sleep(0.01)


AGENT = """
import asyncio, os, sys
from peri_tui.agent.processes.platforms import find_platform
from peri_tui.agent.processes.spawn import Processes, child_env

async def main():
    processes = Processes(platform=find_platform("darwin"))
    script = "setsid sh -c 'echo up; sleep 1000; :' $0 & sleep 1000; :"
    command = await processes.spawn("T", ["sh", "-c", script, sys.argv[1]], cwd="/", env=child_env(os.environ, "T"))
    while "up" not in command.output.text():
        await asyncio.sleep(0.01)
    await command.sample()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_sigkill_of_the_agent_ends_the_tree(marker: str) -> None:
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, marker)
    async with asyncio.timeout(20):
        assert await agent.wait() == -signal.SIGKILL
        while marked(marker):
            await asyncio.sleep(0.01)


async def test_a_killed_supervisor_leaves_named_survivors_not_a_claim(
    processes: Processes, marker: str
) -> None:
    command = await run(processes, nasty("sleeper", marker))
    assert command.supervisor is not None
    os.kill(command.supervisor.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while command.live:
            await asyncio.sleep(0.01)
    evidence = await processes.stop("T")
    assert evidence.outcome == "survivors"
    assert [one.pid for one in evidence.survivors] == [command.ref.pid]
    os.kill(command.ref.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("argv", "cwd", "stage"), [(["/no/such"], "/", "exec"), (["true"], "/no/such", "chdir")]
)
async def test_what_cannot_start_is_named(
    processes: Processes, argv: list[str], cwd: str, stage: str
) -> None:
    with pytest.raises(SpawnFailed, match=f"/no/such: No such file or directory \\({stage}\\)"):
        await processes.spawn("T", argv, cwd=cwd, env={})


async def test_a_terminal_of_its_own(processes: Processes) -> None:
    command = await run(processes, ["sh", "-c", "test -t 0 && echo tty </dev/tty"], terminal=(80, 24))
    assert (await command.wait()).code == 0
    await command.settle()
    assert "tty" in command.output.text()


async def test_the_limits_of_the_platform_are_said_once(processes: Processes) -> None:
    for _ in range(3):
        await processes.start()
        command = await run(processes, ["true"])
        await command.wait()
    assert processes.notes == list(NOTES)
