"""The offline provider: a rule-based model behind the same contract as any other, at a human pace.

What it says and calls is decided in ``rules`` from the conversation alone; here it is streamed, counted and stopped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Final

from peri_tui.agent.models.call import (
    FarEnd,
    Finished,
    Meter,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ToolCall,
    UsageReport,
)
from peri_tui.agent.models.rules import reply_to
from peri_tui.core.messages import Usage
from peri_tui.errors import ModelError
from peri_tui.sockets import ShutSocket

_TOKEN: Final = 4
_PIECE: Final = 256
_THINKING_TOKENS: Final = 20
_LONGEST_WRITING_S: Final = 2.0


class OfflineModel:
    """Answers by rules. It has no connection, so a stop leaves nothing open and there is no far end.

    Args:
        rate: tokens of four characters a second; 0 for no delay.
        sleep: waits; a test replaces it.
        clock: monotonic seconds.
    """

    name = "offline"

    def __init__(
        self,
        *,
        rate: float = 60.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._sleep = sleep
        self._clock = clock
        self._shut = False
        self._phase = "idle"
        self._last_life = clock()
        self._meter = Meter()
        self._calls = 0

    @property
    def phase(self) -> str:
        """idle, first_token or streaming."""
        return self._phase

    @property
    def last_life(self) -> float:
        """When it last produced something."""
        return self._last_life

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Yield the events of one turn.

        Raises:
            ModelError: ``shut`` was called; ``evidence['stopped']`` is true.
        """
        self._refuse_if_shut()
        self._meter.begin(_size(request))
        self._phase = "first_token"
        try:
            await self._pause(_THINKING_TOKENS)
            reply = reply_to(request.messages, hurried=not self._rate)
            for piece in self._pieces(reply.text):
                self._phase = "streaming"
                self._meter.produced(len(piece))
                yield TextDelta(piece)
                await self._pause(1)
            for index, (name, args) in enumerate(reply.calls):
                arguments = json.dumps(args, ensure_ascii=False)
                await self._pause(min(len(arguments) / _TOKEN, _LONGEST_WRITING_S * self._rate))
                self._meter.produced(len(arguments))
                self._calls += 1
                yield ToolCall(index, f"offline_{self._calls}", name, arguments)
                self._refuse_if_shut()
            yield self._report(request, reply.text, reply.calls)
            yield Finished("tool_calls" if reply.calls else "stop")
        finally:
            self._phase = "idle"
            self._meter.end()

    def shut(self) -> list[ShutSocket]:
        """Say nothing more, for good."""
        self._shut = True
        return []

    def open_sockets(self) -> list[str]:
        """Return nothing: there is no connection."""
        return []

    def far_end(self) -> FarEnd:
        """Return none: nobody else works for it."""
        return "none"

    def usage(self) -> Usage:
        """Return the tokens of all turns, by its own measure of four characters."""
        return self._meter.usage()

    async def aclose(self) -> None:
        """Nothing to give back."""

    def _pieces(self, text: str) -> Iterator[str]:
        size = _TOKEN if self._rate else _PIECE
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def _pause(self, tokens: float) -> None:
        self._last_life = self._clock()
        await self._sleep(tokens / self._rate if self._rate else 0)
        self._refuse_if_shut()

    def _refuse_if_shut(self) -> None:
        if self._shut:
            raise ModelError("stopped: the offline model was told to stop", stopped=True)

    def _report(
        self, request: ModelRequest, text: str, calls: list[tuple[str, dict[str, object]]]
    ) -> UsageReport:
        out = len(text) + sum(len(json.dumps(args)) for _, args in calls)
        report = UsageReport(_size(request) // _TOKEN, -(-out // _TOKEN))
        self._meter.report(report)
        return report


def _size(request: ModelRequest) -> int:
    return sum(len(str(message.get("content") or "")) for message in request.messages)
