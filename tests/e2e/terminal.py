"""A real terminal for end-to-end tests: ``peri`` in a pty, its screen kept by an emulator, each look timed."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyte

PERI = [str(Path(sys.executable).with_name("peri"))]
ESC = b"\x1b"
CTRL_C = b"\x03"
ENTER = b"\r"

_CLEARED = ("NO_COLOR", "TEXTUAL_THEME", "TMUX", "STY", "SSH_CONNECTION", "SSH_TTY", "SSH_CLIENT", "ESCDELAY",
            "COLUMNS", "LINES", "PERI_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "PERI_BASE_URL", "PERI_MODEL", "container",
            "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")  # fmt: skip


def clean_environment(home: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a user who has only ``PERI_HOME`` set."""
    environ = {key: value for key, value in os.environ.items() if key not in _CLEARED}
    return environ | {"PERI_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": "truecolor"} | extra


class Terminal:
    """One program in a pty.

    Args:
        argv: the command.
        cwd: where it runs.
        env: its environment.
        size: (columns, rows).
    """

    def __init__(
        self, argv: list[str], *, cwd: Path, env: dict[str, str], size: tuple[int, int] = (120, 40)
    ) -> None:
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = bytearray()
        self.chunks: list[tuple[int, bytes]] = []
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._master = master
        self._paused = threading.Event()
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            if self._paused.is_set():
                time.sleep(0.01)
                continue
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            now = time.monotonic_ns()
            with self._lock:
                self.raw += data
                self.chunks.append((now, data))
                # pyte does not know the kitty keyboard's private sequences; they draw nothing.
                self._stream.feed(data)

    # --- doing ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes | str) -> int:
        """Type; returns the monotonic nanoseconds before the write."""
        now = time.monotonic_ns()
        os.write(self._master, data.encode() if isinstance(data, str) else data)
        return now

    def submit(self, prompt: str) -> None:
        """Type a prompt and send it when the screen shows it."""
        self.send(prompt)
        self.wait_for(prompt[-20:])
        self.send(ENTER)

    def pause_reading(self) -> None:
        """Be a terminal that stalls."""
        self._paused.set()

    def resume_reading(self) -> None:
        """Read again."""
        self._paused.clear()

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window; the kernel tells the program."""
        with self._lock:
            self._screen.resize(rows, columns)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def kill(self) -> None:
        """SIGKILL the program."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End the program and the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._stop.set()
        self._reader.join(5)
        os.close(self._master)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The screen now."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, wanted: str | Callable[[str], bool], timeout: float = 20) -> str:
        """Wait until the screen shows a text or satisfies a predicate; returns the screen."""
        holds = (lambda text: wanted in text) if isinstance(wanted, str) else wanted
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            text = self.text
            if holds(text):
                return text
            if self.process.poll() is not None:
                time.sleep(0.2)
                if holds(self.text):
                    return self.text
                raise AssertionError(f"peri ended with {self.process.returncode}; the screen:\n{self.text}")
            time.sleep(0.005)
        raise AssertionError(f"never saw {wanted!r}; the screen:\n{self.text}")

    def first_seen(self, needle: bytes, after: int) -> int | None:
        """Return the monotonic nanoseconds at which bytes came that hold ``needle``, after a moment."""
        with self._lock:
            chunks = [(at, data) for at, data in self.chunks if at >= after]
        window = b""
        for at, data in chunks:
            window = window[-len(needle) :] + data
            if needle in window:
                return at
        return None

    def wait_exit(self, timeout: float = 20) -> int:
        """Wait for the end of the program and return its exit code."""
        return self.process.wait(timeout)


def peri(*arguments: str, cwd: Path, home: Path, size: tuple[int, int] = (120, 40), **env: str) -> Terminal:
    """Start ``peri`` in a terminal."""
    return Terminal([*PERI, *arguments], cwd=cwd, env=clean_environment(home, **env), size=size)


def run_peri(
    *arguments: str, cwd: Path, home: Path, timeout: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``peri`` to its end without a terminal."""
    return subprocess.run(
        [*PERI, *arguments], cwd=cwd, env=clean_environment(home, **env), timeout=timeout, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
