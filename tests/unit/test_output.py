"""Head, tail and exact count of what is between; the pipe that is never waited for."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.processes.output import (
    BUDGET_BYTES,
    FRESH_BYTES,
    HEAD_BYTES,
    TAIL_BYTES,
    HeadTail,
    Output,
)

pytestmark = pytest.mark.unit


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 30), st.integers(1, 30))
def test_head_and_tail_are_the_ends_and_dropped_is_exact(parts: list[bytes], head: int, tail: int) -> None:
    kept = HeadTail(head, tail)
    for part in parts:
        kept.add(part)
    whole = b"".join(parts)
    assert kept.total == len(whole)
    assert kept.head == whole[:head]
    rest = whole[head:]
    assert kept.tail == rest[max(0, len(rest) - tail) :]
    assert kept.dropped == max(0, len(rest) - tail)
    if not kept.dropped:
        assert kept.text() == whole.decode("utf-8", "replace")


def test_text_names_the_number_of_bytes_not_kept() -> None:
    kept = HeadTail(4, 4)
    kept.add(b"abcdefghijkl")
    assert kept.text() == "abcd\n[4 bytes not kept]\nijkl"


def test_undecodable_bytes_are_replaced() -> None:
    kept = HeadTail()
    kept.add(b"a\xffb")
    assert kept.text() == "a\ufffdb"


async def until(holds, timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.001)


async def test_output_is_read_up_to_its_end() -> None:
    output = Output()
    os.write(output.writing_fd, b"hello\n")
    output.hand_over()
    await until(lambda: output.closed)
    assert output.text() == "hello\n"
    assert output.writing_fd == -1


async def test_fresh_bytes_are_the_newest_and_bounded() -> None:
    told: list[tuple[bytes, int]] = []
    output = Output(lambda data, skipped: told.append((data, skipped)))
    os.set_blocking(output.writing_fd, False)
    size = os.write(output.writing_fd, b"a" * 30_000 + b"z" * 20_000)
    await until(lambda: output.total == size)
    assert all(len(data) <= FRESH_BYTES for data, _ in told)
    assert sum(len(data) + skipped for data, skipped in told) == size
    assert told[-1][0].endswith(b"z")
    output.cut()


async def test_quiet_does_not_wait_for_an_end_of_file() -> None:
    output = Output()
    os.write(output.writing_fd, b"x")
    began = time.monotonic()
    await output.quiet(0.05, 5.0)
    assert not output.closed
    assert 0.04 < time.monotonic() - began < 3
    output.cut()


async def test_quiet_has_a_limit_when_it_is_never_quiet() -> None:
    output = Output()
    loop = asyncio.get_running_loop()

    def chatter() -> None:
        if not output.closed:
            os.write(output.writing_fd, b".")
            loop.call_later(0.01, chatter)

    chatter()
    async with asyncio.timeout(10):
        await output.quiet(5.0, 0.2)
    output.cut()


async def test_detached_output_is_read_and_thrown_away() -> None:
    output = Output()
    output.detach()
    os.write(output.writing_fd, b"late")
    await until(lambda: output.late_bytes == 4)
    assert output.text() == ""
    output.cut()


async def test_cut_takes_what_is_there_and_closes_both_ends() -> None:
    output = Output()
    before = len(os.listdir("/proc/self/fd"))
    os.write(output.writing_fd, b"last words")
    output.cut()
    output.cut()
    assert output.closed
    assert output.text() == "last words"
    assert len(os.listdir("/proc/self/fd")) == before - 2


async def test_one_callback_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    block = b"x" * 100_000
    monkeypatch.setattr(output, "_read_once", lambda: output._kept.add(block) or block)
    output._take()
    assert output.total <= BUDGET_BYTES + len(block)
    output.cut()


async def test_memory_is_bounded_whatever_comes() -> None:
    kept = HeadTail()
    for _ in range(200):
        kept.add(b"y" * 100_000)
    assert len(kept.head) == HEAD_BYTES
    assert len(kept.tail) == TAIL_BYTES
    assert len(kept._tail) <= 2 * TAIL_BYTES
    assert kept.dropped == 20_000_000 - HEAD_BYTES - TAIL_BYTES
