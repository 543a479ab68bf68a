"""The environment of a command: an allow-list, so that no key of the agent is ever handed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

_ALLOWED: Final = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL"})
_SECRET_ENDS: Final = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def child_env(
    environ: Mapping[str, str], task: str, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a command of a task.

    Args:
        environ: the agent's environment; only the allowed names are taken.
        task: the task's id, put into ``PERI_TASK`` so that a leftover can be told from other processes.
        extra: more variables (a task's own ``TMPDIR``); they win over ``environ``.

    Raises:
        ValueError: a name in ``extra`` looks like a secret.
    """
    kept = {name: value for name, value in environ.items() if name in _ALLOWED or name.startswith("LC_")}
    for name in extra or {}:
        if name.upper().endswith(_SECRET_ENDS):
            raise ValueError(f"{name}: a secret is never handed to a command")
    base = {"PATH": os.defpath, "TERM": "dumb"}
    return base | kept | dict(extra or {}) | {"PERI": "1", "PERI_TASK": task}
