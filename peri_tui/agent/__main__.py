"""``python -P -m peri_tui.agent``: started by the launcher, never from the workspace."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from peri_tui.agent.main import say_failed, serve
from peri_tui.config import find_paths, load_settings
from peri_tui.core import faults
from peri_tui.core.ids import is_ulid
from peri_tui.errors import PeriError, UsageError


def main() -> int:
    """Parse the launcher's arguments and serve."""
    parser = argparse.ArgumentParser(prog="peri-agent")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--parent-fd", type=int, default=-1)
    parser.add_argument("--config", type=Path)
    given = parser.parse_args()
    try:
        if not is_ulid(given.instance):
            raise UsageError(f"{given.instance!r} is no instance id")
        faults.install(filter(None, os.environ.get("PERI_FAULTS", "").split(",")))
        paths = find_paths()
        named = given.config or os.environ.get("PERI_CONFIG")
        settings = load_settings(paths, config_file=Path(named) if named else None)
        paths.make()
        return asyncio.run(
            serve(
                paths,
                settings,
                given.instance,
                given.workspace,
                ready_fd=given.ready_fd,
                parent_fd=given.parent_fd,
            )
        )
    except PeriError as error:
        say_failed(given.ready_fd, str(error), error.exit_code)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
