"""The architecture page is true where a machine can tell: the tests and modules that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peri_tui.core import messages

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "peri_tui" / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_test_that_guards_an_invariant_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    missing = {name for name in named if f"def {name}(" not in source}
    assert len(named) > 30
    assert not missing


def test_every_module_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:agent|client|core|tui)/\w+)`", PAGE))
    missing = {name for name in named if not list((ROOT / "peri_tui").glob(f"{name}*"))}
    assert named
    assert not missing


def test_the_message_catalogue_is_complete() -> None:
    tags = {
        kind.__struct_config__.tag
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, messages.Message) and kind.__struct_config__.tag
    }
    missing = {str(tag) for tag in tags if tag not in ("Message", "Event") and f"`{tag}`" not in PAGE}
    assert not missing
