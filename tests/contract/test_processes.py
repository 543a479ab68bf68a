"""The contract of ``Processes``: whatever a command does, a stop ends its whole tree and proves it.

Real processes; leftovers are looked for in ``/proc`` by a marker, never in what the code under test says.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from peri_tui.agent.processes.evidence import is_alive
from peri_tui.agent.processes.spawn import (
    Command,
    ExitStatus,
    Ladder,
    Processes,
    ProcessRef,
    Rung,
    Survivor,
    TreeEvidence,
    TreeStats,
    child_env,
)
from peri_tui.core import faults
from peri_tui.errors import ProcessError, SpawnFailed
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked, state_of

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

QUICK = Ladder(interrupt_s=0.3, terminate_s=0.2, confirm_s=5.0)
SLOW_MACHINE_S = 10.0


@pytest.fixture
def marker() -> str:
    return f"mark-{uuid.uuid4().hex}"


@pytest.fixture
async def processes(marker: str) -> AsyncIterator[Processes]:
    registry = Processes(ladder=QUICK)
    yield registry
    warden = registry.warden_pid
    await registry.close()
    assert marked(marker) == []
    assert warden is None or state_of(warden) == ""
    assert zombies_of(os.getpid()) == []


async def run(registry: Processes, mode: str, marker: str, task: str = "T", **options: object) -> Command:
    env = child_env(os.environ, task)
    return await registry.spawn(task, nasty(mode, marker), cwd="/", env=env, **options)


async def shell(registry: Processes, script: str, marker: str, task: str = "T") -> Command:
    return await registry.spawn(
        task, ["sh", "-c", script, marker, sys.executable, *nasty("sleeper", marker)[1:]], cwd="/",
        env=child_env(os.environ, task),
    )  # fmt: skip


async def until(holds: Callable[[], object], timeout: float = SLOW_MACHINE_S) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.005)


async def is_ready(command: Command) -> None:
    await until(lambda: "ready" in command.output.text())


def zombies_of(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z" and int(fields[1]) == parent:
                found.append(int(entry))
    return found


def assert_proven(evidence: TreeEvidence, marker: str) -> None:
    assert evidence.outcome == "empty"
    assert evidence.survivors == ()
    assert marked(marker) == []
    assert not any(is_alive(ref) for ref in evidence.ended)


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_a_command_runs_and_its_output_and_exit_are_known(processes: Processes) -> None:
    command = await processes.spawn("T", ["sh", "-c", "echo out; echo err >&2; exit 3"], cwd="/", env={})
    assert await command.wait() == ExitStatus(3, None)
    assert await command.settle() == 0
    assert sorted(command.output.text().split()) == ["err", "out"]


async def test_death_by_a_signal_is_told_as_such(processes: Processes) -> None:
    command = await processes.spawn("T", ["sh", "-c", "kill -TERM $$"], cwd="/", env={})
    assert await command.wait() == ExitStatus(None, signal.SIGTERM)


@pytest.mark.parametrize(
    ("argv", "cwd", "stage", "names"),
    [
        (["no-such-command-here", "x"], "/", "exec", "no-such-command-here x: No such file or directory"),
        (["sh"], "/no/such/folder", "chdir", "/no/such/folder: No such file or directory"),
        (["/etc/passwd"], "/", "exec", "/etc/passwd: Permission denied"),
        ([], "/", "request", "empty command"),
        (["a\0b"], "/", "request", "NUL"),
        (["sh", "-c", "x" * 200_000], "/", "exec", "Argument list too long"),
    ],
)
async def test_a_failed_start_says_what_and_why(
    processes: Processes, argv: list[str], cwd: str, stage: str, names: str
) -> None:
    with pytest.raises(SpawnFailed, match=names.replace("/", "/")) as caught:
        await processes.spawn("T", argv, cwd=cwd, env={"PATH": os.environ["PATH"]})
    assert caught.value.evidence["stage"] == stage
    assert caught.value.evidence["errno"]
    assert (await processes.stop("T")).outcome == "empty"


@pytest.mark.parametrize("where", ["request_file", "Output"])
async def test_running_out_of_descriptors_is_named_and_leaks_none(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    await processes.start()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(f"peri_tui.agent.processes.spawn.{where}", run_out)
    with pytest.raises(SpawnFailed, match="true: Too many open files"):
        await processes.spawn("T", ["true"], cwd="/", env={})
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.undo()
    await processes.spawn("T", ["true"], cwd="/", env={})


async def test_a_fifo_without_a_writer_does_not_hold_the_stop(processes: Processes, tmp_path: Path) -> None:
    # openai/codex#4337: only the shell was killed, the reader of a fifo stayed.
    command = await processes.spawn(
        "T", ["sh", "-c", "mkfifo f; (cat f; cat f) & echo ready; cat f"], cwd=str(tmp_path),
        env=child_env(os.environ, "T"),
    )  # fmt: skip
    await is_ready(command)
    evidence = await command.stop()
    assert evidence.outcome == "empty"
    assert marked(str(tmp_path)) == []


async def test_arguments_and_folder_may_be_any_bytes(processes: Processes, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe9")
    os.mkdir(folder)
    command = await processes.spawn("T", ["sh", "-c", 'printf "%s" "$1"', "x", "\udcfeé"], cwd=folder, env={})
    await command.wait()
    await command.settle()
    assert command.output._kept.head == b"\xfe\xc3\xa9"


async def test_a_large_request_goes_through(processes: Processes) -> None:
    env = {f"V{index}": "v" * 10_000 for index in range(60)}
    command = await processes.spawn("T", ["sh", "-c", "exit 0"], cwd="/", env=env)
    assert await command.wait() == ExitStatus(0, None)


async def test_a_command_gets_clean_signals_descriptors_and_input(processes: Processes) -> None:
    script = "grep -E '^Sig(Ign|Blk)' /proc/self/status; ls /proc/$$/fd; readlink /proc/$$/fd/0"
    command = await processes.spawn("T", ["sh", "-c", script], cwd="/", env=child_env(os.environ, "T"))
    await command.wait()
    await command.settle()
    text = command.output.text()
    masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith("Sig")]
    # Signals 32 and 33 belong to the C library, which lets nobody change them; posix_spawn leaves them ignored.
    assert [mask & ~(0b11 << 31) for mask in masks] == [0, 0]
    assert text.split()[-4:] == ["0", "1", "2", "/dev/null"]


def test_a_command_never_gets_a_key() -> None:
    environ = {
        "PATH": "/bin",
        "PERI_API_KEY": "k",
        "OPENAI_API_KEY": "k",
        "SSH_AUTH_SOCK": "s",
        "LC_ALL": "C",
    }
    env = child_env(environ, "T", {"TMPDIR": "/t"})
    assert env == {
        "PATH": "/bin", "LC_ALL": "C", "TERM": "dumb", "PERI": "1", "PERI_TASK": "T", "TMPDIR": "/t",
    }  # fmt: skip
    with pytest.raises(ValueError, match="MY_TOKEN"):
        child_env({}, "T", {"MY_TOKEN": "t"})


async def test_the_warden_has_no_key_either(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    await processes.start()
    assert b"sk-secret" not in Path(f"/proc/{processes.warden_pid}/environ").read_bytes()


async def test_other_systems_are_refused_not_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peri_tui.agent.processes.spawn.sys.platform", "win32")
    with pytest.raises(ProcessError, match="Linux and macOS only, this is win32"):
        await Processes().start()


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_a_sleeping_command_ends_at_the_first_signal(processes: Processes, marker: str) -> None:
    command = await run(processes, "sleeper", marker)
    await is_ready(command)
    evidence = await processes.stop("T")
    assert_proven(evidence, marker)
    assert evidence.ended == (command.ref,)
    assert evidence.rung == "SIGINT"
    assert not command.live


async def test_the_default_ladder_takes_three_seconds_for_who_ignores_it(marker: str) -> None:
    told: list[tuple[Rung, float]] = []
    registry = Processes(on_rung=lambda task, command, rung, elapsed: told.append((rung, elapsed)))
    command = await run(registry, "stubborn", marker)
    await is_ready(command)
    evidence = await registry.stop("T")
    assert_proven(evidence, marker)
    assert evidence.rung == "SIGKILL"
    assert len(evidence.ended) == 2
    assert [rung for rung, _ in told] == [Rung.INTERRUPT, Rung.TERMINATE, Rung.KILL]
    assert 2.0 <= told[1][1] < 2.9
    assert 3.0 <= told[2][1] < 3.9
    assert 3.0 <= evidence.seconds < 3.0 + SLOW_MACHINE_S
    await registry.close()


async def test_forcing_skips_what_is_left_of_the_ladder(marker: str) -> None:
    registry = Processes(ladder=Ladder(60, 60, 5))
    command = await run(registry, "stubborn", marker)
    await is_ready(command)
    forced = asyncio.Event()
    stopping = asyncio.create_task(registry.stop("T", forced=forced))
    await until(lambda: command.rungs)
    forced.set()
    async with asyncio.timeout(SLOW_MACHINE_S):
        assert_proven(await stopping, marker)
    assert [rung for rung, _ in command.rungs] == [Rung.INTERRUPT, Rung.KILL]
    await registry.close()


async def test_forced_may_be_a_function(marker: str) -> None:
    registry = Processes(ladder=Ladder(60, 60, 5))
    command = await run(registry, "stubborn", marker)
    await is_ready(command)
    async with asyncio.timeout(SLOW_MACHINE_S):
        assert_proven(await registry.stop("T", forced=lambda: True), marker)
    await registry.close()


async def test_interrupt_sends_before_it_returns_and_never_waits(processes: Processes, marker: str) -> None:
    command = await run(processes, "cleans_up", marker)
    await is_ready(command)
    processes.interrupt("T")
    assert [rung for rung, _ in command.rungs] == [Rung.INTERRUPT]
    assert await command.wait() == ExitStatus(0, None)
    assert_proven(await processes.stop("T"), marker)
    assert "cleaned up" in command.output.text()


NASTY = [
    "plain",
    "stopped",
    "new_session",
    "threaded",
    "own_group",
    "lost_daemon",
    "exited_daemon",
    "respawner",
    "wide:200",
    "chain:150",
    "hops:200",
    "burst:100",
    "zombies:5",
    "holds_stdout",
]


@pytest.mark.parametrize("forced", [False, True], ids=["graceful", "forced"])
@pytest.mark.parametrize("mode", NASTY)
async def test_nothing_is_left(processes: Processes, marker: str, mode: str, forced: bool) -> None:
    command = await run(processes, mode, marker)
    await is_ready(command)
    if forced:
        processes.force("T")
    evidence = await processes.stop("T")
    assert_proven(evidence, marker)
    assert evidence.seconds < 0.5 + SLOW_MACHINE_S
    warden = processes.warden_pid
    assert warden is not None
    await until(lambda: not zombies_of(warden))


@pytest.mark.parametrize(
    "mode", ["threaded", "lost_daemon", "respawner", "wide:50", "hops:200", "kills_supervisor"]
)
async def test_without_lists_of_children_nothing_is_left_either(
    processes: Processes, marker: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peri_tui.agent.processes.link.WARDEN_OPTIONS", ("scan",))
    command = await run(processes, mode, marker)
    await is_ready(command)
    if mode == "kills_supervisor":
        await until(lambda: not command.live)
    processes.force("T")
    assert_proven(await processes.stop("T"), marker)


@pytest.mark.parametrize("mode", ["hops:200", "burst:100"])
async def test_races_of_forks_with_the_kill_leave_nothing(
    processes: Processes, marker: str, mode: str
) -> None:
    for index in range(8):
        task = f"T{index}"
        command = await run(processes, mode, marker, task)
        await is_ready(command)
        processes.force(task)
        assert_proven(await processes.stop(task), marker)


@pytest.mark.parametrize(
    "script",
    [
        'nohup "$@" >/dev/null 2>&1 & (setsid nohup "$@" >/dev/null 2>&1 &); echo ready; wait',
        '(trap "" HUP INT; "$@" &) ; echo ready; wait; while :; do sleep 1; done',
    ],
)
async def test_jobs_that_a_shell_let_go_are_ended(processes: Processes, marker: str, script: str) -> None:
    command = await shell(processes, script, marker)
    await is_ready(command)
    assert_proven(await processes.stop("T"), marker)


async def test_a_background_job_that_ignores_the_interrupt_gets_the_next_signal(
    processes: Processes, marker: str
) -> None:
    # A shell without job control starts background jobs with SIGINT ignored.
    command = await shell(processes, 'trap ":" INT; "$@" & while :; do wait; done', marker)
    await is_ready(command)
    evidence = await processes.stop("T")
    assert_proven(evidence, marker)
    assert Rung.TERMINATE in [rung for rung, _ in command.rungs]


async def test_a_daemon_outlives_its_shell_and_is_counted_then_ended(
    processes: Processes, marker: str
) -> None:
    command = await run(processes, "exited_daemon", marker)
    assert await command.wait() == ExitStatus(0, None)
    assert await command.settle() == 1
    assert len(marked(marker)) == 1
    evidence = await processes.stop("T")
    assert_proven(evidence, marker)
    assert len(evidence.ended) == 1
    assert evidence.rung == "SIGKILL"


async def test_a_grandchild_that_holds_the_output_does_not_hold_the_result(
    processes: Processes, marker: str
) -> None:
    # openai/codex#3204: tools hang because a grandchild inherited stdout.
    command = await shell(processes, '"$@" & echo hi', marker)
    assert await command.wait() == ExitStatus(0, None)
    began = time.monotonic()
    assert await command.settle() == 1
    assert time.monotonic() - began < 1.0 + 1.0
    assert "hi" in command.output.text()
    assert_proven(await processes.stop("T"), marker)


async def test_a_background_writer_is_not_killed_by_a_closed_pipe(processes: Processes, marker: str) -> None:
    script = 'trap "" INT; (trap - PIPE; while :; do echo tick; sleep 0.02; done) & echo ready'
    command = await shell(processes, script, marker)
    await command.wait()
    assert await command.settle() >= 1
    kept, late = command.output.total, command.output.late_bytes
    await until(lambda: command.output.late_bytes > late + 20)
    assert command.output.total == kept
    assert command.live
    assert (await processes.stop("T")).outcome == "empty"


async def test_full_speed_output_does_not_delay_the_stop_or_the_loop(
    processes: Processes, marker: str
) -> None:
    fresh: list[int] = []
    command = await run(processes, "flood", marker, on_output=lambda data, skipped: fresh.append(len(data)))
    await until(lambda: command.output.total > 20_000_000)
    assert max(fresh) <= 16 * 1024
    processes.force("T")
    assert_proven(await processes.stop("T"), marker)
    assert command.output.closed
    assert len(command.output.text()) < 300_000
    assert command.output.dropped == command.output.total - 256 * 1024


async def test_a_command_blocked_on_a_full_pipe_is_ended(processes: Processes, marker: str) -> None:
    command = await run(processes, "flood", marker)
    reading = command.output._reading
    asyncio.get_running_loop().remove_reader(reading)
    await until(lambda: state_of(command.ref.pid) == "S")
    assert_proven(await processes.stop("T"), marker)


async def test_the_task_kills_its_supervisor(processes: Processes, marker: str) -> None:
    command = await run(processes, "kills_supervisor", marker)
    await until(lambda: not command.live)
    assert await command.wait() == ExitStatus(None, signal.SIGKILL)
    assert marked(marker) == []
    assert_proven(await processes.stop("T"), marker)
    again = await processes.spawn("U", ["true"], cwd="/", env={})
    assert await again.wait() == ExitStatus(0, None)


async def test_the_task_freezes_its_supervisor(processes: Processes, marker: str) -> None:
    command = await run(processes, "stops_supervisor", marker)
    assert command.supervisor is not None
    await until(lambda: state_of(command.supervisor.pid) == "T")
    processes.force("T")
    assert_proven(await processes.stop("T"), marker)


async def test_a_supervisor_that_stays_frozen_is_replaced_by_the_warden(
    processes: Processes, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = await run(processes, "new_session", marker)
    await is_ready(command)
    assert command.supervisor is not None
    os.kill(command.supervisor.pid, signal.SIGSTOP)
    real = signal.pidfd_send_signal
    monkeypatch.setattr(
        signal, "pidfd_send_signal", lambda fd, number: None if number == signal.SIGCONT else real(fd, number)
    )
    processes.force("T")
    evidence = await processes.stop("T")
    assert_proven(evidence, marker)
    assert command.ref in evidence.ended


async def test_two_tasks_do_not_touch_each_other(processes: Processes, marker: str) -> None:
    first = await run(processes, "lost_daemon", marker, "A")
    other = f"{marker}-b"
    second = await run(processes, "lost_daemon", other, "B")
    await is_ready(first)
    await is_ready(second)
    await until(lambda: len(marked(other)) == 2)
    before = set(marked(other))
    evidence = await processes.stop("A")
    assert evidence.outcome == "empty"
    assert set(marked(marker)) == before
    assert not {ref.pid for ref in evidence.ended} & before
    assert_proven(await processes.stop("B"), marker)


async def test_one_command_can_be_stopped_alone(processes: Processes, marker: str) -> None:
    first = await run(processes, "plain", marker)
    second = await run(processes, "plain", f"{marker}-b")
    await is_ready(first)
    await is_ready(second)
    assert (await first.stop()).outcome == "empty"
    assert len(marked(f"{marker}-b")) == 2
    third = await processes.spawn("T", ["true"], cwd="/", env={})
    assert await third.wait() == ExitStatus(0, None)
    assert_proven(await processes.stop("T"), marker)


async def test_a_second_stop_gives_the_same_answer_and_sends_nothing(
    processes: Processes, marker: str
) -> None:
    command = await run(processes, "plain", marker)
    await is_ready(command)
    first = await asyncio.gather(processes.stop("T"), processes.stop("T"))
    rungs = list(command.rungs)
    processes.interrupt("T")
    processes.force("T")
    assert [*first, await processes.stop("T")] == [first[0]] * 3
    assert command.rungs == rungs
    assert_proven(first[0], marker)


async def test_a_stop_without_commands_is_empty(processes: Processes) -> None:
    assert await processes.stop("nobody") == TreeEvidence("empty")


async def test_a_stopped_task_starts_nothing_more(processes: Processes) -> None:
    await processes.stop("T")
    with pytest.raises(SpawnFailed, match="task T was stopped"):
        await processes.spawn("T", ["true"], cwd="/", env={})
    processes.forget("T")
    await processes.spawn("T", ["true"], cwd="/", env={})


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 12])
async def test_a_stop_during_the_start_leaves_nothing(processes: Processes, marker: str, delay: int) -> None:
    await processes.start()
    starting = asyncio.create_task(run(processes, "new_session", marker))
    for _ in range(delay):
        await asyncio.sleep(0.001)
    processes.interrupt("T")
    evidence = await processes.stop("T")
    assert evidence.outcome == "empty"
    await asyncio.wait([starting])
    assert starting.exception() is None or isinstance(starting.exception(), SpawnFailed)
    assert_proven(await processes.stop("T"), marker)


async def test_a_cancelled_start_leaves_nothing(processes: Processes, marker: str) -> None:
    await processes.start()
    starting = asyncio.create_task(run(processes, "new_session", marker))
    while not processes._by_number:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not processes._by_number)
    assert marked(marker) == []


async def test_a_waiter_that_is_cancelled_does_not_cancel_the_stop(processes: Processes, marker: str) -> None:
    command = await run(processes, "stubborn", marker)
    await is_ready(command)
    waiter = asyncio.create_task(processes.stop("T"))
    await until(lambda: command.rungs)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert_proven(await processes.stop("T"), marker)


async def test_closing_kills_everything(marker: str) -> None:
    registry = Processes(ladder=Ladder(60, 60, 5))
    for task, mode in (("A", "stubborn"), ("B", "lost_daemon"), ("C", "respawner")):
        await is_ready(await run(registry, mode, marker, task))
    warden = registry.warden_pid
    assert warden is not None
    assert_proven(await registry.close(), marker)
    assert state_of(warden) == ""
    with pytest.raises(ProcessError, match="ending"):
        await registry.spawn("D", ["true"], cwd="/", env={})
    assert await registry.close() == TreeEvidence("empty")


async def test_fifty_cycles_leave_no_descriptor_and_no_zombie(processes: Processes, marker: str) -> None:
    async def cycle(task: str) -> None:
        await run(processes, "new_session", marker, task)
        processes.force(task)
        await processes.stop(task)
        processes.forget(task)

    await cycle("first")
    warden = processes.warden_pid
    assert warden is not None
    places = ("/proc/self/fd", f"/proc/{warden}/fd")
    before = [len(os.listdir(place)) for place in places]
    for index in range(50):
        await cycle(f"T{index}")
    await until(lambda: not zombies_of(warden))
    assert [len(os.listdir(place)) for place in places] == before
    assert processes._stopped == {}
    assert zombies_of(os.getpid()) == []


# --- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["new_session", "threaded", "lost_daemon"])
async def test_a_sample_sees_the_whole_tree(processes: Processes, marker: str, mode: str) -> None:
    command = await run(processes, mode, marker)
    await is_ready(command)
    stats = await processes.sample("T")
    assert stats.processes == 2
    assert stats.rss_bytes > 1_000_000
    assert stats.names
    assert stats.cpu_seconds >= 0
    assert processes.stats("T") == stats
    assert {ref.pid for ref in processes.list_refs("T")} == set(marked(marker))
    await processes.stop("T")
    assert await processes.sample("T") == TreeStats()
    assert processes.list_refs("T") == ()


async def test_the_skipped_kill_is_never_called_empty(marker: str) -> None:
    registry = Processes(ladder=Ladder(0.05, 0.05, 0.3))
    command = await run(registry, "plain", marker)
    await is_ready(command)
    faults.install(["processes.skip_kill"])
    try:
        evidence = await registry.stop("T")
        assert evidence.outcome == "survivors"
        assert [(one.pid, one.reason) for one in evidence.survivors] == [(command.ref.pid, "not confirmed")]
        assert len(marked(marker)) == 2
    finally:
        faults.install([])
    os.kill(command.ref.pid, signal.SIGKILL)
    again = await registry.stop("T")
    assert again.outcome == "empty" or marked(marker)
    await registry.close()
    await until(lambda: not marked(marker))


async def test_an_empty_that_is_a_lie_is_found_out(processes: Processes, marker: str) -> None:
    command = await run(processes, "plain", marker)
    await is_ready(command)
    assert command.supervisor is not None
    os.kill(command.supervisor.pid, signal.SIGSTOP)
    command._learn({"ev": "empty", "killed": []})
    evidence = await processes.stop("T")
    assert evidence.outcome == "survivors"
    assert evidence.survivors[0].pid == command.ref.pid
    os.kill(command.supervisor.pid, signal.SIGCONT)
    # The socket is closed by now, which a supervisor takes as an order to kill.
    await until(lambda: not marked(marker))


def test_merged_evidence_is_the_worst_of_all() -> None:
    one, two = ProcessRef(1, 1, "a"), ProcessRef(2, 2, "b")
    left = Survivor(3, 3, "sudo apt", "root", "not permitted")
    merged = TreeEvidence.merge(
        [
            TreeEvidence("empty", (one,), (), "SIGINT", 0.1),
            TreeEvidence("survivors", (two,), (left,), "SIGKILL", 8.0),
            TreeEvidence("best_effort", (one,), (), "", 0.0),
        ]
    )
    assert merged == TreeEvidence("survivors", (one, two), (left,), "SIGKILL", 8.0)
    assert TreeEvidence.merge([]) == TreeEvidence("empty")
