"""The driver on a real pseudo-terminal: keys reach the lane with the loop blocked, a stalled terminal blocks nothing."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.geometry import Size
from textual.widgets import Static

from peri_tui.tui.driver import PeriDriver, make_driver_class

pytestmark = pytest.mark.tui


class FakeLane:
    """Takes presses and remembers them."""

    def __init__(self) -> None:
        self.presses: list[tuple[str, int]] = []
        self.running = True
        self.held = False

    def press(self, key: str, t_mono: int, repeat: bool = False) -> bool:
        self.presses.append((key, time.monotonic_ns()))
        return True

    def holds(self, key: str, t_mono: int) -> bool:
        return self.held


class Small(App[None]):
    def __init__(self, driver: type[PeriDriver]) -> None:
        super().__init__(driver_class=driver)
        self.keys: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static("ready", id="text")

    def on_key(self, event: Any) -> None:
        self.keys.append(event.key)


class Terminal:
    """Runs an app on a pseudo-terminal of which we hold the other end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self._input = os.fdopen(os.dup(slave), "r")
        self._output = os.fdopen(slave, "w")
        monkeypatch.setattr(sys, "__stdin__", self._input)
        monkeypatch.setattr(sys, "__stderr__", self._output)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("LINES", "24")
        self.reading = threading.Event()
        self.reading.set()
        self.closed = False
        self.seen = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self.closed:
            if self.reading.is_set() and select.select([self.master], [], [], 0.02)[0]:
                self.seen += os.read(self.master, 65536)
            elif not self.reading.is_set():
                time.sleep(0.01)

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def close(self) -> None:
        self.closed = True
        self._reader.join()
        os.close(self.master)
        self._input.close()
        self._output.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("SSH_CONNECTION", "SSH_TTY", "SSH_CLIENT", "ESCDELAY"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.close()


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Running:
    def __init__(self, app: Small) -> None:
        self.app = app

    async def __aenter__(self) -> Small:
        self.task = asyncio.create_task(self.app.run_async())
        await until(lambda: self.app.is_running and bool(self.app.screen.query("#text")))
        return self.app

    async def __aexit__(self, *_: object) -> None:
        self.app.exit()
        await self.task


async def test_keys_reach_lane_and_app(terminal: Terminal) -> None:
    lane = FakeLane()
    async with Running(Small(make_driver_class(lane))) as app:
        terminal.type(b"\x1b")
        await until(lambda: app.keys == ["escape"])
        terminal.type(b"\x03q")
        await until(lambda: app.keys == ["escape", "ctrl+c", "q"])
    assert [key for key, _ in lane.presses] == ["escape", "ctrl+c"]


async def test_the_lane_gets_the_key_while_the_loop_is_blocked(terminal: Terminal) -> None:
    lane = FakeLane()
    async with Running(Small(make_driver_class(lane))):
        threading.Timer(0.2, lambda: terminal.type(b"\x1b")).start()
        time.sleep(0.8)
        woke = time.monotonic_ns()
        assert [key for key, _ in lane.presses] == ["escape"]
        assert lane.presses[0][1] < woke - 200e6


async def test_a_held_key_does_not_reach_the_app(terminal: Terminal) -> None:
    lane = FakeLane()
    lane.held = True
    async with Running(Small(make_driver_class(lane))) as app:
        terminal.type(b"\x1b")
        await until(lambda: len(lane.presses) == 1)
        terminal.type(b"x")
        await until(lambda: bool(app.keys))
        assert app.keys == ["x"]


async def test_bytes_that_are_no_text_do_not_end_the_app(terminal: Terminal) -> None:
    async with Running(Small(make_driver_class(FakeLane()))) as app:
        terminal.type(b"\xff\x9b\xc3(")
        terminal.type(b"y")
        await until(lambda: "y" in app.keys)


async def test_a_stalled_terminal_never_blocks_the_loop_and_is_repainted(terminal: Terminal) -> None:
    async with Running(Small(make_driver_class(FakeLane()))) as app:
        driver = app._driver
        assert isinstance(driver, PeriDriver)
        terminal.reading.clear()
        worst = 0.0
        for n in range(120):
            begin = time.monotonic()
            app.query_one("#text", Static).update(f"frame {n} " + f"{n % 10}" * 1500)
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - begin)
        assert driver.frames_dropped > 0
        assert worst < 0.5
        app.query_one("#text", Static).update("the last word")
        await asyncio.sleep(0.05)
        terminal.seen.clear()
        terminal.reading.set()
        await until(lambda: b"the last word" in terminal.seen)
        assert not driver._owing


async def test_leaving_gives_up_on_a_terminal_that_takes_nothing(terminal: Terminal) -> None:
    async with Running(Small(make_driver_class(FakeLane()))) as app:
        terminal.reading.clear()
        for n in range(80):
            app.query_one("#text", Static).update(f"{n % 10}" * 1900)
            await asyncio.sleep(0.005)
        begin = time.monotonic()
        left = asyncio.create_task(asyncio.sleep(0))
        await left
        app.exit()
        await asyncio.sleep(0)
        await until(lambda: not app.is_running, 10)
        assert time.monotonic() - begin < 6
        terminal.reading.set()


async def test_without_a_lane_it_is_an_ordinary_driver(terminal: Terminal) -> None:
    async with Running(Small(make_driver_class(None))) as app:
        terminal.type(b"\x1b")
        await until(lambda: app.keys == ["escape"])


def test_a_size_that_no_signal_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = object.__new__(PeriDriver)
    told: list[Any] = []
    monkeypatch.setattr(driver, "_in_band_window_resize", False, raising=False)
    monkeypatch.setattr(driver, "_get_terminal_size", lambda: (80, 24))
    monkeypatch.setattr(driver, "process_message", told.append)
    driver.follow_size(Size(60, 20))
    assert [event.size for event in told] == [Size(80, 24)]
    driver.follow_size(Size(80, 24))
    assert len(told) == 1
