"""The question desk: one end a question, a late answer is harmless."""

from __future__ import annotations

import asyncio

import pytest

from peri_tui.agent.questions import QuestionDesk, Reply

pytestmark = pytest.mark.unit


async def asked(desk: QuestionDesk, task: str = "T", qid: str = "q1") -> asyncio.Task[Reply]:
    waiter = asyncio.create_task(desk.ask(task, qid))
    await asyncio.sleep(0)
    return waiter


async def test_an_answer_ends_it_and_a_second_one_finds_nothing() -> None:
    desk = QuestionDesk()
    waiter = await asked(desk)
    assert desk.answer("T", "q1", Reply("deny", "not now")) is True
    assert desk.answer("T", "q1", Reply("allow")) is False
    assert await waiter == Reply("deny", "not now")
    assert desk.answer("T", "q1", Reply("allow")) is False


async def test_the_stop_of_a_task_cancels_its_questions_and_no_others() -> None:
    desk = QuestionDesk()
    mine, other = await asked(desk), await asked(desk, "U")
    desk.cancel("T")
    assert await mine == Reply("cancelled")
    assert not other.done()
    other.cancel()
    await asyncio.wait({other})
    assert desk.answer("U", "q1", Reply("allow")) is False
