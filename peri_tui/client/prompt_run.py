"""Puts ``peri -p`` together: agent, session, one prompt, exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from peri_tui.client.headless import HeadlessLink, OutputFormat, run_headless
from peri_tui.client.launcher import AgentHandle, find_or_start
from peri_tui.client.mint import fresh_id
from peri_tui.client.session import AgentSession, LinkNews
from peri_tui.config import Paths, Settings, api_key
from peri_tui.core.messages import TaskEvent
from peri_tui.log import Log


async def run_prompt(
    paths: Paths,
    workspace: Path,
    settings: Settings,
    prompt: str,
    *,
    session: str = "",
    output_format: OutputFormat = "text",
) -> int:
    """Run one task without a screen and return the exit code of the process.

    Args:
        paths, settings: this user's.
        workspace: an absolute folder.
        prompt: what to do.
        session: "" for a new conversation, "last", or an id.
        output_format: text, json or stream-json.

    Raises:
        PeriError: no agent, or it refused the task.
    """
    log = Log(paths.log / "headless.jsonl", paths.trace, f"headless-{fresh_id()}")
    log.hide(api_key())
    handles: list[AgentHandle] = []
    sessions: list[AgentSession] = []

    async def open_session(
        on_event: Callable[[TaskEvent], None], on_link: Callable[[LinkNews], None]
    ) -> HeadlessLink:
        # Never adopts: an orphan belongs to the screen that left it, and this process would take its place.
        handles.append(await find_or_start(paths, workspace, settings=settings, adopt=False))
        sessions.append(
            AgentSession(
                handles[0], paths=paths, log=log, workspace=workspace, settings=settings,
                on_event=on_event, on_link=on_link, session=session,
            )
        )  # fmt: skip
        return sessions[0]

    try:
        return await run_headless(
            open_session,
            prompt,
            output_format=output_format,
            approve=settings.approve,
            stdout=sys.stdout,
            stderr=sys.stderr,
            log=log,
        )
    finally:
        for handle in [one.agent for one in sessions] or handles:
            if handle is not None:
                handle.close()
