"""The second way to cancel: a bodyless POST on a connection of its own, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from peri_tui.core.messages import Cancel, CancelAccepted, CancelNoop, Failure, TaskSummary
from peri_tui.errors import AgentUnreachable

Post = Callable[..., Mapping[str, Any]]


def cancel_over_http(
    path: Path, request: Cancel, *, timeout: float, post: Post | None = None
) -> CancelAccepted | CancelNoop | Failure:
    """Send a cancel over HTTP and return the agent's answer, with ``re`` set to the request's id. Blocks.

    Raises:
        AgentUnreachable: no answer within ``timeout`` seconds, or none that is a message.
    """
    if post is None:
        # Imported when a stop needs it: httpx would cost every start a tenth of a second.
        from peri_tui.net import post_cancel

        post = post_cancel
    answer = post(
        path, request.task, reason=request.reason, mode=request.mode, epoch=request.epoch, t_ui=request.t_ui,
        attempt=request.attempt, timeout=timeout,
    )  # fmt: skip
    try:
        return msgspec.convert({**answer, "re": request.id}, CancelAccepted | CancelNoop | Failure)
    except msgspec.ValidationError as error:
        raise AgentUnreachable(f"agent at {path}: its answer is no cancel answer: {error}") from None


def list_over_http(path: Path, *, timeout: float) -> list[TaskSummary]:
    """Return the tasks that an agent knows, newest first. Blocks.

    Raises:
        AgentUnreachable: no answer within ``timeout`` seconds, or not a list of tasks.
    """
    from peri_tui.net import get_task

    # The collection is the resource with the empty name below /v1/tasks.
    answer = get_task(path, "", timeout=timeout)
    try:
        return msgspec.convert(answer.get("records", []), list[TaskSummary])
    except msgspec.ValidationError as error:
        raise AgentUnreachable(f"agent at {path}: its list of tasks is none: {error}") from None
