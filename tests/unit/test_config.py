"""Settings and paths: the order of sources, and errors that name file, key and what was expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from peri_tui.config import Paths, api_key, find_paths, load_settings, make_private
from peri_tui.errors import ConfigError, UsageError

pytestmark = pytest.mark.unit


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths({"PERI_HOME": str(tmp_path / "home")})
    found.make()
    return found


def write(paths: Paths, text: str) -> None:
    (paths.config / "config.toml").write_text(text)


def test_option_goes_before_environment_before_file_before_default(paths: Paths) -> None:
    write(paths, 'model = "from-file"\nbase_url = "http://file/v1"\nmax_turns = 3\n')
    environ = {"PERI_MODEL": "from-environment"}
    settings = load_settings(paths, {"max_turns": 5, "model": None}, environ=environ)
    assert (settings.model, settings.base_url, settings.max_turns) == (
        "from-environment",
        "http://file/v1",
        5,
    )
    assert load_settings(paths, {"model": "option"}, environ=environ).model == "option"


def test_the_provider_follows_what_is_configured(paths: Paths) -> None:
    assert load_settings(paths, environ={}).provider == "offline"
    assert load_settings(paths, environ={"OPENAI_API_KEY": "k"}).provider == "openai"
    assert load_settings(paths, environ={"PERI_BASE_URL": "http://localhost:1/v1"}).provider == "openai"
    assert (
        load_settings(paths, {"provider": "offline"}, environ={"OPENAI_API_KEY": "k"}).provider == "offline"
    )
    assert api_key({"PERI_API_KEY": "mine", "OPENAI_API_KEY": "other"}) == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'x'", ("modle", "unknown key", "model")),
        ("max_turns = 'many'", ("max_turns", "a whole number", "'many'")),
        ("max_turns = true", ("max_turns", "a whole number", "True")),
        ("max_turns = -1", ("max_turns", "zero or more", "-1")),
        ("max_seconds = 'x'", ("max_seconds", "a number")),
        ("concurrency = 0", ("concurrency", "one or more")),
        ("model = 3", ("model", "a text", "3")),
        ("approve = 'sometimes'", ("approve", "ask, all", "sometimes")),
        ("approve = 'plan'", ("approve", "not built yet", "ask, all")),
        ("provider = 'anthropic'", ("provider", "not built yet", "openai, offline")),
        ("on_stop = 'forget'", ("on_stop", "restore, keep")),
        ("base_url = 'localhost:8080'", ("base_url", "http", "localhost:8080")),
        ("base_url = 'http://[::1'", ("base_url", "http")),
        ("max_memory_mb = -1", ("max_memory_mb", "zero or more")),
        ("max_processes = 2.5", ("max_processes", "a whole number")),
        ("interrupt_s = 600", ("interrupt_s", "at most 60", "600")),
        ("kill_confirm_s = 0", ("kill_confirm_s", "at least 0.5")),
        ("notes = ['x']", ("notes", "unknown key")),
        ("model = ", ("not valid TOML",)),
        ("[table]\nx = 1", ("table", "unknown key")),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_what_was_expected(
    paths: Paths, text: str, words: tuple[str, ...]
) -> None:
    write(paths, text)
    with pytest.raises(ConfigError) as raised:
        load_settings(paths, environ={})
    message = str(raised.value)
    assert "config.toml" in message
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_wrong_option_is_a_usage_error(paths: Paths) -> None:
    with pytest.raises(UsageError, match="--provider: 'gemini' is not built yet"):
        load_settings(paths, {"provider": "gemini"}, environ={})


def test_a_named_file_must_be_there_and_readable(paths: Paths, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        load_settings(paths, config_file=tmp_path / "missing.toml", environ={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(paths, config_file=binary, environ={})


def test_folders_are_private_and_made_so(paths: Paths) -> None:
    for folder in (
        paths.config,
        paths.data,
        paths.state,
        paths.runtime,
        paths.trace,
        paths.log,
        paths.sessions,
    ):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    paths.log.chmod(0o755)
    make_private(paths.log)
    assert stat.S_IMODE(paths.log.stat().st_mode) == 0o700


def test_a_link_or_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=name):
            make_private(tmp_path / name)


def test_a_runtime_folder_too_long_for_a_socket_goes_to_a_private_one(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    runtime = find_paths({"PERI_HOME": str(deep)}).runtime
    assert len(os.fsencode(runtime)) + 32 <= 107
    assert f"peri-{os.getuid()}" in runtime.name
    # Two homes never share one.
    assert runtime != find_paths({"PERI_HOME": str(tmp_path / ("e" * 100))}).runtime


def test_xdg_folders_are_used_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A pytest folder may be too long for a socket.
    environ: dict[str, Any] = {"XDG_RUNTIME_DIR": "/tmp"}
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    found = find_paths(environ)
    assert found.runtime == Path("/tmp/peri")
    assert found.config == tmp_path / "config" / "peri"
    assert found.db == tmp_path / "data" / "peri" / "state.db"
    assert found.trace == tmp_path / "state" / "peri" / "trace"


def test_every_folder_that_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        find_paths({"PERI_HOME": str(tmp_path / "new" / "home")}).make()
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
    assert [path for path in [tmp_path / "new", *made] if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_is_a_number(tmp_path: Path, value: str) -> None:
    paths = find_paths({"PERI_HOME": str(tmp_path)})
    with pytest.raises(UsageError, match="--max-seconds: expected zero or more"):
        load_settings(paths, {"max_seconds": float(value)}, environ={})
