"""The draft survives: whole or the one before, never half, never destroyed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from peri_tui.client.drafts import Draft, DraftKeeper
from peri_tui.config import Paths, find_paths
from peri_tui.errors import InputError

pytestmark = pytest.mark.unit

SESSION = "01J0000000000000000000000A"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return find_paths({"PERI_HOME": str(tmp_path)})


def test_what_was_saved_is_loaded(paths: Paths) -> None:
    keeper = DraftKeeper(paths, SESSION)
    keeper.save(Draft(text="half a thought ü\n", queued=["one", "two"]))
    again = DraftKeeper(paths, SESSION).load()
    assert (again.text, again.queued) == ("half a thought ü\n", ["one", "two"])
    assert stat.S_IMODE(keeper.file.stat().st_mode) == 0o600
    assert os.listdir(paths.sessions) == [keeper.file.name]


def test_without_a_file_the_draft_is_empty(paths: Paths) -> None:
    assert DraftKeeper(paths, SESSION).load() == Draft()


@pytest.mark.parametrize("damage", [b"", b'{"text":"ha', b"\xff\xfe", b"[]", b'{"text":1}'])
def test_a_torn_file_is_empty_and_kept_aside(paths: Paths, damage: bytes) -> None:
    keeper = DraftKeeper(paths, SESSION)
    keeper.save(Draft(text="x"))
    keeper.file.write_bytes(damage)
    assert keeper.load() == Draft()
    assert keeper.file.with_suffix(".damaged").read_bytes() == damage


def test_a_write_that_fails_says_where_and_keeps_the_old_draft(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = DraftKeeper(paths, SESSION)
    keeper.save(Draft(text="old"))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"draft\.json: the draft cannot be saved: No space left"):
        keeper.save(Draft(text="new"))
    assert keeper.load().text == "old"
    assert os.listdir(paths.sessions) == [keeper.file.name]


def test_lone_surrogates_do_not_lose_the_draft(paths: Paths) -> None:
    keeper = DraftKeeper(paths, SESSION)
    keeper.save(Draft(text="a\ud800b", queued=["\udfff"]))
    assert keeper.load() == Draft(text="a�b", queued=["�"])


def test_a_session_name_that_is_no_id_names_no_file(paths: Paths) -> None:
    with pytest.raises(InputError, match="no session id"):
        DraftKeeper(paths, "../../etc/passwd")
