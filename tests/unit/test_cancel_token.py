"""The cancel token: one effect, heard at once, one ``cancel`` of the body."""

from __future__ import annotations

import asyncio

import pytest

from peri_tui.agent.cancel import CancelCause, CancelToken
from peri_tui.core.states import StopReason

pytestmark = pytest.mark.unit

CAUSE = CancelCause(StopReason.USER, "test", "C1", 1)
LATER = CancelCause(StopReason.SHUTDOWN, "test", "C2", 2)


async def test_the_first_cause_is_kept_and_listeners_hear_it_before_set_returns() -> None:
    token, heard = CancelToken(), []
    token.on_set(lambda cause: heard.append(cause.cancel_id))
    assert token.set(CAUSE) is True
    assert heard == ["C1"]
    assert token.set(LATER) is False
    assert (token.cause, heard) == (CAUSE, ["C1"])


async def test_a_listener_that_comes_late_hears_at_once() -> None:
    token, heard = CancelToken(), []
    token.set(CAUSE)
    token.force()
    token.on_set(lambda cause: heard.append(cause.cancel_id))
    token.on_force(lambda: heard.append("force"))
    assert heard == ["C1", "force"]


async def test_a_listener_that_fails_keeps_no_other_from_stopping_its_part() -> None:
    token, heard = CancelToken(), []
    token.on_set(lambda cause: 1 / 0)
    token.on_set(lambda cause: heard.append("second"))
    token.set(CAUSE)
    assert heard == ["second"]
    assert [type(error) for error in token.errors] == [ZeroDivisionError]


async def test_a_removed_listener_is_silent() -> None:
    token, heard = CancelToken(), []
    token.on_set(lambda cause: heard.append("set"))()
    token.on_force(lambda: heard.append("force"))()
    token.set(CAUSE)
    token.force()
    assert heard == []


async def test_the_body_is_cancelled_exactly_once_however_often_it_is_asked() -> None:
    token, cancels = CancelToken(), []

    async def body() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancels.append(1)
                # A cleanup that awaits: a second cancel would cut it.
                await asyncio.sleep(0.01)
                raise

    task = asyncio.create_task(body())
    token.bind(task)
    await asyncio.sleep(0)
    for _ in range(5):
        token.set(CAUSE)
        token.force()
    await asyncio.wait({task})
    assert (task.cancelled(), cancels) == (True, [1])


async def test_a_body_bound_after_the_stop_never_runs() -> None:
    token, ran = CancelToken(), []

    async def body() -> None:
        ran.append(1)

    token.set(CAUSE)
    task = asyncio.create_task(body())
    token.bind(task)
    await asyncio.wait({task})
    assert (task.cancelled(), ran) == (True, [])


async def test_force_needs_a_stop_and_counts_once() -> None:
    token, heard = CancelToken(), []
    token.on_force(lambda: heard.append(1))
    assert token.force() is False
    token.set(CAUSE)
    assert (token.force(), token.force(), heard) == (True, False, [1])
    await token.wait_forced()
    assert await token.wait() is CAUSE
