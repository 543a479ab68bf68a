"""What the tests of models share: a consumer to stop, and the kernel's own word on sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peri_tui.agent.models.call import Clocks, Model, ModelEvent, ModelRequest
from peri_tui.agent.models.openai import OpenAiModel
from peri_tui.net import ModelTransport

OPEN = {"01", "02", "03", "08"}  # ESTABLISHED, SYN_SENT, SYN_RECV, CLOSE_WAIT


def request(text: str = "hello", **fields: Any) -> ModelRequest:
    """Return a request with one user message."""
    return ModelRequest([{"role": "user", "content": text}], [], **fields)


def open_model(
    base_url: str, *, clocks: Clocks | None = None, connect_s: float = 10, **options: Any
) -> OpenAiModel:
    """Return a model for a scripted server."""
    transport = ModelTransport(
        connect_s=connect_s, environ=options.pop("environ", {}), context=options.pop("context", None)
    )
    return OpenAiModel(base_url, "scripted", transport=transport, clocks=clocks or Clocks(), **options)


async def collect(model: Model, asked: ModelRequest, into: list[ModelEvent]) -> list[ModelEvent]:
    """Read one turn, as the agent does."""
    async with contextlib.aclosing(model.stream(asked)) as events:
        async for event in events:
            into.append(event)  # noqa: PERF401 - what came before a stop must be seen
    return into


async def until(condition: Callable[[], Any], timeout: float = 10) -> Any:
    """Wait until ``condition`` returns something true, and return it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"never came: {condition}"
        await asyncio.sleep(0.002)
    return value


def open_to(port: int) -> list[tuple[str, int]]:
    """Return (state, inode) of this process's open connections to a local port, by the kernel's tables alone."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            inode = int(fields[9])
            if fields[2].endswith(f":{port:04X}") and fields[3] in OPEN and f"socket:[{inode}]" in mine:
                found.append((fields[3], inode))
    return found


def open_fds() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
