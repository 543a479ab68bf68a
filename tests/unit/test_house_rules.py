"""The rules that a linter cannot say, read from the syntax trees of the package.

A rule is a function from a tree to findings (line, what is wrong). Each rule has a twin test that shows it a
sample which breaks it: a rule that cannot fail guards nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import peri_tui

pytestmark = pytest.mark.unit

PACKAGE = Path(peri_tui.__file__).parent
ROOT = PACKAGE.parent
MAX_LINES = 500

MAY_SPAWN = ("agent/processes/", "client/launcher.py")

# Functions of ``tui`` that may wait for a file or a terminal, and why that cannot hold up the screen.
MAY_BLOCK = {
    "tui/driver.py:StopTap.run_input": "runs in the input thread, not on the loop",
    "tui/driver.py:StopTap._read": "runs in the input thread, after select said that there is something",
    "tui/first_frame.py:FirstFrame.paint": "runs in the input thread, half a millisecond for the writer's turn",
    "tui/key_feed.py:terminal_is_piped_in": "one line of /proc, once, before the first frame",
}

# Modules that may be longer than the rest, and why.
MAY_BE_LONG = {
    "agent/processes/warden.py": "one self-contained file, started by path, that imports nothing of the package",
    "agent/processes/mac_supervisor.py": "one self-contained file, started by path, as the warden is",
    "core/messages.py": "the catalogue of the wire: every message in one place, told apart by its tag",
}

TOP_LEVEL = {"peri_tui", "tests", "themes", "pyproject.toml", "README.md", "LICENSE", "AGENTS.md"}

Finding = tuple[int, str]
Rule = Callable[[ast.Module], Iterator[Finding]]


@cache
def modules() -> dict[str, ast.Module]:
    """Return path below the package → tree, of every module."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def check(rule: Rule, *, where: Callable[[str], bool] = lambda path: True) -> None:
    found = [
        f"peri_tui/{path}:{line}: {what}"
        for path, tree in modules().items()
        if where(path)
        for line, what in sorted(rule(tree))
    ]
    assert not found, "\n" + "\n".join(found)


def findings(rule: Rule, source: str) -> list[str]:
    return [what for _, what in rule(ast.parse(source))]


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of a name or attribute; ``.c`` where its root is another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def used_names(tree: ast.AST) -> Iterator[Finding]:
    """Yield every imported or dotted name, as written out in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


# --- cancels ------------------------------------------------------------------------------------------------------


def no_wait_for(tree: ast.Module) -> Iterator[Finding]:
    for line, name in used_names(tree):
        if name == "asyncio.wait_for":
            yield line, "asyncio.wait_for loses a cancel on Python 3.11; use asyncio.timeout"


def cancel_is_raised_again(tree: ast.Module) -> Iterator[Finding]:
    yield from _swallowed(tree, tree, ())


def _swallowed(node: ast.AST, function: ast.AST, around: tuple[ast.Try, ...]) -> Iterator[Finding]:
    """Walk down, knowing the innermost function and the ``try`` statements around."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        function, around = node, ()
    if isinstance(node, ast.Try):
        around = (*around, node)
    if isinstance(node, ast.ExceptHandler) and _catches_cancel(node.type):
        ends = any(_ends(statement) for outer in around for statement in outer.finalbody)
        if not (ends or any(map(_ends, node.body)) or _raised_later(node, function)):
            yield node.lineno, "swallows CancelledError: raise it again (or end the process)"
    if (
        isinstance(node, ast.Call)
        and dotted(node.func).endswith("suppress")
        and any(map(_catches_cancel, node.args))
    ):
        yield node.lineno, "suppress() swallows CancelledError"
    for child in ast.iter_child_nodes(node):
        yield from _swallowed(child, function, around)


def _ends(statement: ast.AST) -> bool:
    """Tell whether a statement may raise or end the process."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and dotted(node.func) in ("os._exit", "sys.exit", "os.abort"))
        for node in _same_function(statement)
    )


def _raised_later(handler: ast.ExceptHandler, function: ast.AST) -> bool:
    """Tell whether the handler keeps the error in a name that the same function raises (``cancelled = error``)."""
    kept = {
        dotted(target)
        for node in handler.body
        if isinstance(node, ast.Assign) and dotted(node.value) == handler.name
        for target in node.targets
    }
    return any(
        isinstance(node, ast.Raise) and node.exc and dotted(node.exc) in kept for node in ast.walk(function)
    )


def _catches_cancel(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(map(_catches_cancel, kind.elts))
    return dotted(kind).rpartition(".")[2] in ("CancelledError", "BaseException", "BaseExceptionGroup")


def _same_function(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _same_function(child)


def test_wait_for_is_not_used() -> None:
    check(no_wait_for)


def test_cancelled_error_is_always_raised_again() -> None:
    check(cancel_is_raised_again)


@pytest.mark.parametrize("source", ["import asyncio\nasyncio.wait_for(x, 1)", "from asyncio import wait_for"])
def test_the_rule_sees_wait_for(source: str) -> None:
    assert findings(no_wait_for, source)


@pytest.mark.parametrize(
    ("body", "bad"),
    [
        ("except asyncio.CancelledError:\n pass", True),
        ("except CancelledError:\n return_it()", True),
        ("except:\n pass", True),
        ("except BaseException as e:\n log(e)", True),
        ("except (ValueError, asyncio.CancelledError):\n pass", True),
        ("except asyncio.CancelledError:\n def f(): raise", True),
        ("except asyncio.CancelledError:\n log()\n raise", False),
        ("except BaseException:\n if x:\n  raise\n", False),
        ("except BaseException:\n os._exit(1)", False),
        ("except Exception:\n pass", False),
        ("except BaseException:\n pass\nfinally:\n os._exit(1)", False),
        ("except BaseException:\n pass\nfinally:\n log()", True),
    ],
)
def test_the_rule_sees_a_swallowed_cancel(body: str, bad: bool) -> None:
    assert bool(findings(cancel_is_raised_again, f"try:\n x()\n{body}")) is bad


def test_a_cancel_may_be_kept_and_raised_later() -> None:
    source = "def f():\n try:\n  x()\n except CancelledError as error:\n  kept = error\n {}\n"
    assert not findings(cancel_is_raised_again, source.format("raise kept"))
    assert findings(cancel_is_raised_again, source.format("return kept"))
    assert findings(cancel_is_raised_again, source.format("raise other"))


def test_the_rule_sees_a_suppressed_cancel() -> None:
    assert findings(cancel_is_raised_again, "with contextlib.suppress(asyncio.CancelledError):\n x()")
    assert not findings(cancel_is_raised_again, "with contextlib.suppress(OSError):\n x()")


# --- processes ----------------------------------------------------------------------------------------------------


def no_spawn(tree: ast.Module) -> Iterator[Finding]:
    for line, name in used_names(tree):
        first, _, rest = name.partition(".")
        bad = (
            first in ("subprocess", "multiprocessing", "pty")
            or (first == "asyncio" and rest.startswith("create_subprocess"))
            or (
                first == "os" and rest.startswith(("fork", "system", "popen", "posix_spawn", "spawn", "exec"))
            )
            or name.endswith("ProcessPoolExecutor")
        )
        if bad:
            yield line, f"{name}: only the warden and the launcher start processes"


def test_only_warden_and_launcher_start_processes() -> None:
    check(no_spawn, where=lambda path: not path.startswith(MAY_SPAWN))


@pytest.mark.parametrize(
    "source",
    ["import subprocess", "from subprocess import run", "asyncio.create_subprocess_exec()", "os.fork()", "os.system('')",
     "import pty", "os.posix_spawn", "from os import forkpty", "concurrent.futures.ProcessPoolExecutor()"],
)  # fmt: skip
def test_the_rule_sees_a_spawn(source: str) -> None:
    assert findings(no_spawn, source)


# --- the screen ---------------------------------------------------------------------------------------------------


def no_async_handler(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef) and node.name.lstrip("_").startswith(
            ("on_", "action_", "watch_")
        ):
            yield (
                node.lineno,
                f"async def {node.name}: a handler of App or Screen that awaits blocks every key",
            )


def no_markup(tree: ast.Module) -> Iterator[Finding]:
    for line, name in used_names(tree):
        if name.startswith(("textual.markup", "rich.markup")) or name.endswith(".from_markup"):
            yield line, f"{name}: untrusted text meets a markup parser"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "markup" and not _is_constant(node.value, False):
            yield node.value.lineno, "markup is on: untrusted text meets a markup parser"


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


BLOCKING_NAMES = (
    "time.sleep",
    "os.read",
    "os.open",
    "os.fsync",
    "socket.create_connection",
    "shutil.copy",
    "os.replace",
)
BLOCKING_METHODS = (
    "read_text",
    "write_text",
    "read_bytes",
    "write_bytes",
    "open",
    "unlink",
    "mkdir",
    "recv",
    "sendall",
)


def no_blocking(tree: ast.Module) -> Iterator[Finding]:
    yield from _blocking(tree, "")


def _blocking(node: ast.AST, inside: str) -> Iterator[Finding]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _blocking(child, f"{inside}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Call) and (name := _blocks(child)):
            yield child.lineno, f"{inside or 'module'}: {name} may block the screen"
        yield from _blocking(child, inside)


def _blocks(call: ast.Call) -> str:
    name = dotted(call.func)
    last = name.rpartition(".")[2]
    bad = (
        name == "open"
        or name in BLOCKING_NAMES
        or name.startswith(("requests.", "urllib.request."))
        or (isinstance(call.func, ast.Attribute) and last in BLOCKING_METHODS)
    )
    return name if bad and not name.startswith("aiofiles.") else ""


def test_handlers_of_app_and_screens_are_not_async() -> None:
    check(no_async_handler, where=lambda path: path == "tui/app.py" or path.startswith("tui/screens/"))


def test_no_text_meets_a_markup_parser() -> None:
    check(no_markup)


def test_the_screen_never_blocks() -> None:
    found = {
        f"{path}:{what.partition(': ')[0]}": f"peri_tui/{path}:{line}: {what}"
        for path, tree in modules().items()
        if path.startswith("tui/")
        for line, what in no_blocking(tree)
    }
    bad = [text for place, text in sorted(found.items()) if place not in MAY_BLOCK]
    assert not bad, "\n" + "\n".join(bad)
    unused = sorted(MAY_BLOCK.keys() - found.keys())
    assert not unused, f"no exception needed any more: {unused}"


@pytest.mark.parametrize("name", ["on_key", "action_stop", "watch_state", "_on_mount"])
def test_the_rule_sees_an_async_handler(name: str) -> None:
    assert findings(no_async_handler, f"class A:\n async def {name}(self): ...")
    assert not findings(no_async_handler, f"class A:\n def {name}(self): ...")


@pytest.mark.parametrize(
    "source",
    ["from textual.markup import escape", "import rich.markup", "Text.from_markup(x)", "Static(x, markup=True)",
     "Content.from_markup(x)", "notify(x, markup=flag)"],
)  # fmt: skip
def test_the_rule_sees_markup(source: str) -> None:
    assert findings(no_markup, source)
    assert not findings(no_markup, "Static(x, markup=False)")


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)", "open('f')", "requests.get(u)", "Path('x').read_text()", "async def f():\n p.write_bytes(b'')",
     "class A:\n def f(self):\n  with self.path.open() as file: ..."],
)  # fmt: skip
def test_the_rule_sees_a_blocking_call(source: str) -> None:
    assert findings(no_blocking, source)
    assert not findings(no_blocking, "aiofiles.open('f')")


# --- modules ------------------------------------------------------------------------------------------------------


def module_manners(tree: ast.Module) -> Iterator[Finding]:
    if not ast.get_docstring(tree):
        yield 1, "a module says in its docstring what it is"
    code = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    first = code[0] if code else None
    if first and not (isinstance(first, ast.ImportFrom) and first.module == "__future__"):
        yield first.lineno, "from __future__ import annotations comes first"


def test_every_module_has_a_docstring_and_lazy_annotations() -> None:
    check(module_manners)


def test_no_module_is_too_long() -> None:
    lengths = {path: (PACKAGE / path).read_text(encoding="utf-8").count("\n") for path in modules()}
    long = [
        f"peri_tui/{path}: {lines} lines"
        for path, lines in lengths.items()
        if lines > MAX_LINES and path not in MAY_BE_LONG
    ]
    assert not long, f"more than {MAX_LINES} lines, split them: {long}"


def test_no_module_is_called_utils() -> None:
    bad = [path for path in modules() if Path(path).stem in ("utils", "util", "helpers", "misc", "common")]
    assert not bad, f"name what it does: {bad}"


def test_the_top_level_holds_what_the_design_says() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    extra = sorted(names - TOP_LEVEL)
    assert not extra, f"not at the top level of the repository: {extra}"
    assert {"peri_tui", "tests", "themes", "pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.parametrize("source", ["x = 1", '"""Doc."""\nimport os', "from __future__ import annotations"])
def test_the_rule_sees_bad_manners(source: str) -> None:
    assert findings(module_manners, source)
    assert not findings(module_manners, '"""Doc."""')
    assert not findings(module_manners, '"""Doc."""\nfrom __future__ import annotations\nimport os')
