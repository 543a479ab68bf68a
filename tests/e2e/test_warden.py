"""SIGKILL of the agent, of the warden, of both, of a supervisor and the warden: nothing is left, and it is told."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peri_tui.agent.processes.spawn import ExitStatus, Ladder, Processes, child_env
from peri_tui.errors import SpawnFailed, WardenLost
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked, state_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

ROOT = Path(__file__).parents[2]
MODES = [
    "stubborn",
    "stopped",
    "new_session",
    "lost_daemon",
    "exited_daemon",
    "respawner",
    "wide:200",
    "chain:50",
]


@pytest.fixture
def marker() -> str:
    return f"mark-{uuid.uuid4().hex}"


@pytest.fixture
def driver(marker: str, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[bytes], dict]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.doubles.process_driver", marker, *request.param],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield process, told
        finally:
            process.kill()
    wait_until(lambda: ours(told, marker) == [], what="every process of the driver is gone")


def ours(told: dict, marker: str) -> list[int]:
    """Return what is left of a driver: its commands, its supervisors, its warden."""
    guards = [pid for pid in (told["warden"], *told["supervisors"]) if state_of(pid) not in ("", "Z")]
    return [*(pid for pid in marked(marker) if f"process_driver\0{marker}" not in words(pid)), *guards]


def words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("driver", [[mode] for mode in MODES] + [MODES], indirect=True, ids=[*MODES, "all"])
def test_sigkill_of_the_agent_ends_everything(
    driver: tuple[subprocess.Popen[bytes], dict], marker: str
) -> None:
    process, told = driver
    assert ours(told, marker)
    process.kill()
    wait_until(lambda: ours(told, marker) == [], what="nothing is left")


@pytest.mark.parametrize("driver", [MODES], indirect=True)
def test_sigkill_of_agent_and_warden_ends_everything(
    driver: tuple[subprocess.Popen[bytes], dict], marker: str
) -> None:
    process, told = driver
    os.kill(told["warden"], signal.SIGKILL)
    process.kill()
    wait_until(lambda: ours(told, marker) == [], what="nothing is left")


@pytest.mark.parametrize("driver", [["new_session", "stops_supervisor"]], indirect=True)
def test_sigkill_of_the_agent_ends_the_tree_of_a_frozen_supervisor(
    driver: tuple[subprocess.Popen[bytes], dict], marker: str
) -> None:
    process, told = driver
    wait_until(lambda: state_of(told["supervisors"][1]) == "T", what="the task froze its supervisor")
    process.kill()
    wait_until(lambda: ours(told, marker) == [], what="nothing is left")


@pytest.mark.parametrize("driver", [MODES], indirect=True)
def test_a_stopped_agent_that_is_killed_ends_everything(
    driver: tuple[subprocess.Popen[bytes], dict], marker: str
) -> None:
    process, told = driver
    os.kill(process.pid, signal.SIGSTOP)
    process.kill()
    wait_until(lambda: ours(told, marker) == [], what="nothing is left")


@pytest.mark.parametrize("driver", [MODES], indirect=True)
def test_polite_signals_do_not_end_the_guards(
    driver: tuple[subprocess.Popen[bytes], dict], marker: str
) -> None:
    process, told = driver
    before = len(ours(told, marker))
    for pid in (told["warden"], *told["supervisors"]):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            os.kill(pid, number)
    assert all(state_of(pid) not in ("", "Z") for pid in (told["warden"], *told["supervisors"]))
    assert len(ours(told, marker)) >= before - 1  # the respawner may be between two children
    assert process.poll() is None


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to lose the right to kill others"
)
def test_a_process_of_another_user_is_named_as_survivor(marker: str) -> None:
    # Root without CAP_KILL may not end a process of another user: what an unprivileged agent meets with sudo.
    with subprocess.Popen(
        ["setpriv", "--bounding-set", "-kill", sys.executable, "-m", "tests.doubles.process_driver", marker, "other_user"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.write(b"close\n")
        process.stdin.flush()
        evidence = json.loads(process.stdout.readline())
        left = [pid for pid in marked(marker) if "process_driver" not in words(pid)]
        assert len(left) == 1
        os.kill(left[0], signal.SIGKILL)
    assert evidence["outcome"] == "survivors"
    [survivor] = evidence["survivors"]
    assert survivor["pid"] == left[0]
    assert survivor["reason"] == "not permitted"
    assert survivor["user"] == "nobody"
    assert marker in survivor["command"]
    assert [ref["pid"] for ref in evidence["ended"]] != left
    wait_until(lambda: marked(marker) == [])


async def run(registry: Processes, mode: str, marker: str, task: str = "T"):
    command = await registry.spawn(task, nasty(mode, marker), cwd="/", env=child_env(os.environ, task))
    await until(lambda: "ready" in command.output.text())
    return command


async def until(holds: Callable[[], object], timeout: float = 15.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_lost_warden_is_told_its_commands_end_and_the_next_one_starts(marker: str) -> None:
    lost: list[int] = []
    registry = Processes(ladder=Ladder(60, 60, 5), on_warden_lost=lambda: lost.append(1))
    command = await run(registry, "stubborn", marker)
    daemon = await run(registry, "lost_daemon", marker, "U")
    first = registry.warden_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: lost)
    assert await command.wait() == ExitStatus(None, signal.SIGKILL)
    for task in ("T", "U"):
        evidence = await registry.stop(task)
        assert evidence.outcome == "empty"
        assert evidence.ended
    assert not daemon.live
    assert marked(marker) == []
    assert state_of(first) == ""  # reaped, no zombie
    again = await registry.spawn("V", ["true"], cwd="/", env={})
    assert await again.wait() == ExitStatus(0, None)
    assert registry.warden_pid not in (None, first)
    assert lost == [1]
    await registry.close()
    assert lost == [1]


async def test_when_warden_and_supervisor_are_both_lost_no_proof_is_claimed(marker: str) -> None:
    registry = Processes()
    command = await run(registry, "sleeper", marker)
    warden = registry.warden_pid
    assert warden is not None
    assert command.supervisor is not None
    os.kill(warden, signal.SIGSTOP)  # so that it cannot sweep before it dies
    os.kill(command.supervisor.pid, signal.SIGKILL)
    os.kill(warden, signal.SIGKILL)
    assert await command.wait() == ExitStatus(None, signal.SIGKILL)
    await until(lambda: not marked(marker))
    evidence = await registry.stop("T")
    assert evidence.outcome == "best_effort"
    assert evidence.survivors == ()
    await registry.close()


async def test_a_stop_that_meets_a_double_loss_says_best_effort(marker: str) -> None:
    registry = Processes(ladder=Ladder(60, 60, 5))
    command = await run(registry, "stubborn", marker)
    stopping = asyncio.create_task(registry.stop("T"))
    await until(lambda: command.rungs)
    warden = registry.warden_pid
    assert warden is not None
    assert command.supervisor is not None
    os.kill(warden, signal.SIGSTOP)
    os.kill(command.supervisor.pid, signal.SIGKILL)
    os.kill(warden, signal.SIGKILL)
    evidence = await stopping
    assert evidence.outcome in ("best_effort", "survivors")
    for pid in marked(marker):
        os.kill(pid, signal.SIGKILL)
    await registry.close()


async def test_a_warden_that_cannot_start_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peri_tui.agent.processes.link.WARDEN_FILE", Path("/no/such/warden.py"))
    registry = Processes()
    with pytest.raises(WardenLost, match=r"/no/such/warden\.py"):
        await registry.spawn("T", ["true"], cwd="/", env={})
    await registry.close()


async def test_a_warden_lost_during_a_start_fails_that_start_only(marker: str) -> None:
    registry = Processes()
    await registry.start()
    warden = registry.warden_pid
    assert warden is not None
    os.kill(warden, signal.SIGSTOP)
    starting = asyncio.create_task(
        registry.spawn("T", nasty("sleeper", marker), cwd="/", env=child_env(os.environ, "T"))
    )
    await until(lambda: registry._by_number)
    await asyncio.sleep(0)
    os.kill(warden, signal.SIGKILL)
    with pytest.raises((SpawnFailed, WardenLost)):
        await starting
    assert marked(marker) == []
    again = await registry.spawn("U", ["true"], cwd="/", env={})
    assert await again.wait() == ExitStatus(0, None)
    await registry.close()
