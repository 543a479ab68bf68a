"""What a model is to the agent: a request, the events of a turn, and how to hang up.

A tool call is yielded only when the stream proved it complete; what was cut is dropped, because half of
``{"path": "/tmp"}`` may be a whole ``{"path": "/"}``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from peri_tui.core.messages import Usage
from peri_tui.sockets import ShutSocket

FarEnd = Literal["assumed", "confirmed", "continues", "none"]

_CHARS_A_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One turn: the history and the tools in the form of OpenAI's chat completions, and a bound on the answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call; ``arguments`` is what the model wrote, which may still be no JSON."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The server's own count for this turn."""

    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is complete. ``reason``: stop, tool_calls, length, content_filter or the server's own word."""

    reason: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """An attempt failed before anything came; the next starts in ``wait_s`` seconds."""

    attempt: int
    wait_s: float
    why: str


ModelEvent = TextDelta | ThinkingDelta | ToolCall | UsageReport | Finished | Retrying


class Model(Protocol):
    """A model in the service of one task; one stream at a time.

    ``phase`` is idle, resolving, connecting, headers, first_token, streaming or retrying. ``last_life`` is the
    monotonic time in seconds of the last byte from the model (of the request, until there was one).
    """

    name: str

    @property
    def phase(self) -> str:
        """What it is doing."""
        ...

    @property
    def last_life(self) -> float:
        """When it last gave a sign of life."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Yield the events of one turn. Use it under ``contextlib.aclosing``; leaving it early hangs up.

        Raises:
            ModelError: see the subclasses; ``evidence['stopped']`` is true after ``shut``.
        """
        ...

    def shut(self) -> list[ShutSocket]:
        """Hang up for good, synchronously; nothing can be asked afterwards. Never raises."""
        ...

    def open_sockets(self) -> list[str]:
        """Return the connections that are still open, by independent evidence."""
        ...

    def far_end(self) -> FarEnd:
        """Say whether the other side stopped: none (nothing was asked of it), confirmed, assumed, continues."""
        ...

    def usage(self) -> Usage:
        """Return the tokens of all turns; not exact where a stream was cut."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True, slots=True)
class Clocks:
    """Limits of one turn in seconds. Any byte is a sign of life for ``idle``; ``total`` is absolute."""

    connect: float = 10.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 1800.0


class Meter:
    """Counts tokens: the server's word where it comes, else about four characters a token."""

    def __init__(self) -> None:
        self._total = Usage()
        self._chars_in = 0
        self._chars_out = 0
        self._reported: UsageReport | None = None

    def begin(self, chars_in: int) -> None:
        """A request of so many characters is on its way."""
        self.end()
        self._chars_in = chars_in

    def produced(self, chars: int) -> None:
        """So many characters came."""
        self._chars_out += chars

    def report(self, usage: UsageReport) -> None:
        """The server counted; its last word holds."""
        self._reported = usage

    def forget(self) -> None:
        """The server refused the request: nothing was spent."""
        self._chars_in = self._chars_out = 0
        self._reported = None

    def end(self) -> None:
        """The turn is over, in whatever way."""
        self._total = self.usage()
        self.forget()

    def usage(self) -> Usage:
        """Return the sum so far."""
        if self._reported is not None:
            return Usage(
                tokens_in=self._total.tokens_in + self._reported.tokens_in,
                tokens_out=self._total.tokens_out + self._reported.tokens_out,
                exact=self._total.exact,
            )
        return Usage(
            tokens_in=self._total.tokens_in + -(-self._chars_in // _CHARS_A_TOKEN),
            tokens_out=self._total.tokens_out + -(-self._chars_out // _CHARS_A_TOKEN),
            exact=self._total.exact and not self._chars_in,
        )
