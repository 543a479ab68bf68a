"""Background jobs and services as the screen knows them: asked for when shown and when leaving, never guessed.

No Textual here. The session passes through on its way to the desk, so both speak with the same agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from peri_tui.core.messages import JobInfo, TaskEvent
from peri_tui.errors import PeriError
from peri_tui.tui.ports import LinkStatus, Opener, Session

LIST_S: Final = 1.0
END_S: Final = 5.0


class JobDesk:
    """Lists and ends jobs.

    Args:
        opener: starts the agent and returns the client's session; ``open`` takes its place.
    """

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._session: Session | None = None

    async def open(
        self, on_event: Callable[[TaskEvent], None], on_link: Callable[[LinkStatus], Any]
    ) -> Session:
        """Open the session and remember it."""
        self._session = await self._opener(on_event, on_link)
        return self._session

    async def list(self) -> Sequence[JobInfo]:
        """Return the agent's jobs; none where it does not answer in time."""
        if self._session is None:
            return ()
        try:
            async with asyncio.timeout(LIST_S):
                return await self._session.jobs()
        except (PeriError, TimeoutError):
            return ()

    async def services(self) -> Sequence[JobInfo]:
        """Return the services that run."""
        return [job for job in await self.list() if job.service and job.state != "ended"]

    async def act(self, job: JobInfo, action: str) -> str:
        """Promote or stop a job; returns why that could not be done, "" when it was."""
        if self._session is None:
            return "there is no agent"
        try:
            await self._session.act_on_job(job.task, job.job, action)
        except PeriError as error:
            return str(error)
        return ""

    async def end_services(self) -> None:
        """End every service, as good as it can be done within some seconds: the agent ends the rest when it goes."""
        services = await self.services()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(self.act(job, "stop") for job in services))
        except TimeoutError:
            return
