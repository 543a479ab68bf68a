"""Long output, terminals, and a command that prints faster than anybody reads."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from peri_tui.agent.processes import output as output_module
from peri_tui.agent.processes.spawn import ExitStatus, Ladder, child_env
from tests.contract.process_kit import is_ready, make_marker, registry, run, until
from tests.e2e.outside import marked

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]


@pytest.fixture
def marker() -> str:
    return make_marker()


async def test_long_output_is_kept_whole_in_a_file_and_short_output_makes_none(
    tmp_path: Path, marker: str
) -> None:
    async with registry(marker, spill=tmp_path) as processes:
        env = child_env(os.environ, "T")
        short = await processes.spawn("T", ["echo", "x"], cwd="/", env=env, spill="short")
        line = ["seq", "1", "200000"]
        long = await processes.spawn("T", line, cwd="/", env=env, spill="long")
        for command in (short, long):
            await command.wait()
            await command.settle()
        assert short.output.spill is None
        assert long.output.spill is not None
        kept = long.output.spill.kept
    assert [path.name for path in (tmp_path / "T").iterdir()] == ["long.log"]
    data = (tmp_path / "T" / "long.log").read_bytes()
    assert data == b"".join(b"%d\n" % number for number in range(1, 200_001))
    assert len(data) == kept == long.output.total


async def test_a_flood_is_capped_and_costs_the_stop_nothing(tmp_path: Path, marker: str) -> None:
    async with registry(marker, spill=tmp_path) as processes:
        command = await run(processes, "flood", marker, spill="c")
        await until(lambda: command.output.total > 100_000_000)
        began = time.monotonic()
        processes.force("T")
        assert (await processes.stop("T")).outcome == "empty"
        assert time.monotonic() - began < 5
        spill = command.output.spill
        assert spill is not None
        assert spill.kept + spill.dropped == command.output.total
    assert spill.path.stat().st_size <= 64_000_000 + 1000


async def test_a_throttled_command_waits_and_can_still_be_stopped(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "CAP_BYTES", 5_000_000)
    async with registry(marker, policy="throttle") as processes:
        command = await run(processes, "flood", marker)
        await until(lambda: command.output.total > 5_000_000)
        before = command.output.total
        await asyncio.sleep(1.0)
        assert command.output.total - before <= 4 << 20
        processes.force("T")
        assert (await processes.stop("T")).outcome == "empty"
        assert command.output.closed


async def test_what_a_throttled_command_printed_last_is_not_lost(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "CAP_BYTES", 1000)
    async with registry(marker, policy="throttle") as processes:
        script = "head -c 600000 /dev/zero; echo; echo the end"
        command = await processes.spawn("T", ["sh", "-c", script], cwd="/", env=child_env(os.environ, "T"))
        await command.wait()
        await command.settle()
        assert command.output.text().endswith("the end\n")


# --- terminals --------------------------------------------------------------------------------------------------------


async def test_a_command_can_have_a_terminal_of_its_own(marker: str) -> None:
    async with registry(marker) as processes:
        script = (
            "test -t 0 && test -t 1 && test -t 2 && stty size && tty </dev/tty >/dev/null && echo controls"
        )
        command = await processes.spawn(
            "T", ["sh", "-c", script], cwd="/", env=child_env(os.environ, "T"), terminal=(97, 31)
        )
        assert await command.wait() == ExitStatus(0, None)
        await command.settle()
        assert command.output.text().split() == ["31", "97", "controls"]


async def test_a_terminal_takes_input_and_another_size(marker: str) -> None:
    async with registry(marker) as processes:
        script = (
            "import os, time\n"
            "print('ready', flush=True)\n"
            "while os.get_terminal_size().columns == 80: time.sleep(0.01)\n"
            "print(*os.get_terminal_size(), flush=True)\n"
            "print('got', input(), flush=True)\n"
        )
        command = await processes.spawn(
            "T", [sys.executable, "-c", script], cwd="/", env=child_env(os.environ, "T"), terminal=(80, 24)
        )
        await is_ready(command)
        command.output.resize(132, 50)
        await until(lambda: "132 50" in command.output.text())
        command.send_input(b"hello\n")
        await command.wait()
        await command.settle()
        assert "got hello" in command.output.text()


async def test_a_password_prompt_without_a_terminal_fails_at_once(marker: str) -> None:
    async with registry(marker) as processes:
        script = "import getpass; getpass.getpass('Password: ')"
        command = await processes.spawn(
            "T", [sys.executable, "-W", "ignore", "-c", script], cwd="/", env=child_env(os.environ, "T")
        )
        async with asyncio.timeout(10):
            status = await command.wait()
        await command.settle()
        assert status.code == 1
        assert "Password: " in command.output.text()


async def test_a_password_prompt_on_a_terminal_that_ignores_everything_is_killed(marker: str) -> None:
    async with registry(marker, ladder=Ladder(60, 60, 5)) as processes:
        script = 'trap "" INT HUP TERM; printf "Password: "; stty -echo; read x'
        command = await processes.spawn(
            "T", ["bash", "-c", script, marker], cwd="/", env=child_env(os.environ, "T"), terminal=(80, 24)
        )
        await until(lambda: "Password" in command.output.text())
        processes.force("T")
        assert (await processes.stop("T")).outcome == "empty"
        assert marked(marker) == []
        assert command.output.closed
        with pytest.raises(BrokenPipeError):
            command.send_input(b"x")


async def test_jobs_in_groups_of_their_own_on_a_terminal_are_ended(marker: str) -> None:
    async with registry(marker) as processes:
        script = f"set -m; sleep 1000 {marker} & sleep 1001 & echo ready; wait"
        command = await processes.spawn(
            "T", ["bash", "-c", script.replace(f" {marker}", ""), marker], cwd="/",
            env=child_env(os.environ, "T"), terminal=(80, 24),
        )  # fmt: skip
        await is_ready(command)
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert len(evidence.ended) == 3
