"""Themes from TOML files: Peri's own from the wheel (or the repository), the user's from the config folder.

Textual takes an invalid colour and dies of it much later, so every value is checked here, and an error names file
and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from textual.color import Color, ColorParseError
from textual.theme import Theme

from peri_tui.config import read_small
from peri_tui.errors import ConfigError

VARIABLE_DEFAULTS: Final[dict[str, str]] = {
    "peri-muted": "#7d869f",
    "peri-faint": "#3d4456",
    "peri-user": "#ffffff",
    "peri-code": "#b9c6ec",
    "peri-added": "#8fbf7f",
    "peri-removed": "#e5707b",
    "peri-stop": "#e5707b",
}
_COLOURS: Final = frozenset(
    ("primary", "secondary", "accent", "foreground", "background", "surface", "panel", "boost", "success",
     "warning", "error")
)  # fmt: skip
_NUMBERS: Final = frozenset(("luminosity-spread", "text-alpha"))
_REQUIRED: Final = ("name", "primary")


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours that the conversation is drawn with, as ``#rrggbb``."""

    foreground: str
    background: str
    accent: str
    muted: str
    faint: str
    user: str
    code: str
    success: str
    warning: str
    error: str
    added: str
    removed: str
    dark: bool

    @classmethod
    def of(cls, variables: Mapping[str, str], *, dark: bool) -> Palette:
        """Return the palette of resolved theme variables (``App.theme_variables``)."""

        def colour(name: str, spare: str = "foreground") -> str:
            text = variables.get(name) or variables[spare]
            return Color.parse(text).hex6

        return cls(
            foreground=colour("foreground"), background=colour("background"), accent=colour("accent"),
            muted=colour("peri-muted"), faint=colour("peri-faint"), user=colour("peri-user"),
            code=colour("peri-code"), success=colour("success"), warning=colour("warning"),
            error=colour("error"), added=colour("peri-added"), removed=colour("peri-removed"), dark=dark,
        )  # fmt: skip


def shipped_folder() -> Path:
    """Return the folder of Peri's own themes: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "themes"
    return inside if inside.is_dir() else package.parent / "themes"


def load_themes(folders: Iterable[Path]) -> list[Theme]:
    """Return the themes of every ``*.toml`` in the folders; a later folder replaces a name of an earlier one.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a wrong type, a bad colour; names file and key.
    """
    themes: dict[str, Theme] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            theme = load_theme(file)
            themes[theme.name] = theme
    return list(themes.values())


def load_theme(file: Path) -> Theme:
    """Return the theme of one file.

    Raises:
        ConfigError: see ``load_themes``.
    """
    try:
        data = tomllib.loads(read_small(file).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for key in _REQUIRED:
        if key not in data:
            raise ConfigError(f"{file}: {key}: missing")
    checked = {key.replace("-", "_"): _value(file, key, value) for key, value in data.items()}
    return Theme(**checked)


def _value(file: Path, key: str, value: Any) -> Any:
    if key in _COLOURS:
        return _colour(f"{file}: {key}", value)
    if key in _NUMBERS:
        return _number(f"{file}: {key}", value)
    if key == "name":
        return _name(f"{file}: name", value)
    if key == "dark":
        if not isinstance(value, bool):
            raise ConfigError(f"{file}: dark: expected true or false, got {value!r}")
        return value
    if key == "variables":
        return _variables(file, value)
    known = sorted({*_COLOURS, *_NUMBERS, "name", "dark", "variables"})
    raise ConfigError(f"{file}: {key}: unknown key; known: {', '.join(known)}")


def _name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        raise ConfigError(f"{where}: expected a text, got {value!r}")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a number from 0 to 1, got {value!r}")
    return float(value)


def _variables(file: Path, table: Any) -> dict[str, str]:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: variables: expected a table, got {table!r}")
    for key in table:
        if key not in VARIABLE_DEFAULTS:
            known = ", ".join(sorted(VARIABLE_DEFAULTS))
            raise ConfigError(f"{file}: variables.{key}: unknown key; known: {known}")
    return {key: _colour(f"{file}: variables.{key}", value) for key, value in table.items()}


def _colour(where: str, value: Any) -> str:
    try:
        colour = Color.parse(value) if isinstance(value, str) else None
    except ColorParseError:
        colour = None
    if colour is None or colour.ansi is not None:
        raise ConfigError(f"{where}: expected a colour such as #7aa2f7, got {value!r}")
    return str(value)
