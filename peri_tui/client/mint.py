"""Where the client's ids come from: the wall clock and the system's randomness."""

from __future__ import annotations

import os
import time

from peri_tui.core.ids import make_ulid


def fresh_id() -> str:
    """Return a new ULID for a task, a request or an agent instance."""
    return make_ulid(time.time_ns() // 1_000_000, os.urandom(10))
