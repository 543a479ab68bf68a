"""Puts the screen together with the client: agent, stop lane, driver, drafts; and takes it apart again."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from peri_tui import __version__
from peri_tui.client.draft_slot import claim_draft
from peri_tui.client.launcher import AgentHandle, find_or_start
from peri_tui.client.mint import fresh_id
from peri_tui.client.session import AgentSession
from peri_tui.client.stop_lane import PressReport, StopLane
from peri_tui.config import Paths, Settings, api_key, read_small
from peri_tui.core.messages import CancelAccepted, CancelNoop, TaskEvent
from peri_tui.core.states import EXIT_NOT_CLEAN, EXIT_TERMINATED
from peri_tui.core.trace import TraceRecord
from peri_tui.log import Log, read_trace
from peri_tui.tui.app import PeriApp
from peri_tui.tui.driver import make_driver_class
from peri_tui.tui.first_frame import FirstFrame
from peri_tui.tui.widgets.header import Place

# The input thread sends the cancel; with the default of 5 ms it may wait that long for the interpreter.
SWITCH_INTERVAL_S: Final = 0.0005
_BRANCH_LIMIT: Final = 4096


def run_screen(
    paths: Paths, workspace: Path, settings: Settings, *, session: str = "", draft: str = ""
) -> int:
    """Run the TUI on a workspace until the user leaves.

    Args:
        paths, settings: this user's.
        workspace: an absolute folder.
        session: "" for a new conversation, "last", or an id.
        draft: a prompt to begin with, where the saved draft is empty.

    Returns:
        0; 143 when SIGTERM ended it; 74 when the last stop could not be verified.

    Raises:
        ConfigError: a theme is wrong.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return asyncio.run(_Screen(paths, workspace, settings, session, draft).run())


class _Screen:
    def __init__(self, paths: Paths, workspace: Path, settings: Settings, session: str, draft: str) -> None:
        self._paths = paths
        self._workspace = workspace
        self._settings = settings
        self._session = session
        self._log = Log(paths.log / "tui.jsonl", paths.trace, f"tui-{fresh_id()}")
        self._log.hide(api_key())
        self._handle: AgentHandle | None = None
        self._opened: AgentSession | None = None
        self._first = FirstFrame()
        self._told = 0
        self._lane = StopLane(
            paths.runtime / "no-agent-yet.sock", log=self._log, on_press=self._pressed, on_ack=self._acked
        )
        self._app = PeriApp(
            self._open,
            place=_place(workspace, settings),
            drafts=claim_draft(paths, workspace, fallback=draft),
            trace=self._log.trace,
            read_trace=self._read_trace,
            lane=self._lane,
            driver_class=make_driver_class(self._lane),
            theme=settings.theme,
            theme_folders=[paths.config / "themes"],
        )

    async def run(self) -> int:
        """Show the screen; whatever happens, the terminal, the lane and the agent are let go of."""
        self._lane.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_leave, number)
        try:
            await self._app.run_async()
        finally:
            self._lane.close()
            if self._opened is not None:
                await self._opened.close()
            handle = self._opened.agent if self._opened is not None else self._handle
            if handle is not None:
                handle.close()
        if self._app.return_code:
            return self._app.return_code
        if self._not_clean():
            return EXIT_NOT_CLEAN
        return EXIT_TERMINATED if self._told == signal.SIGTERM else 0

    def _told_to_leave(self, number: int) -> None:
        self._told = self._told or number
        self._app.quit_unasked()

    def _not_clean(self) -> bool:
        stopped = [task for task in self._app.desk.state.tasks.values() if task.was_stopped]
        return bool(stopped) and stopped[-1].is_unclean

    async def _open(
        self, on_event: Callable[[TaskEvent], None], on_link: Callable[[Any], None]
    ) -> AgentSession:
        self._first.follow(self._app)
        self._handle = await find_or_start(self._paths, self._workspace, settings=self._settings)
        self._lane.retarget(self._handle.socket)
        if self._handle.adopted:
            self._app.say("took over the agent that another screen left; its task keeps the approvals it had")
        adopted = "last" if self._handle.adopted and not self._session else self._session
        self._opened = AgentSession(
            self._handle,
            paths=self._paths,
            log=self._log,
            workspace=self._workspace,
            settings=self._settings,
            on_event=on_event,
            on_link=on_link,
            session=adopted,
            lane=self._lane,
        )
        return self._opened

    def _read_trace(self, task: str) -> Sequence[TraceRecord]:
        return read_trace(self._paths.trace, task)

    def _pressed(self, report: PressReport) -> None:
        # The cancel is out; the eye comes next, and the loop last.
        self._first.paint(report)
        self._app.lane_pressed(report)

    def _acked(self, request: str, answer: CancelAccepted | CancelNoop) -> None:
        self._app.lane_acked(request, answer)


def _place(workspace: Path, settings: Settings) -> Place:
    home = str(Path.home())
    shown = str(workspace)
    if shown == home or shown.startswith(home + "/"):
        shown = "~" + shown[len(home) :]
    model = settings.model or ("offline model" if settings.provider == "offline" else settings.provider)
    return Place(
        workspace=shown, branch=_branch(workspace), model=model, approve=settings.approve, version=__version__
    )


def _branch(workspace: Path) -> str:
    """Return the branch as the file says it; no git is run in a folder that nobody trusts yet."""
    try:
        head = read_small(workspace / ".git" / "HEAD", _BRANCH_LIMIT).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return head.removeprefix("ref: refs/heads/") if head.startswith("ref: ") else head[:8]
