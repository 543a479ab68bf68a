"""Themes: from files, checked, with defaults; NO_COLOR; the registry of actions; the crash that tells no secret."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from peri_tui.errors import ConfigError
from peri_tui.tui import theming
from peri_tui.tui.actions import ACTIONS
from peri_tui.tui.app import PeriApp
from tests.tui.stage import Stage, stage

pytestmark = pytest.mark.tui

GOOD = 'name = "mine"\nprimary = "#112233"\n'


def test_the_shipped_themes_load_and_have_every_variable() -> None:
    themes = theming.load_themes([theming.shipped_folder()])
    assert {theme.name for theme in themes} == {"peri-dark", "peri-light", "peri-contrast"}
    for theme in themes:
        assert set(theme.variables) == set(theming.VARIABLE_DEFAULTS)


def test_text_of_the_shipped_themes_is_readable() -> None:
    from textual.color import Color

    for theme in theming.load_themes([theming.shipped_folder()]):
        ground = Color.parse(theme.background)
        floor = 7.0 if theme.name == "peri-contrast" else 4.5
        for name in ("foreground", "accent", "success", "warning", "error"):
            assert _contrast(Color.parse(getattr(theme, name)), ground) >= floor - 0.5, (theme.name, name)
        assert _contrast(Color.parse(theme.variables["peri-muted"]), ground) >= 4.5, theme.name


def _contrast(one, other) -> float:
    def light(colour) -> float:
        parts = [
            value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
            for value in colour.normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('primary = "#112233"\n', "name: missing"),
        ('name = "x"\n', "primary: missing"),
        (GOOD + 'colour = "#000000"\n', "colour: unknown key"),
        (GOOD + 'accent = "reddish"\n', "accent: expected a colour such as #7aa2f7, got 'reddish'"),
        (GOOD + 'accent = "ansi_red"\n', "accent: expected a colour"),
        (GOOD + "accent = 7\n", "accent: expected a colour"),
        (GOOD + "dark = 1\n", "dark: expected true or false, got 1"),
        (GOOD + "text-alpha = 3\n", "text-alpha: expected a number from 0 to 1, got 3"),
        (GOOD + '[variables]\nperi-stop = "no"\n', "variables.peri-stop: expected a colour"),
        (GOOD + '[variables]\nnope = "#000000"\n', "variables.nope: unknown key"),
        (GOOD + "variables = 3\n", "variables: expected a table"),
        ('name = "\\u001b]0;x"\nprimary = "#112233"\n', "name: expected a text"),
        ("name = \n", "not valid TOML"),
    ],
)
def test_a_wrong_theme_file_is_named_with_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.toml") as caught:
        theming.load_themes([tmp_path])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value).split("not valid TOML")[0]


def test_an_unknown_theme_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="unknown theme 'nord'; known: peri-contrast, peri-dark, peri-light"
    ):
        Stage(theme="nord")


async def test_a_users_theme_without_our_variables_works(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    async with stage(theme="mine", theme_folders=[tmp_path]) as scene:
        await scene.run()
        scene.text("hello\n\n")
        await scene.settled()
        assert "hello" in scene.screen()
        assert set(scene.app.available_themes) == {"mine", "peri-dark", "peri-light", "peri-contrast"}


async def test_no_color_is_honoured_and_every_state_is_still_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with stage() as scene:
        assert scene.app.no_color
        await scene.run()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.view.task.lamps[1].state == "ok")
        scene.end()
        await scene.settled()
        shown = scene.screen()
        for word in ("UI", "Client", "Scheduler", "Model", "Rollback", "Stopped", "✓"):
            assert word in shown


def test_every_action_has_a_handler_and_no_key_is_given_twice() -> None:
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))
    for action in ACTIONS:
        assert hasattr(PeriApp, f"action_{action.handler.split('(')[0]}"), action.id


async def test_a_crash_prints_no_local_and_no_sequence(capfd: pytest.CaptureFixture[str]) -> None:
    scene = Stage()

    def fail() -> None:
        canary = "CANARY" + "123"
        raise RuntimeError(f"\x1b]0;owned\x07 {len(canary)}")

    with pytest.raises(RuntimeError):
        async with scene.app.run_test() as pilot:
            scene.app.call_later(fail)
            await pilot.pause()
            await pilot.pause()
    written = io.StringIO()
    scene.app.error_console.file = written
    scene.app._print_error_renderables()
    out = capfd.readouterr()
    shown = written.getvalue() + out.err + out.out
    assert "CANARY123" not in shown
    assert "\x1b]0;" not in shown


def test_no_handler_of_app_or_screen_waits() -> None:
    import re

    import peri_tui.tui

    root = Path(peri_tui.tui.__file__).parent
    for file in (root / "app.py", root / "handlers.py", *(root / "screens").glob("*.py")):
        assert not re.search(r"async def (on_|_on_|action_|watch_)", file.read_text()), file
