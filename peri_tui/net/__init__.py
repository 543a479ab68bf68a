"""The one door to httpx: the transport for models, and the agent's HTTP routes."""

from __future__ import annotations

from peri_tui.net.routes import get_task, get_trace, post_cancel
from peri_tui.net.transport import ModelTransport, Reply, shared_context, warm

__all__ = [
    "ModelTransport",
    "Reply",
    "get_task",
    "get_trace",
    "post_cancel",
    "shared_context",
    "warm",
]
