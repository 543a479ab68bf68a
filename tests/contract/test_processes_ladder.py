"""Profiles of the ladder, what is said while it is climbed, and what is listed after it."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from peri_tui.agent.processes.ladder import SERVER
from peri_tui.agent.processes.spawn import PIPE, ExitStatus, Ladder, Rung, SignalReport, child_env
from tests.contract.process_kit import is_ready, make_marker, registry, run, until

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

SERVES = "echo ready; cat >/dev/null; echo bye; sleep 0.1"
DEAF = 'trap "echo asked; exit 3" TERM; trap "echo interrupted" INT; echo ready; while :; do sleep 0.02; done'


@pytest.fixture
def marker() -> str:
    return make_marker()


async def test_a_server_ends_by_itself_when_its_input_is_closed(marker: str) -> None:
    async with registry(marker) as processes:
        command = await processes.spawn(
            "T", ["sh", "-c", SERVES, marker], cwd="/", env=child_env(os.environ, "T"), stdin=PIPE, ladder=SERVER
        )  # fmt: skip
        await is_ready(command)
        assert command.send_input(b"a request\n") == 10
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert [rung for rung, _ in command.rungs] == [Rung.CLOSE]
        assert evidence.rung == "closed input"
        assert command.exit_status == ExitStatus(0, None)
        assert "bye" in command.output.text()
        with pytest.raises(BrokenPipeError, match="no input"):
            command.send_input(b"more")


async def test_a_server_that_stays_is_asked_with_term_never_with_int(marker: str) -> None:
    async with registry(marker) as processes:
        command = await processes.spawn(
            "T", ["sh", "-c", DEAF, marker], cwd="/", env=child_env(os.environ, "T"), stdin=PIPE, ladder=SERVER
        )  # fmt: skip
        await is_ready(command)
        await processes.stop("T")
        assert [rung for rung, _ in command.rungs] == [Rung.CLOSE, Rung.TERMINATE]
        assert 0.5 <= command.rungs[1][1] < 1.4
        assert "asked" in command.output.text()
        assert "interrupted" not in command.output.text()


async def test_an_input_that_nobody_reads_is_an_error_not_a_signal(marker: str) -> None:
    async with registry(marker) as processes:
        command = await processes.spawn("T", ["true"], cwd="/", env=child_env(os.environ, "T"), stdin=PIPE)
        await command.wait()
        await until(lambda: not command.live)
        with pytest.raises(BrokenPipeError):
            command.send_input(b"x")


async def test_what_a_stop_waits_for_is_named_with_the_time_to_the_next_signal(marker: str) -> None:
    told: list[SignalReport] = []
    async with registry(marker, ladder=Ladder(0.8, 0.7, 5.0), on_signalled=told.append) as processes:
        await is_ready(await run(processes, "stubborn", marker))
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
    first = told[0]
    assert (first.task, first.rung, first.processes, first.fresh) == ("T", Rung.INTERRUPT, 2, True)
    assert first.next_rung is Rung.TERMINATE
    assert 0.3 < first.next_s <= 0.8
    python = first.names[0]
    assert python.startswith("python")
    assert first.text == f"interrupt sent, 2 processes ({python}), next signal in {first.next_s:.1f} s"
    second = next(one for one in told if one.rung is Rung.TERMINATE)
    assert second.text.startswith(f"termination sent, 2 processes ({python}), force in 0.")
    again = next(one for one in told if not one.fresh)
    assert again.next_s < first.next_s or again.rung is not first.rung


async def test_several_commands_are_one_sentence(marker: str) -> None:
    told: list[SignalReport] = []
    async with registry(marker, ladder=Ladder(0.6, 0.1, 5.0), on_signalled=told.append) as processes:
        for _ in range(2):
            await is_ready(await run(processes, "stubborn", marker))
        await is_ready(await run(processes, "stubborn", marker, "other"))
        await processes.stop("T")
        assert max(one.processes for one in told) == 4
        assert {one.task for one in told} == {"T"}


async def test_each_process_is_listed_with_the_signal_that_ended_it(marker: str) -> None:
    script = 'trap "" INT; sh -c "trap \\"\\" INT TERM; echo ready; while :; do sleep 1000; done" x & wait'
    async with registry(marker) as processes:
        plain = await run(processes, "plain", marker, "A")
        await is_ready(plain)
        evidence = await processes.stop("A")
        # The rest is killed as soon as the command itself is gone, so its child may get that before it is gone, too.
        assert evidence.signals[0] == "SIGINT"
        assert evidence.signals[1] in ("SIGINT", "SIGKILL")
        assert evidence.list_ended()[0] == f"{plain.ref.pid} {plain.ref.command[:160]} SIGINT"
        stays = await processes.spawn(
            "B", ["sh", "-c", script, marker], cwd="/", env=child_env(os.environ, "B")
        )
        await is_ready(stays)
        evidence = await processes.stop("B")
        by_signal = dict(zip(evidence.ended, evidence.signals, strict=True))
        assert by_signal[stays.ref] == "SIGTERM"
        assert "SIGKILL" in evidence.signals
        assert all(line.split()[-1].startswith("SIG") for line in evidence.list_ended())


async def test_a_daemon_outside_of_the_group_was_not_ended_by_the_interrupt(marker: str) -> None:
    async with registry(marker) as processes:
        command = await run(processes, "new_session", marker)
        await is_ready(command)
        evidence = await processes.stop("T")
        by_signal = dict(zip(evidence.ended, evidence.signals, strict=True))
        assert by_signal.pop(command.ref) == "SIGINT"
        assert list(by_signal.values()) == ["SIGKILL"]


async def test_what_ended_before_the_stop_is_not_listed(marker: str) -> None:
    async with registry(marker) as processes:
        command = await processes.spawn("T", ["true"], cwd="/", env={})
        await command.wait()
        await asyncio.sleep(0)
        assert (await processes.stop("T")).list_ended() == []
