"""The command line: every error is one line with its exit code, and light commands stay light."""

from __future__ import annotations

from pathlib import Path

import pytest

from peri_tui import __version__
from peri_tui.cli import main

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERI_HOME", str(tmp_path / "home"))
    (tmp_path / "ws").mkdir()
    monkeypatch.chdir(tmp_path / "ws")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--nonsense"], 2, "--nonsense"),
        (["doctor"], 2, "'peri doctor' is not built yet"),
        (["serve"], 2, "not built yet"),
        (["-p", "hello", "--provider", "gemini"], 2, "--provider: 'gemini' is not built yet"),
        (["-p", "hello", "--output-format", "xml"], 2, "xml"),
        (["-p", "hello", "--max-turns", "many"], 2, "many"),
        (["-p", "hello", "--base-url", "nowhere"], 2, "--base-url"),
        (["-p", " "], 42, "prompt is empty"),
        (["-p", "hello", "-C", "missing"], 42, "missing: no such file or directory"),
        (["-p", "hello", "-C", "file"], 42, "file: not a"),
        (["missing"], 42, "missing: no such file or directory"),
        (["-p", "hello", "--config", "missing.toml"], 52, "missing.toml: cannot be read"),
        (["stop", "X", "--all"], 2, "give a task or --all, not both"),
        (["undo"], 42, "no task to undo here"),
        (["."], 2, "no terminal here; use peri -p"),
        (["demo"], 2, "no terminal here"),
    ],
)
def test_an_error_is_one_line_that_names_what_and_where(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ws" / "file").touch()
    assert main(arguments) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("peri: ")
    assert told.err.count("\n") == 1
    assert words in told.err


def test_a_broken_settings_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "home" / "config"
    config.mkdir(parents=True)
    (config / "config.toml").write_text("modle = 1")
    assert main(["-p", "hello"]) == 52
    assert "config.toml: modle: unknown key" in capsys.readouterr().err


def test_an_unknown_fault_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERI_FAULTS", "no.such")
    assert main(["tasks"]) == 2
    assert "unknown fault 'no.such'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["demo"], ["stop"], ["tasks"], ["trace"], ["undo"], ["recover"]])
def test_every_command_has_a_help_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    assert "example" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"peri {__version__}\n")


def test_a_word_that_is_nearly_a_command_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tsks"]) == 42
    assert "did you mean 'peri tasks'?" in capsys.readouterr().err


def test_a_workspace_that_holds_our_own_folders_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-p", "find x", "-C", str(tmp_path)]) == 52
    assert "start peri in a project's folder" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
