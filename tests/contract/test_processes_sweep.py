"""Many stops: no survivor of any nasty shape, no zombie, no descriptor and no file that stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.processes.spawn import Processes, child_env
from peri_tui.agent.processes.spill import SPILL_FROM, sweep_spill
from tests.contract.process_kit import until
from tests.doubles.sweep_driver import NASTY
from tests.e2e.outside import state_of

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

ROOT = Path(__file__).parents[2]
NOBODY = 65534
WEEK_S = 8 * 86400.0
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
users = pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=as_root)], ids=["self", "nobody"])


def interpreter(uid: int | None) -> list[str]:
    """Return a Python of this version that the user may run: the own one may be in a home."""
    system = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (sys.executable, system):
        with contextlib.suppress(OSError):
            if subprocess.run([candidate, "-c", ""], check=False, **as_user(uid)).returncode == 0:
                return [candidate]
    pytest.skip(f"this user may not run {sys.executable}")


def as_user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def sweep(repeats: int, uid: int | None) -> dict[str, Any]:
    """Run the driver, as another user if asked for."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if "site-packages" in path)}
    done = subprocess.run(
        [*interpreter(uid), "-m", "tests.doubles.sweep_driver", str(repeats)],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, **as_user(uid),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(told))
    return told


def assert_nothing_left(told: dict[str, Any], repeats: int, uid: int | None) -> None:
    assert told["runs"] == repeats * len(NASTY)
    assert told["survivors"] == []
    assert told["outcomes"] == {"empty": told["runs"]}
    assert told["uid"] == (os.getuid() if uid is None else uid)


@users
def test_no_shape_leaves_a_survivor(uid: int | None) -> None:
    assert_nothing_left(sweep(2, uid), 2, uid)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@users
def test_no_shape_leaves_a_survivor_in_many_runs(uid: int | None) -> None:
    assert_nothing_left(sweep(30, uid), 30, uid)


# --- what many stops leave of ours ------------------------------------------------------------------------------------


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zombies() -> list[int]:
    """Return the dead among our children that nobody has collected."""
    return [pid for pid in children(os.getpid()) if state_of(pid) == "Z"]


async def print_and_stop(processes: Processes, task: str) -> None:
    """Start a command with more output than is kept in memory and a lost child; stop it by force."""
    script = f"head -c {SPILL_FROM * 2} /dev/zero; (setsid sleep 1000 &); echo ready; sleep 1000"
    command = await processes.spawn(
        task, ["sh", "-c", script], cwd="/", env=child_env(os.environ, task), spill="call"
    )
    await until(lambda: "ready" in command.output.text())
    processes.force(task)
    assert (await processes.stop(task)).outcome == "empty"
    processes.forget(task)


async def stop_many(count: int, spill: Path) -> None:
    """Stop so many commands, four at once; what we and the warden hold must be as it was after the first few."""
    processes = Processes(spill=spill)
    await asyncio.gather(*(print_and_stop(processes, f"first-{index}") for index in range(4)))
    warden = processes.warden_pid
    assert warden is not None
    await until(lambda: children(warden) == [])
    before = descriptors(os.getpid()), descriptors(warden)
    left = list(range(count))

    async def work() -> None:
        while left:
            await print_and_stop(processes, f"T{left.pop()}-{uuid.uuid4().hex[:8]}")

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(work())
    await until(lambda: children(warden) == [])  # No supervisor, and none that is dead and not collected.
    # The thread that writes the files may have held some of the first ones, so it can also be fewer.
    await until(lambda: descriptors(os.getpid()) <= before[0] and descriptors(warden) <= before[1])
    assert zombies() == []
    assert processes._by_number == {}
    await processes.close()
    # The files are the user's for a week; then all of them go.
    assert len(list(spill.glob("*/*.log"))) == count + 4
    sweep_spill(spill, time.time() + WEEK_S)
    assert list(spill.iterdir()) == []


async def test_stops_leave_no_zombie_no_descriptor_and_no_file(tmp_path: Path) -> None:
    await stop_many(50, tmp_path / "spill")


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_a_thousand_stops_leave_no_zombie_no_descriptor_and_no_file(tmp_path: Path) -> None:
    await stop_many(1000, tmp_path / "spill")
