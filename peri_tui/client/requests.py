"""Requests that wait for their reply, with a deadline; a reconnect in between sends them again by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from peri_tui.core.link import ClientLink
from peri_tui.core.messages import Answer, Failure, Job, Message, Reply, Submit, Trust
from peri_tui.errors import (
    AgentUnreachable,
    Conflict,
    InputError,
    NotAuthorized,
    PeriError,
    ProcessError,
    ProtocolError,
    StaleEpoch,
    StoreUnavailable,
    UnknownTask,
)

REQUEST_S: Final = 15.0
_ERRORS: Final[dict[str, type[PeriError]]] = {
    "E_CONFLICT": Conflict,
    "E_AUTH": NotAuthorized,
    "E_STORE": StoreUnavailable,
    "E_INPUT": InputError,
    "E_UNKNOWN_TASK": UnknownTask,
    "E_STALE_EPOCH": StaleEpoch,
    "E_JOB": ProcessError,
}


class RequestBook:
    """Matches replies to requests by id.

    Args:
        link: remembers what was sent, for a reconnect.
        send: sends over control; False if the connection is not open.
    """

    def __init__(self, link: ClientLink, send: Callable[[Message], Awaitable[bool]]) -> None:
        self._link = link
        self._send = send
        self._waiters: dict[str, asyncio.Future[Reply]] = {}
        self._failure: PeriError | None = None

    async def ask(self, request: Submit | Answer | Trust | Job) -> Reply:
        """Send a request and return its reply.

        Raises:
            AgentUnreachable: none came within 15 s.
            PeriError: the link failed for good.
        """
        if self._failure is not None:
            raise self._failure
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiters[request.id] = waiter
        self._link.sent(request)
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._send(request)
                return await waiter
        except TimeoutError:
            raise AgentUnreachable(f"the agent did not answer within {REQUEST_S:g} s") from None
        finally:
            self._waiters.pop(request.id, None)
            self._link.answered(request.id)

    def take(self, reply: Reply) -> bool:
        """Hand a reply to who waits for it; False if nobody does."""
        waiter = self._waiters.get(getattr(reply, "re", ""))
        if waiter is None or waiter.done():
            return False
        waiter.set_result(reply)
        return True

    def fail(self, error: PeriError) -> None:
        """Let everybody who waits, and who asks from now on, see this error."""
        self._failure = error
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)


def as_error(reply: Reply) -> PeriError:
    """Return the exception for a reply that is not the one hoped for."""
    if isinstance(reply, Failure):
        return _ERRORS.get(reply.code, ProtocolError)(reply.msg, code=reply.code)
    return ProtocolError(f"the agent answered with {type(reply).__name__}, which does not fit")
