"""Proof of death, and what is none."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peri_tui.agent.scheduler.ownership import Liveness, start_time, this_boot
from peri_tui.agent.scheduler.store import InstanceRow
from peri_tui.errors import StoreUnavailable

pytestmark = pytest.mark.contract

BOOT = "boot-1/pid:[1]"

HOLDER = """
import sys
from pathlib import Path
from peri_tui.agent.scheduler.ownership import Liveness
live = Liveness(Path(sys.argv[1]))
live.hold("other")
print(live.describe("other", workspace="/w", socket="/s").start_time, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def live(tmp_path: Path) -> Liveness:
    return Liveness(tmp_path / "instances", boot_id=BOOT, wall=lambda: 7.0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], InstanceRow]]:
    """Another process that holds the lock of ``other``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "instances")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        started = int(process.stdout.readline())
        yield process, InstanceRow("other", process.pid, started, this_boot(), "/w", "/s", 1.0)
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_holds_its_lock_is_alive_until_it_is_gone(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], InstanceRow]
) -> None:
    process, row = holder
    live = Liveness(tmp_path / "instances")
    assert not live.is_dead(row)
    process.send_signal(signal.SIGSTOP)
    assert not live.is_dead(row)
    with pytest.raises(StoreUnavailable, match="holds"):
        live.hold("other")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert live.is_dead(row)
    live.forget("other")
    assert list((tmp_path / "instances").iterdir()) == []
    assert live.is_dead(row)


def test_own_lock_is_no_proof_against_us(live: Liveness, tmp_path: Path) -> None:
    live.hold("me")
    row = live.describe("me", workspace="/w", socket="/s")
    assert (row.pid, row.started, row.boot_id, row.orphaned) == (os.getpid(), 7.0, BOOT, False)
    assert not live.is_dead(row)
    live.forget("me")
    lock = tmp_path / "instances" / "me.lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    live.release("me")
    live.release("me")
    assert not lock.exists()


def test_another_boot_is_proof(live: Liveness) -> None:
    row = InstanceRow("x", os.getpid(), start_time(os.getpid()) or 0, "boot-0/pid:[1]", "/w", "/s", 1.0)
    assert live.is_dead(row)
    assert not live.is_dead(replace(row, boot_id=BOOT))
    assert not live.is_dead(replace(row, boot_id=""))


def test_a_pid_proves_something_only_in_its_own_namespace(live: Liveness) -> None:
    gone = InstanceRow("x", 2**22 + 1, 5, BOOT, "/w", "/s", 1.0)
    assert live.is_dead(gone)
    assert not live.is_dead(replace(gone, boot_id="boot-1/pid:[2]"))


def test_a_later_process_with_the_same_pid_is_another(live: Liveness) -> None:
    now = start_time(os.getpid())
    assert now
    row = InstanceRow("x", os.getpid(), now, BOOT, "/w", "/s", 1.0)
    assert not live.is_dead(row)
    assert live.is_dead(replace(row, start_time=now - 1))
    assert not live.is_dead(replace(row, start_time=0))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"file/x/a\.lock"):
        Liveness(tmp_path / "file" / "x").hold("a")


def test_start_times() -> None:
    assert start_time(2**22 + 1) is None
    assert (start_time(os.getpid()) or 0) >= (start_time(os.getppid()) or 0) > 0
    assert this_boot().count("/") == 1
