"""The ``peri`` command. Nothing heavy is imported before it is known to be needed.

``peri stop``, ``tasks`` and ``trace`` work while a TUI is frozen, so they never import Textual.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from peri_tui import __version__
from peri_tui.core import faults
from peri_tui.core.ids import is_ulid
from peri_tui.errors import ConfigError, InputError, PeriError, UsageError

_LATER: Final = ("redo", "checkpoints", "doctor", "serve", "attach")


class _Parser(argparse.ArgumentParser):
    """Raises our own error, so that every usage error looks alike and exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; errors are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _install_faults()
        return _run(arguments)
    except PeriError as error:
        print(f"peri: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away; nothing is left to say, also not at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _install_faults() -> None:
    try:
        faults.install(filter(None, os.environ.get("PERI_FAULTS", "").split(",")))
    except ValueError as error:
        raise UsageError(f"PERI_FAULTS: {error}") from None


def _run(arguments: list[str]) -> int:
    word = arguments[0] if arguments else ""
    if word in _LATER:
        raise UsageError(f"'peri {word}' is not built yet; see peri --help for what is")
    command = _COMMANDS.get(word)
    if command is not None:
        return command(arguments[1:])
    return _peri(arguments)


# --- peri, peri -p, peri demo ---------------------------------------------------------------------------------------

_MAIN_EPILOG: Final = """\
commands:
  peri [DIR]            the screen, on a workspace (default: this folder)
  peri -p PROMPT        one task without a screen; answer on stdout, progress on stderr
  peri demo             the screen on a throw-away project with the offline model: press Esc at any time
  peri stop [TASK]      stop from another terminal
  peri tasks            running and recent tasks
  peri trace [TASK]     which layer did what in a stop (default: the last one)
  peri undo [TASK]      put back the files of a finished task (default: the last one)
  peri ps [--kill]      processes, connections and files of Peri and its tasks; ends what a crash left
  peri recover          finish what a crash left (every start does it too)

example:
  peri -p 'replace Basket with Cart in src/*.py' --approve all
"""


def _peri(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri",
        description="A coding agent that can be stopped at any moment, completely, with proof.",
        epilog=_MAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"peri {__version__}")
    parser.add_argument("dir", nargs="?", metavar="DIR", help="the workspace (default: the current folder)")
    _add_options(parser)
    parser.add_argument(
        "-p", "--prompt", metavar="PROMPT", help="one task without a screen; - reads standard input"
    )
    parser.add_argument("--output-format", choices=("text", "json", "stream-json"), default="text")
    parser.add_argument(
        "-c", "--continue", dest="last", action="store_true", help="continue the last session"
    )
    parser.add_argument("-r", "--resume", metavar="SESSION", help="resume a session by its id")
    given = parser.parse_args(arguments)
    workspace = _workspace(given.dir, given.folder)
    if given.resume is not None and not is_ulid(given.resume):
        raise InputError(f"-r: {given.resume!r} is no session id")
    session = given.resume or ("last" if given.last else "")
    if given.prompt is not None:
        return _headless(given, workspace, session)
    return _screen(given, workspace, session)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", help="openai (any compatible server) or offline")
    parser.add_argument("--base-url", dest="base_url", metavar="URL", help="such as http://127.0.0.1:8080/v1")
    parser.add_argument("--model", metavar="NAME")
    parser.add_argument("--approve", help="ask (default) or all")
    parser.add_argument(
        "--yolo", dest="approve", action="store_const", const="all", help="the same as --approve all"
    )
    parser.add_argument("--on-stop", dest="on_stop", help="restore (default) or keep the files after a stop")
    parser.add_argument("--max-turns", dest="max_turns", type=int, metavar="N")
    parser.add_argument("--max-tokens", dest="max_tokens", type=int, metavar="N")
    parser.add_argument("--max-seconds", dest="max_seconds", type=float, metavar="N")
    parser.add_argument("--theme", metavar="NAME")
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("-C", dest="folder", metavar="DIR", help="run as if started in DIR")


_OPTIONS: Final = (
    "provider", "base_url", "model", "approve", "on_stop", "max_turns", "max_tokens", "max_seconds", "theme",
)  # fmt: skip


def _settings(given: argparse.Namespace, workspace: Path) -> tuple[Any, Any]:
    from peri_tui.config import find_paths, load_settings

    paths = find_paths()
    options = {key: getattr(given, key) for key in _OPTIONS}
    settings = load_settings(paths, options, config_file=given.config)
    if given.config is not None:
        # The agent, also one that is started anew after a crash, reads its own part of the same file.
        os.environ["PERI_CONFIG"] = os.path.abspath(given.config)
    for folder in (paths.data, paths.state):
        if Path(os.path.realpath(folder)).is_relative_to(workspace):
            # A backup inside of what it protects would be no backup.
            raise ConfigError(
                f"{workspace}: holds Peri's own folder {folder}; start peri in a project's folder"
            )
    paths.make()
    return paths, settings


def _workspace(given: str | None, folder: str | None) -> Path:
    wanted = Path(folder or ".") / (given or ".")
    try:
        # Not Path.resolve: before Python 3.13 its word for a loop of links is a RuntimeError.
        workspace = Path(os.path.realpath(wanted, strict=True))
        if not workspace.is_dir():
            raise InputError(f"{wanted}: not a folder")
        os.listdir(workspace)
    except InputError:
        raise
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise InputError(f"{wanted}: {words}{_meant(given)}") from None
    return workspace


def _meant(given: str | None) -> str:
    """Return which command a word that is no folder looks like."""
    import difflib

    near = difflib.get_close_matches(given or "", [*_COMMANDS, "help"], n=1)
    return f"; did you mean 'peri {near[0]}'?".replace("'peri help'", "'peri --help'") if near else ""


def _headless(given: argparse.Namespace, workspace: Path, session: str) -> int:
    import asyncio

    from peri_tui.client.prompt_run import run_prompt

    prompt = _standard_input() if given.prompt == "-" else given.prompt
    if not prompt.strip():
        raise InputError("the prompt is empty")
    paths, settings = _settings(given, workspace)
    return asyncio.run(
        run_prompt(paths, workspace, settings, prompt, session=session, output_format=given.output_format)
    )


def _standard_input() -> str:
    """Return what stands on standard input; what is no UTF-8 is an error whatever the locale says."""
    if sys.stdin is None:
        raise InputError("standard input: closed, so there is no prompt to read")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"standard input: cannot be read: {error.strerror}") from None


def _screen(given: argparse.Namespace, workspace: Path, session: str) -> int:
    if not _has_terminal():
        raise UsageError("no terminal here; use peri -p PROMPT for a task without a screen")
    paths, settings = _settings(given, workspace)
    from peri_tui.tui.run import run_screen

    return run_screen(paths, workspace, settings, session=session)


def _has_terminal() -> bool:
    # A closed stream is None.
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _demo(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri demo",
        description="The screen on a throw-away sample project with the offline model: safe to press Esc on.",
        epilog="example:\n  peri demo            then Enter, and Esc whenever you like",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    given = parser.parse_args(arguments)
    given.provider = given.provider or ("openai" if given.base_url else "offline")
    given.approve = given.approve or "all"
    if not _has_terminal():
        raise UsageError("no terminal here; peri demo shows the screen")
    import shutil
    import tempfile

    from peri_tui.sample import DEMO_PROMPT, make_sample

    folder = Path(tempfile.mkdtemp(prefix="peri-demo-"))
    try:
        workspace = make_sample(folder)
        paths, settings = _settings(given, workspace)
        from peri_tui.tui.run import run_screen

        return run_screen(paths, workspace, settings, session="", draft=DEMO_PROMPT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- stop, tasks, trace, undo, recover ------------------------------------------------------------------------------


def _stop(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri stop",
        description="Stop a task from another terminal, whatever state its screen is in.",
        epilog="example:\n  peri stop --all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="a task id (default: the newest running task)"
    )
    parser.add_argument("--all", action="store_true", help="every running task of yours")
    parser.add_argument("--force", action="store_true", help="skip every grace period")
    given = parser.parse_args(arguments)
    if given.task and given.all:
        raise UsageError("give a task or --all, not both")
    from peri_tui.client.remote import stop

    return stop(_paths(), task=given.task, every=given.all, force=given.force)


def _tasks(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri tasks", description="Running and recent tasks.", epilog="example: peri tasks --json"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(arguments)
    from peri_tui.client.remote import list_tasks

    return list_tasks(_paths(), as_json=given.json)


def _trace(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri trace",
        description="What each layer did in a stop, and which one did not answer.",
        epilog="example: peri trace --json",
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="a task id (default: the last stop)")
    parser.add_argument("--json", action="store_true", help="the records by layer")
    given = parser.parse_args(arguments)
    from peri_tui.client.remote import show_trace

    return show_trace(_paths(), task=given.task, as_json=given.json)


def _undo(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri undo",
        description="Put back the files that a finished task changed; yours stay as you changed them.",
        epilog="example: peri undo",
    )
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="a task id (default: the last one of this folder)"
    )
    parser.add_argument("-C", dest="folder", metavar="DIR", help="run as if started in DIR")
    given = parser.parse_args(arguments)
    from peri_tui.agent.undo import undo_task

    return undo_task(_paths(), _workspace(None, given.folder), given.task)


def _ps(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri ps",
        description="Processes, connections and files that belong to Peri and its tasks, by agent and task. "
        "What an agent that died has left is marked; exit code 74 says that there is some.",
        epilog="examples:\n  peri ps\n  peri ps --kill        ask, then end what dead agents left",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kill", action="store_true", help="end what dead agents left; running tasks: peri stop"
    )
    parser.add_argument("--yes", action="store_true", help="with --kill: do not ask")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args(arguments)
    if given.yes and not given.kill:
        raise UsageError("--yes belongs to --kill (see peri ps --help)")
    from peri_tui.doctor.ps import show_processes

    return show_processes(
        _paths(), kill=given.kill, yes=given.yes, as_json=given.json, interactive=_has_terminal()
    )


def _recover(arguments: list[str]) -> int:
    parser = _Parser(
        prog="peri recover",
        description="Finish what a crash left: end and roll back tasks whose agent is proven dead.",
        epilog="example: peri recover",
    )
    parser.parse_args(arguments)
    import asyncio

    from peri_tui.agent.main import recover_once

    return asyncio.run(recover_once(_paths()))


def _paths() -> Any:
    from peri_tui.config import find_paths

    paths = find_paths()
    paths.make()
    return paths


_COMMANDS: Final[dict[str, Callable[[list[str]], int]]] = {
    "demo": _demo,
    "stop": _stop,
    "tasks": _tasks,
    "trace": _trace,
    "undo": _undo,
    "ps": _ps,
    "recover": _recover,
}
