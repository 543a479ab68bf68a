"""Stronger cages: a cgroup that kills in one stroke, namespaces; and that it is said where they cannot be had."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from peri_tui.agent.processes import warden
from peri_tui.agent.processes.spawn import ExitStatus, Processes, child_env
from tests.contract.process_kit import is_ready, make_marker, registry, run, until
from tests.e2e.outside import marked

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

MODES = ["plain", "stubborn", "stopped", "new_session", "lost_daemon", "exited_daemon", "respawner", "wide:50", "burst:50", "hops:100"]  # fmt: skip


def cgroup_root() -> str:
    """Return a cgroup v2 folder in which one may be made here, empty without one."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        folder = place.split()[4]
        if kind.startswith("cgroup2 ") and os.access(folder, os.W_OK):
            return folder
    return ""


def may_cage() -> str:
    """Return why namespaces cannot be had here, empty when they can; asked in a process of its own."""
    probe = f"import sys; sys.argv=['x']; exec(open({warden.__file__!r}).read().split('if __name__')[0]); print(why_not_strict())"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", probe], capture_output=True, text=True)
    return ran.stdout.strip() or ran.stderr.strip()


needs_cage = pytest.mark.skipif(bool(may_cage()), reason=f"no namespaces here: {may_cage()}")
needs_cgroup = pytest.mark.skipif(not cgroup_root(), reason="no cgroup v2 that can be written to")


@pytest.fixture
def marker() -> str:
    return make_marker()


@pytest.fixture
def delegated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(cgroup_root()) / f"peri-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    monkeypatch.setattr("peri_tui.agent.processes.link.WARDEN_OPTIONS", (f"cgroup={folder}",))
    yield folder
    with contextlib.suppress(OSError):
        folder.rmdir()
    assert not folder.exists(), "something is left in the cgroup"


# --- cgroup -----------------------------------------------------------------------------------------------------------


@needs_cgroup
@pytest.mark.parametrize("mode", MODES)
async def test_a_cgroup_kills_everything_and_goes_with_it(delegated: Path, marker: str, mode: str) -> None:
    async with registry(marker) as processes:
        command = await run(processes, mode, marker)
        await is_ready(command)
        assert processes.containment == "cgroup"
        assert command.ref.pid != 0
        processes.force("T")
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert set(evidence.signals) <= {"SIGKILL", ""}  # a command may end by itself in that moment
        (own,) = (
            delegated.iterdir()
            if processes.warden_pid is None
            else [delegated / f"peri-{processes.warden_pid}"]
        )
        await until(lambda: not [entry for entry in own.iterdir() if entry.is_dir()])


@needs_cgroup
async def test_members_are_in_it_before_they_run(delegated: Path, marker: str) -> None:
    async with registry(marker) as processes:
        command = await processes.spawn(
            "T", ["cat", "/proc/self/cgroup"], cwd="/", env={"PATH": os.environ["PATH"]}
        )
        await command.wait()
        await command.settle()
        assert f"0::/{delegated.name}/peri-{processes.warden_pid}/" in command.output.text()


@needs_cgroup
async def test_a_killed_supervisor_leaves_neither_processes_nor_folder(delegated: Path, marker: str) -> None:
    async with registry(marker) as processes:
        command = await run(processes, "kills_supervisor", marker)
        await until(lambda: not command.live)
        assert (await processes.stop("T")).outcome == "empty"
        own = delegated / f"peri-{processes.warden_pid}"
        await until(lambda: not [entry for entry in own.iterdir() if entry.is_dir()])


async def test_without_a_delegated_cgroup_nothing_is_said(marker: str) -> None:
    async with registry(marker) as processes:
        await processes.start()
        assert processes.containment in ("plain", "cgroup")
        assert processes.notes == []


def test_the_root_of_all_cgroups_is_not_delegated(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": b"1:cpu:/x\n0::/\n",
        "/proc/self/mountinfo": b"30 1 0:26 / /tmp rw - cgroup2 cgroup2 rw\n",
    }
    monkeypatch.setattr(warden, "read_file", lambda path: files[path])
    assert warden.find_delegated() == ""


def test_a_delegated_cgroup_is_found_by_its_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "user.slice"
    own.mkdir()
    (own / "cgroup.procs").write_text("")
    files = {
        "/proc/self/cgroup": b"0::/user.slice\n",
        "/proc/self/mountinfo": f"30 1 0:26 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw\n".encode(),
    }
    monkeypatch.setattr(warden, "read_file", lambda path: files[path])
    assert warden.find_delegated() == str(own)
    assert warden.make_group(str(own)) == ""  # it cannot kill: no cgroup.kill
    assert list(own.iterdir()) == [own / "cgroup.procs"]


# --- namespaces -------------------------------------------------------------------------------------------------------


@needs_cage
@pytest.mark.parametrize("forced", [False, True], ids=["graceful", "forced"])
@pytest.mark.parametrize("mode", MODES)
async def test_strict_leaves_nothing(marker: str, mode: str, forced: bool) -> None:
    async with registry(marker, containment="strict") as processes:
        command = await run(processes, mode, marker)
        await is_ready(command)
        assert processes.containment == "strict"
        if forced:
            processes.force("T")
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert marked(marker) == []


@needs_cage
async def test_a_caged_command_sees_only_its_own(marker: str) -> None:
    async with registry(marker, containment="strict") as processes:
        script = 'echo $$ $PPID; ls /proc | grep -c "^[0-9]"; { kill -9 $PPID; kill -9 -1; } 2>/dev/null; echo alive; id -u; exit 7'
        command = await processes.spawn("T", ["sh", "-c", script], cwd="/", env=child_env(os.environ, "T"))
        assert await command.wait() == ExitStatus(7, None)
        await command.settle()
        numbers, count, alive, uid = command.output.text().splitlines()
        assert numbers == "2 1"
        assert int(count) <= 5
        assert (alive, int(uid)) == ("alive", os.geteuid())


@needs_cage
async def test_a_caged_daemon_outlives_its_shell_and_is_counted(marker: str) -> None:
    async with registry(marker, containment="strict") as processes:
        command = await run(processes, "exited_daemon", marker)
        assert await command.wait() == ExitStatus(0, None)
        assert await command.settle() == 1
        assert (await processes.sample("T")).processes == 1
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert evidence.signals == ("SIGKILL",)


@needs_cage
async def test_a_death_by_signal_and_a_failed_start_are_told_from_inside(marker: str) -> None:
    from peri_tui.errors import SpawnFailed

    async with registry(marker, containment="strict") as processes:
        env = child_env(os.environ, "T")
        command = await processes.spawn("T", ["sh", "-c", "kill -TERM $$"], cwd="/", env=env)
        assert await command.wait() == ExitStatus(None, signal.SIGTERM)
        with pytest.raises(SpawnFailed, match="No such file"):
            await processes.spawn("T", ["no-such-command-here"], cwd="/", env=env)


@needs_cage
async def test_the_death_of_a_caged_supervisor_ends_the_cage(marker: str) -> None:
    async with registry(marker, containment="strict") as processes:
        command = await run(processes, "lost_daemon", marker)
        await is_ready(command)
        assert command.supervisor is not None
        os.kill(command.supervisor.pid, signal.SIGKILL)
        await until(lambda: not command.live)
        assert marked(marker) == []


async def test_where_strict_is_refused_it_is_said_once_and_the_usual_way_is_used(
    marker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(warden.__file__).read_text()
    refusing = tmp_path / "warden.py"
    refusing.write_text(
        source.replace(
            "def enter_cage() -> None:",
            "def enter_cage() -> None:\n    raise OSError(1, 'no namespaces for you')",
        )
    )
    monkeypatch.setattr("peri_tui.agent.processes.link.WARDEN_FILE", refusing)
    async with registry(marker, containment="strict") as processes:
        command = await run(processes, "new_session", marker)
        await is_ready(command)
        assert processes.containment == "plain"
        (note,) = processes.notes
        assert note.startswith("strict containment is not possible here (")
        assert "no namespaces for you" in note
        first = processes.warden_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: not command.live)
        await processes.start()
        assert processes.notes == [note]


async def test_a_kernel_without_lists_of_children_is_said(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peri_tui.agent.processes.link.WARDEN_OPTIONS", ("scan",))
    async with registry(marker) as processes:
        await processes.start()
        assert len(processes.notes) == 1


def test_before_the_start_nothing_is_claimed() -> None:
    assert Processes().containment == ""
