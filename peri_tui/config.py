"""Settings and paths: TOML files, environment, options, in the order option, environment, user, default.

Every problem is a ``ConfigError`` that names file, key and what was expected.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import platformdirs

from peri_tui.errors import ConfigError, UsageError

PROVIDERS_BUILT: Final = ("openai", "offline")
PROVIDERS_LATER: Final = ("anthropic", "gemini", "ollama", "process")
APPROVALS_BUILT: Final = ("ask", "all")
APPROVALS_LATER: Final = ("edits", "plan")
THEMES: Final = ("peri-dark", "peri-light", "peri-contrast")
_SOCKET_NAME_MAX: Final = 107
SMALL_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Paths:
    """Where everything is. All folders are the user's own (0700)."""

    config: Path
    data: Path
    state: Path
    runtime: Path

    @property
    def db(self) -> Path:
        """The state store."""
        return self.data / "state.db"

    @property
    def store(self) -> Path:
        """Backups: segments and trash, one folder a workspace."""
        return self.data / "store"

    @property
    def sessions(self) -> Path:
        """Drafts and queued prompts."""
        return self.data / "sessions"

    @property
    def journal(self) -> Path:
        """Rollback journals, one folder a workspace."""
        return self.state / "journal"

    @property
    def trace(self) -> Path:
        """Trace files, one a task."""
        return self.state / "trace"

    @property
    def spill(self) -> Path:
        """Long output of commands, one folder a task."""
        return self.state / "spill"

    @property
    def log(self) -> Path:
        """Log files."""
        return self.state / "log"

    def socket(self, instance: str) -> Path:
        """The Unix socket of an agent."""
        return self.runtime / f"{instance}.sock"

    def token(self, instance: str) -> Path:
        """The token file of an agent (0600)."""
        return self.runtime / f"{instance}.token"

    def make(self) -> None:
        """Create every folder, private to the user.

        Raises:
            ConfigError: one cannot be made, or belongs to somebody else.
        """
        for folder in (
            self.config, self.data, self.state, self.runtime, self.store, self.sessions, self.journal,
            self.trace, self.log, self.runtime / "tmp",
        ):  # fmt: skip
            make_private(folder)


def make_private(folder: Path) -> None:
    """Create a folder with mode 0700, or check that it is the user's own and open to nobody else.

    Raises:
        ConfigError: it cannot be made, is a link, or belongs to another user.
    """
    try:
        _make(folder)
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise ConfigError(f"{folder}: not a folder of yours; remove it or set PERI_HOME")
        if info.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None


def _make(folder: Path) -> None:
    # Path.mkdir gives the mode to the last folder only; whoever may write to one above may replace ours.
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def find_paths(environ: Mapping[str, str] = os.environ) -> Paths:
    """Return the folders for this user: ``PERI_HOME`` if set, else XDG."""
    home = environ.get("PERI_HOME")
    if home:
        root = Path(home).expanduser().absolute()
        return Paths(root / "config", root / "data", root / "state", _runtime(root / "run"))
    return Paths(
        platformdirs.user_config_path("peri"),
        platformdirs.user_data_path("peri"),
        platformdirs.user_state_path("peri"),
        _runtime(Path(environ["XDG_RUNTIME_DIR"]) / "peri" if environ.get("XDG_RUNTIME_DIR") else None),
    )


def _runtime(wanted: Path | None) -> Path:
    # An instance's socket is a ULID and ".sock": 31 bytes and a slash.
    if wanted is not None and len(os.fsencode(wanted)) + 32 <= _SOCKET_NAME_MAX and _usable(wanted.parent):
        return wanted
    tag = f"peri-{os.getuid()}"
    if wanted is not None and wanted.name == "run":
        import hashlib

        tag += "-" + hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / tag


def _usable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user set. The key is not a setting: the agent reads it from its own environment.

    0 is no limit, except ``max_memory_mb``: there it is half of the memory, or what is free less 1 GiB.
    """

    provider: str = ""
    base_url: str = ""
    model: str = ""
    approve: str = "ask"
    on_stop: str = "restore"
    theme: str = "peri-dark"
    max_turns: int = 0
    max_tokens: int = 0
    max_seconds: float = 0.0
    offline_rate: float = 60.0
    connect_s: float = 10.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0
    total_s: float = 1800.0
    concurrency: int = 4
    max_memory_mb: int = 0
    max_processes: int = 512
    max_command_s: float = 1800.0
    max_cpu_s: float = 0.0
    max_output_mb: int = 10240
    output_policy: str = "discard"
    containment: str = "auto"
    interrupt_s: float = 2.0
    terminate_s: float = 1.0
    kill_confirm_s: float = 5.0
    git_interrupt_s: float = 5.0
    notes: tuple[str, ...] = field(default=(), compare=False)


_CHOICES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "provider": (PROVIDERS_BUILT, PROVIDERS_LATER),
    "approve": (APPROVALS_BUILT, APPROVALS_LATER),
    "on_stop": (("restore", "keep"), ()),
    "output_policy": (("discard", "throttle"), ()),
    "containment": (("auto", "plain", "strict"), ()),
}

# A stop must end: no rung may be waited for without end, and a proof needs a moment.
_MOST: Final[dict[str, float]] = {
    "interrupt_s": 60.0, "terminate_s": 60.0, "kill_confirm_s": 60.0, "git_interrupt_s": 60.0,
}  # fmt: skip
_LEAST: Final[dict[str, float]] = {"kill_confirm_s": 0.5}


def load_settings(
    paths: Paths,
    options: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_file: Path | None = None,
) -> Settings:
    """Return the settings: defaults, then the user's file, the environment, the options.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; names file, key and what was expected.
        UsageError: an option has a wrong value, or names a provider that is not built yet.
    """
    file = config_file or paths.config / "config.toml"
    merged: dict[str, Any] = {}
    found = _read(file, needed=config_file is not None)
    merged |= {key: _check(key, value, f"{file}: {key}", ConfigError) for key, value in found.items()}
    merged |= {key: _check(key, value, name, ConfigError) for key, name, value in _environment(environ)}
    given = {key: value for key, value in (options or {}).items() if value is not None}
    merged |= {
        key: _check(key, value, f"--{key.replace('_', '-')}", UsageError) for key, value in given.items()
    }
    return _choose_provider(Settings(**merged), environ)


def _read(file: Path, *, needed: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(file).decode("utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise ConfigError(f"{file}: cannot be read: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def read_small(file: Path, limit: int = SMALL_FILE) -> bytes:
    """Return the bytes of a regular file; never waits for a pipe, never reads a device.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``limit`` bytes; ``strerror`` says which.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as opened:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(file))
    return data


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    found = []
    for key, names in (("model", ("PERI_MODEL",)), ("base_url", ("PERI_BASE_URL", "OPENAI_BASE_URL"))):
        for name in names:
            if environ.get(name):
                found.append((key, name, environ[name]))
                break
    return found


def _check(key: str, value: Any, where: str, error: type[ConfigError] | type[UsageError]) -> Any:
    known: dict[str, Any] = {item.name: item.default for item in fields(Settings) if item.name != "notes"}
    if key not in known:
        raise error(f"{where}: unknown key; known: {', '.join(sorted(known))}")
    wanted = type(known[key])
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise error(f"{where}: expected {_word(wanted)}, got {value!r}")
    if wanted in (int, float) and not (value >= 0 and math.isfinite(value)):
        raise error(f"{where}: expected zero or more, got {value!r}")
    if key == "concurrency" and value == 0:
        raise error(f"{where}: expected one or more, got 0; no task could ever start")
    built, later = _CHOICES.get(key, ((), ()))
    if value in later:
        raise error(f"{where}: {value!r} is not built yet; now: {', '.join(built)}")
    if built and value not in built:
        raise error(f"{where}: expected one of {', '.join(built)}, got {value!r}")
    if key in _MOST and value > _MOST[key]:
        raise error(f"{where}: expected at most {_MOST[key]:g}, got {value!r}")
    if key in _LEAST and value < _LEAST[key]:
        raise error(f"{where}: expected at least {_LEAST[key]:g}, got {value!r}")
    if key == "base_url" and value:
        _check_url(value, where, error)
    return value


def _check_url(value: str, where: str, error: type[ConfigError] | type[UsageError]) -> None:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise error(f"{where}: expected an http or https URL such as http://127.0.0.1:8080/v1, got {value!r}")


def _word(kind: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _choose_provider(settings: Settings, environ: Mapping[str, str]) -> Settings:
    if settings.provider:
        return settings
    configured = settings.base_url or environ.get("PERI_API_KEY") or environ.get("OPENAI_API_KEY")
    return replace(settings, provider="openai" if configured else "offline")


def api_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return the key for an OpenAI-compatible server, or an empty text."""
    return environ.get("PERI_API_KEY") or environ.get("OPENAI_API_KEY") or ""
