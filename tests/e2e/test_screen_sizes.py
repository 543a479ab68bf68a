"""The screen in a terminal of 80×24 and of 120×40: the stop card is whole, nothing overlaps, resizing breaks nothing."""

from __future__ import annotations

import re

import pytest

from tests.e2e.outside import marked, wait_until
from tests.e2e.scene import Scene, stubborn_command, tool
from tests.e2e.terminal import Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

SIZES = [(80, 24), (120, 40)]
LAYERS = ("UI", "Client", "Scheduler", "Model", "Rollback")
WRITES = [tool("read_file", path="README.md"), tool("write_file", path="README.md", content="changed\n")]
STALL = [{"text": "half an answer "}, {"stall": -1}]


def card(terminal: Terminal) -> list[str]:
    """Return the inner lines of the stop card once it is drawn; its four sides must be whole."""
    terminal.wait_for(lambda text: "╭─ Stopped" in text and "╰" in text)
    rows = terminal.text.split("\n")
    top = next(number for number, row in enumerate(rows) if "╭─ Stopped" in row)
    bottom = next(number for number, row in enumerate(rows) if number > top and "╰" in row)
    left, right = rows[top].index("╭"), rows[top].index("╮")
    assert re.fullmatch(r"╰─+╯", rows[bottom][left : right + 1]), rows[bottom]
    inner = rows[top + 1 : bottom]
    assert {(row[left], row[right]) for row in inner} == {("│", "│")}
    return [row[left + 1 : right].strip() for row in inner]


def strip_of(text: str) -> str:
    """Return the line of the five lamps."""
    return next(row for row in reversed(text.split("\n")) if " Scheduler" in row)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_stop_card_is_whole(size: tuple[int, int]) -> None:
    with Scene([WRITES, STALL, [{"text": "ok"}]]) as scene:
        terminal = scene.open(size=size)
        terminal.submit("please go")
        terminal.wait_for("half an answer")
        assert "Stop  Esc" in terminal.text
        scene.stop()
        lines = card(terminal)
        lamps = [re.match(r"(\S+)\s+✓\s+\d+(\.\d)? m?s", line) for line in lines[:5]]
        assert [lamp and lamp[1] for lamp in lamps] == list(LAYERS), lines
        assert lines[5] == "1 file restored. The workspace is as it was."
        assert "d details" in lines[6]
        # Below the card: bar, strip and prompt, each on its own line, and the strip names all five layers.
        text = terminal.wait_for(lambda text: strip_of(text).count("✓") == 5)
        rows, strip = text.split("\n"), strip_of(text)
        assert len(rows) == size[1]
        assert max(len(row) for row in rows) <= size[0]
        assert all(layer in strip for layer in LAYERS)
        assert rows.index(strip) == next(n for n, row in enumerate(rows) if row.startswith(" ■ Stopped")) + 1
        assert "Describe a task" in rows[rows.index(strip) + 1]
        scene.finish()


def test_a_resize_while_a_command_runs_and_after_the_stop() -> None:
    with (
        Scene() as scene,
        scene.script([[tool("shell", command=stubborn_command(scene.marker))], [{"text": "ok"}]]),
    ):
        terminal = scene.open(size=(120, 40))
        terminal.submit("please go")
        wait_until(lambda: marked(scene.marker), what="the command runs")
        scene.see_tags()
        for size in [(80, 24), (60, 20), (40, 10), (120, 40), (80, 24)]:
            terminal.resize(*size)
        terminal.wait_for(lambda text: fits(text, 80, 24) and "● Running" in text and "deaf" in text)
        scene.stop()
        card(terminal)
        terminal.resize(120, 40)
        terminal.wait_for(lambda text: fits(text, 120, 40))
        assert len(card(terminal)) >= 7
        scene.finish()


def fits(text: str, width: int, height: int) -> bool:
    """Tell whether the frame on the screen was drawn for this size: the ruler is as wide, the hints are at the bottom."""
    rows = text.split("\n")
    return len(rows) == height and "─" * width in rows and "^P palette" in rows[-1]
