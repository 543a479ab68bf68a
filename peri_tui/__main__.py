"""``python -m peri_tui`` is ``peri``."""

from __future__ import annotations

import sys

from peri_tui.cli import main

sys.exit(main())
