"""What the screens look like. Look at the picture before you accept a new one."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from tests.snapshots.scenes import SCENES
from tests.tui.stage import Stage

pytestmark = pytest.mark.snapshots

SMALL, LARGE = (80, 24), (120, 40)
CASES = [
    *((name, size, "dark") for name in SCENES for size in (SMALL, LARGE)),
    *(
        (name, LARGE, theme)
        for name in ("running", "stopped", "not-verified")
        for theme in ("light", "contrast")
    ),
    *(("stopping", SMALL, theme) for theme in ("light", "contrast")),
    ("running", (60, 20), "dark"),
    ("running", (200, 60), "dark"),
]


@pytest.mark.parametrize(
    ("name", "size", "theme"),
    CASES,
    ids=[f"{name}-{size[0]}x{size[1]}-{theme}" for name, size, theme in CASES],
)
def test_screen(name: str, size: tuple[int, int], theme: str, snap_compare: Any) -> None:
    scene = Stage(theme=f"peri-{theme}")

    async def before(pilot: Pilot[int]) -> None:
        scene.pilot = pilot
        await scene.until(lambda: scene.app.view.link == "up")
        await SCENES[name](scene)

    assert snap_compare(scene.app, terminal_size=size, run_before=before)
