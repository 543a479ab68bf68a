"""Trust belongs to one folder, and nothing is read before it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from peri_tui.agent.instructions import MAX_FILE, TrustStore, read_instructions, what_there_is
from peri_tui.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture
def trust(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "trust.json")


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    (repo / "src" / "deep").mkdir(parents=True)
    (repo / ".git").mkdir()
    (tmp_path / "AGENTS.md").write_text("outside the repository")
    (repo / "AGENTS.md").write_text("outer")
    (repo / "CLAUDE.md").write_text("not this one")
    (repo / "src" / "CLAUDE.md").write_text("middle")
    return repo / "src" / "deep"


async def test_files_are_found_from_the_repository_down(inner: Path, trust: TrustStore) -> None:
    repo = inner.parent.parent
    assert what_there_is(inner) == [str(repo / "AGENTS.md"), str(repo / "src" / "CLAUDE.md")]
    trust.set(inner, True)
    assert [note.text for note in await read_instructions(inner, trust)] == ["outer", "middle"]


async def test_nothing_is_read_without_a_yes(inner: Path, trust: TrustStore) -> None:
    assert await read_instructions(inner, trust) == []
    assert not trust.known(inner)
    trust.set(inner, False)
    assert trust.known(inner)
    assert await read_instructions(inner, trust) == []


def test_trust_of_a_parent_or_of_a_folder_put_in_its_place_does_not_count(
    inner: Path, trust: TrustStore
) -> None:
    trust.set(inner.parent, True)
    assert not trust.trusted(inner)
    trust.set(inner, True)
    inner.rename(inner.with_name("old"))
    inner.mkdir()
    assert not trust.known(inner)


async def test_links_and_special_files_are_not_followed(tmp_path: Path, trust: TrustStore) -> None:
    folder = tmp_path / "ws"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "AGENTS.md").symlink_to(tmp_path / "secret")
    trust.set(folder, True)
    assert what_there_is(folder) == []
    assert await read_instructions(folder, trust) == []


async def test_long_files_are_cut_and_say_so(tmp_path: Path, trust: TrustStore) -> None:
    (tmp_path / "AGENTS.md").write_bytes(b"\xff" + b"x" * MAX_FILE * 2)
    trust.set(tmp_path, True)
    (note,) = await read_instructions(tmp_path, trust)
    assert note.text.endswith(f"[cut after {MAX_FILE} bytes]")


def test_the_project_settings_are_only_named(tmp_path: Path) -> None:
    (tmp_path / ".peri").mkdir()
    (tmp_path / ".peri" / "config.toml").write_text("x")
    assert what_there_is(tmp_path) == [str(tmp_path / ".peri" / "config.toml")]


def test_the_file_is_private_and_a_bad_one_trusts_nothing(tmp_path: Path, trust: TrustStore) -> None:
    file = tmp_path / "trust.json"
    trust.set(tmp_path, True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o622)
    assert not trust.trusted(tmp_path)
    file.chmod(0o600)
    assert trust.trusted(tmp_path)
    for damage in (b"", b"[]", b"{", b"\xff"):
        file.write_bytes(damage)
        assert not trust.known(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        trust.set(tmp_path / "gone", True)
