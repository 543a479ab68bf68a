"""The ledger and the sweep: what a dead agent left is found by number *and* start time, and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peri_tui.agent.processes import ledger as ledger_module
from peri_tui.agent.processes.evidence import ProcessRef, is_alive
from peri_tui.agent.processes.ledger import Ledger, ledger_folder, read_ledger, read_ledgers
from peri_tui.agent.processes.spawn import Processes, child_env
from peri_tui.agent.processes.sweep import Sweep, describe, send
from peri_tui.agent.processes.table import read_row
from peri_tui.agent.scheduler.ownership import this_boot
from peri_tui.config import Paths, find_paths
from peri_tui.core.ids import make_ulid
from peri_tui.doctor.descriptors import _address
from peri_tui.doctor.ps import show_processes
from peri_tui.errors import UsageError
from tests.e2e.outside import state_of, wait_until

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc"),
]

DEAD, LIVING = "01J000000000000000000DEAD0", "01J0000000000000000000A11V"
# Its own in each worker: the tag is looked for in all of the machine's processes.
TASK = make_ulid(0, os.urandom(10))
GONE = ProcessRef(2**22 + 1, 1, "agent")  # No pid is that high.
STUBBORN = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"

Start = Callable[..., ProcessRef]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path)})
    found.make()
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes of this test; they are reaped as they end, as init would."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, tag: str = "") -> ProcessRef:
        env = {"PATH": os.environ["PATH"]} | ({"PERI_TASK": tag} if tag else {})
        waits = bool(argv)
        argv = argv or ("sleep", "1000")
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE if waits else None)
        if process.stdout:
            process.stdout.readline()
            process.stdout.close()
        started.append(process)
        row = wait_until(lambda: read_row(process.pid))
        return ProcessRef(process.pid, row.start_time, " ".join(argv))

    yield begin
    for process in started:
        process.kill()
        process.wait()


def me() -> ProcessRef:
    row = read_row(os.getpid())
    assert row is not None
    return row.ref


def write(paths: Paths, instance: str, agent: ProcessRef, boot: str | None = None, **how: Any) -> Ledger:
    boot = this_boot() if boot is None else boot
    return Ledger(ledger_folder(paths), instance=instance, boot=boot, agent=agent, **how)


def command(
    ref: ProcessRef, *, task: str = TASK, number: int = 1, supervisor: ProcessRef | None = None
) -> Any:
    return SimpleNamespace(number=number, task=task, ref=ref, supervisor=supervisor)


def test_what_was_written_is_read_and_what_ended_is_forgotten(paths: Paths) -> None:
    ledger = write(paths, DEAD, GONE, workspace="/w")
    one, two, child = ProcessRef(11, 1, "sleep 1"), ProcessRef(12, 2, "caf\udce9"), ProcessRef(13, 3, "x")
    ledger.warden_started(ProcessRef(10, 9, "peri-warden"))
    ledger.command_started(command(one, supervisor=ProcessRef(9, 8, "")))
    ledger.command_started(command(two, number=2))
    ledger.processes_seen(1, [child])
    ledger.command_moved(1, "service:j1")
    ledger.command_ended(2)
    ledger.processes_seen(2, [child])
    (book,) = read_ledgers(ledger_folder(paths))
    assert (book.instance, book.agent.pid, book.workspace) == (DEAD, GONE.pid, "/w")
    assert [ref.pid for ref in book.wardens] == [10]
    (entry,) = book.entries
    assert (entry.task, entry.tag, entry.refs) == ("service:j1", TASK, (one, child))
    assert entry.supervisor is not None
    assert entry.supervisor.pid == 9
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    ledger.command_ended(1)
    ledger.close()
    assert not ledger.path.exists()


def test_a_ledger_with_something_left_stays(paths: Paths) -> None:
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(ProcessRef(11, 1, "sleep 1")))
    ledger.close()
    assert ledger.path.exists()


def test_it_does_not_grow_for_as_long_as_the_agent_lives(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_BYTES", 2000)
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(ProcessRef(11, 1, "first")))
    for number in range(2, 200):
        ledger.command_started(command(ProcessRef(number + 10, 1, "sleep")))
        ledger.command_started(command(ProcessRef(number + 10, 1, "sleep"), number=number))
        ledger.command_ended(number)
    assert ledger.path.stat().st_size < 3000
    book = read_ledger(ledger.path)
    assert book is not None
    assert len(book.entries) == 1


def test_processes_without_end_are_forgotten_when_dead(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_SEEN", 10)
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(me()))
    for number in range(50):
        ledger.processes_seen(1, [ProcessRef(2**22 + number, 1, "gone"), me()])
    (entry,) = ledger.live
    assert len(entry.seen) <= 12
    assert me() in entry.seen


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]\n", b"null\n", b'{"ev": "agent"}\n', b'{"ev": "__init__"}\n', b"\xff\xfe\n", b"[" * 5000,
     b'{"ev": "began", "n": "x"}\n', b'{"ev": "seen", "n": 1, "refs": [[1]]}\n', b'{"ev": "ended", "n": [1]}\n'],
)  # fmt: skip
def test_damaged_lines_are_skipped(paths: Paths, damage: bytes) -> None:
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(ProcessRef(11, 1, "sleep 1")))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(damage + b"\n" + whole + damage)
    book = read_ledger(ledger.path)
    assert book is not None
    assert [entry.ref.pid for entry in book.entries] == [11]
    ledger.path.write_bytes(damage)
    assert read_ledger(ledger.path) is None
    assert Sweep(paths).find() == []


def test_a_disk_that_refuses_is_told_once_and_stops_nothing(paths: Paths) -> None:
    ledger_folder(paths).write_text("no folder")
    told: list[str] = []
    ledger = write(paths, DEAD, GONE, trouble=told.append)
    ledger.command_started(command(ProcessRef(11, 1, "sleep 1")))
    ledger.command_ended(1)
    ledger.close()
    assert len(told) == 1
    assert "cannot be written" in told[0]


async def test_commands_are_written_as_they_start_and_end(paths: Paths) -> None:
    ledger = write(paths, LIVING, me())
    processes = Processes(ledger=ledger)
    try:
        running = await processes.spawn("T", ["sleep", "1000"], cwd="/", env=child_env(os.environ, "T"))
        book = read_ledger(ledger.path)
        assert book is not None
        assert [ref.pid for ref in book.wardens] == [processes.warden_pid]
        (entry,) = book.entries
        assert (entry.task, entry.ref, entry.supervisor) == ("T", running.ref, running.supervisor)
        assert (await processes.stop("T")).outcome == "empty"
        assert ledger.live == ()
    finally:
        await processes.close()
    ledger.close()
    assert not ledger.path.exists()


# --- the sweep ------------------------------------------------------------------------------------------------------


def test_a_leftover_is_found_by_ledger_by_tag_and_below_one(paths: Paths, start: Start) -> None:
    parent = start("sh", "-c", "sleep 1000 & echo; wait")
    tagged = start(tag=TASK)
    start(tag="01J0000000000000000THERTSK")
    start()
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(parent))
    found = {(one.ref.pid, one.found): one for one in Sweep(paths).find()}
    assert {(parent.pid, "ledger"), (tagged.pid, "tag")} <= found.keys()
    (child,) = [one for one in found.values() if one.found == "child"]
    assert child.ref.command == "sleep 1000"
    assert len(found) == 3
    assert {one.task for one in found.values()} == {TASK}
    assert Sweep(paths).find("01J0000000000000000THERTSK") == []
    assert describe(list(found.values())) == (
        "3 processes of a task whose agent died are still alive: see peri ps"
    )


def test_26_an_innocent_process_with_a_reused_number_is_never_hit(paths: Paths, start: Start) -> None:
    innocent, guilty = start(), start()
    ledger = write(paths, DEAD, GONE)
    reused = ProcessRef(innocent.pid, innocent.start_time - 1, "what had the number before")
    ledger.command_started(command(reused))
    ledger.processes_seen(1, [ProcessRef(innocent.pid, 0, "older still"), guilty])
    assert [one.ref.pid for one in Sweep(paths).find()] == [guilty.pid]
    assert send(reused, signal.SIGKILL) == ""
    result = Sweep(paths).end(polite_s=0)
    assert [one.ref.pid for one in result.ended] == [guilty.pid]
    assert state_of(innocent.pid) not in ("", "Z")
    assert not ledger.path.exists()


def test_nothing_of_a_living_agent_and_not_who_asks_is_a_leftover(paths: Paths, start: Start) -> None:
    theirs = start(tag=TASK)
    dead = write(paths, DEAD, GONE)
    dead.command_started(command(me()))
    dead.processes_seen(1, [theirs])
    living = write(paths, LIVING, start())
    living.command_started(command(theirs))
    assert Sweep(paths).find() == []
    Sweep(paths).tidy()
    assert not dead.path.exists()
    assert living.path.exists()


@pytest.mark.parametrize("boot", ["other-boot/pid:[1]", f"{this_boot().partition('/')[0]}/pid:[1]"])
def test_numbers_of_another_boot_or_namespace_say_nothing(paths: Paths, start: Start, boot: str) -> None:
    ledger = write(paths, DEAD, GONE, boot)
    ledger.command_started(command(start()))
    assert Sweep(paths).find() == []
    Sweep(paths).tidy()
    same_boot = boot.startswith(this_boot().partition("/")[0])
    assert ledger.path.exists() == same_boot
    if same_boot:
        os.utime(ledger.path, (1, 1))
    # Whether an agent in another namespace lives cannot be told by its number; its free lock tells.
    (paths.data / "instances").mkdir(exist_ok=True)
    (paths.data / "instances" / f"{DEAD}.lock").touch()
    Sweep(paths).tidy()
    assert not ledger.path.exists()


def test_one_that_ignores_sigterm_is_killed_and_one_that_heeds_it_is_not(paths: Paths, start: Start) -> None:
    stubborn = start(sys.executable, "-c", STUBBORN)
    heeds = start(sys.executable, "-c", STUBBORN.replace("signal.SIG_IGN", "lambda *a: os._exit(7)"))
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(stubborn))
    ledger.command_started(command(heeds, number=2))
    result = Sweep(paths).end(polite_s=1.5)
    assert {one.ref.pid for one in result.ended} == {stubborn.pid, heeds.pid}
    assert result.left == ()
    assert (
        os.waitstatus_to_exitcode(os.waitpid(heeds.pid, os.WNOWAIT)[1] if False else _status(heeds.pid)) == 7
    )
    assert os.waitstatus_to_exitcode(_status(stubborn.pid)) == -9


def _status(pid: int) -> int:
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status << 8 if info.si_code == os.CLD_EXITED else info.si_status


def test_one_that_may_not_be_ended_is_named_with_the_reason(
    paths: Paths, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    ref = start()
    ledger = write(paths, DEAD, GONE)
    ledger.command_started(command(ref))
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    result = Sweep(paths).end(polite_s=0.05, limit_s=0.2)
    assert [(one.ref.pid, why) for one, why in result.left] == [(ref.pid, "not permitted")]
    assert ledger.path.exists()
    sweep = Sweep(paths)
    monkeypatch.setattr(sweep, "end", lambda: result)
    assert show_processes(paths, kill=True, yes=True, sweep=sweep) == 74
    assert f"not ended pid {ref.pid}  sleep 1000 (not permitted)" in capsys.readouterr().out


# --- peri ps --kill asks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("YES ", 0), ("", 74), ("n", 74), (None, 74)])
def test_kill_asks_first(
    paths: Paths, start: Start, answer: str | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(question: str) -> str:
        assert question == "End this process? [y/N] "
        assert is_alive(ref)
        if answer is None:
            raise EOFError
        return answer

    ref = start()
    write(paths, DEAD, GONE).command_started(command(ref))
    assert show_processes(paths, kill=True, interactive=True, ask=ask) == code
    told = capsys.readouterr().out
    assert (f"ended pid {ref.pid}" in told) == (code == 0)
    assert ("nothing was ended" in told) == (code == 74)
    assert is_alive(ref) == (code == 74)


def test_kill_with_nothing_left_asks_nobody(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_processes(paths, kill=True, interactive=True, ask=lambda text: pytest.fail(text)) == 0
    assert capsys.readouterr().out == "nothing runs\n"
    with pytest.raises(UsageError, match="add --yes"):
        show_processes(paths, kill=True)


def test_json_says_what_was_ended_and_hostile_names_stay_on_their_line(
    paths: Paths, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = start(
        sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)", "\x1b[2J\nrm", "\udcff"
    )
    write(paths, DEAD, GONE).command_started(command(ref))
    assert show_processes(paths) == 74
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert len(text.splitlines()) == 4
    assert show_processes(paths, kill=True, yes=True, as_json=True) == 0
    value = json.loads(capsys.readouterr().out)
    assert [one["pid"] for one in value["ended"]] == [ref.pid]
    assert value["not_ended"] == []


def test_addresses_of_the_kernels_tables() -> None:
    if sys.byteorder == "little":
        assert _address("0100007F:1F90") == "127.0.0.1:8080"
        assert _address("00000000000000000000000001000000:0050") == "[::1]:80"
