"""The question desk: questions of running tasks to the user, and their answers.

A question ends in exactly one way: an answer, or *cancelled* by the stop of its task. A late answer finds nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

OUTCOMES = frozenset({"allow", "allow_session", "deny"})


@dataclass(frozen=True, slots=True)
class Reply:
    """How a question ended, with the user's words for a denial."""

    outcome: str
    text: str = ""


class QuestionDesk:
    """Holds the open questions of one agent, by task and question id."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], asyncio.Future[Reply]] = {}

    async def ask(self, task: str, qid: str) -> Reply:
        """Wait for the end of a question; a cancelled waiter closes it."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[task, qid] = future
        try:
            return await future
        finally:
            self._open.pop((task, qid), None)

    def answer(self, task: str, qid: str, reply: Reply) -> bool:
        """Answer an open question. False when it is closed or never was: the answer is harmless."""
        future = self._open.get((task, qid))
        if future is None or future.done():
            return False
        future.set_result(reply)
        return True

    def cancel(self, task: str) -> None:
        """End every open question of a task as cancelled."""
        for (owner, _), future in list(self._open.items()):
            if owner == task and not future.done():
                future.set_result(Reply("cancelled"))
