"""The process of a search by regular expression: prints hits, and can be killed in the middle of a match.

Started by ``search`` as ``python -P -m peri_tui.agent.tools.search_worker WORKSPACE GLOB PATTERN``.
"""

from __future__ import annotations

import re
import sys

from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.tools.search import MAX_HITS, find_lines
from peri_tui.agent.tools.walk import Glob


def main(workspace: str, glob: str, pattern: str) -> int:
    """Print at most ``MAX_HITS`` + 1 hits; the one more says that there are more."""
    expression = re.compile(pattern)
    with Root(workspace) as root:
        hits = find_lines(root, Glob(glob), lambda line: expression.search(line) is not None, lambda: False)
        for number, line in enumerate(hits):
            sys.stdout.buffer.write(line.encode("utf-8", "replace") + b"\n")
            if number == MAX_HITS:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
