"""The list of changed files costs what is seen of it, however many there are."""

from __future__ import annotations

import pytest

from peri_tui.tui.view_model import ChangedFile
from peri_tui.tui.widgets import side_panel

pytestmark = pytest.mark.unit


def files(count: int) -> tuple[ChangedFile, ...]:
    return tuple(ChangedFile(path=f"{n}.txt", kind="added", by="write_file") for n in range(count))


@pytest.mark.parametrize(
    ("count", "rows", "last"), [(1, 2, "A 0.txt"), (4, 5, "A 3.txt"), (5, 5, "  2 more")]
)
def test_the_list_fits_its_lines(count: int, rows: int, last: str) -> None:
    lines = side_panel.files_content(files(count), 5).plain.split("\n")
    assert (len(lines), lines[-1]) == (rows, last)


def test_only_what_is_seen_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(side_panel, "one_line", lambda text, width: drawn.append(text) or text)
    assert side_panel.files_content(files(2000), 20).plain.endswith("  1982 more")
    assert len(drawn) == 18
