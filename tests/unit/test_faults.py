from __future__ import annotations

from collections.abc import Iterator

import pytest

from peri_tui.core import faults

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    faults.install([])


def test_nothing_is_on_by_default() -> None:
    assert not any(faults.active(name) for name in faults.KNOWN)


def test_install_replaces() -> None:
    faults.install(["ui.block_loop", "model.keep_socket"])
    assert faults.active("ui.block_loop")
    faults.install(["model.keep_socket"])
    assert not faults.active("ui.block_loop")
    assert faults.active("model.keep_socket")


def test_an_unknown_name_is_refused_and_changes_nothing() -> None:
    faults.install(["model.keep_socket"])
    with pytest.raises(ValueError, match=r"unknown fault 'model\.eat_socket'; known: .*ui\.block_loop"):
        faults.install(["ui.block_loop", "model.eat_socket"])
    assert faults.active("model.keep_socket")
    assert not faults.active("ui.block_loop")


def test_every_layer_has_a_fault() -> None:
    assert {name.partition(".")[0] for name in faults.KNOWN} >= {
        "ui", "client", "scheduler", "model", "rollback", "processes",
    }  # fmt: skip
