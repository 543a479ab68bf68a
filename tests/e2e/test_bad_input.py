"""Bad input from every side: one clear line that names what and where, the right exit code, and nothing lost."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.outside import manifest
from tests.e2e.scene import Scene, tool
from tests.e2e.terminal import CTRL_C, PERI, Terminal, clean_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

OFFLINE = ("--provider", "offline")
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a home, and a workspace with one file. Its name is short: socket paths hold 107 bytes."""
    base = Path(tempfile.mkdtemp(prefix="pe-"))
    (base / "home" / "config").mkdir(parents=True, mode=0o700)
    (base / "ws").mkdir()
    (base / "ws" / "a.txt").write_text("old\n")
    yield base
    shutil.rmtree(base)


def sparse(file: Path) -> None:
    """Make a file of a terabyte that takes no room."""
    file.touch()
    os.truncate(file, 1 << 40)


def mortal() -> None:
    """Give up root's right to pass by file modes, before exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def run(
    folder: Path, *arguments: str, before: Callable[[], None] = mortal, stdin: bytes | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run ``peri`` as somebody whom file modes bind."""
    return subprocess.run(
        [*PERI, *arguments], cwd=folder / "ws", env=clean_environment(folder / "home", **env), timeout=40,
        capture_output=True, check=False, preexec_fn=before, input=stdin if stdin is not None else b"",
    )  # fmt: skip


def refused(ran: subprocess.CompletedProcess[Any], code: int, *words: str) -> str:
    """Check that a run ended with one line of error that holds the words, and return it."""
    stderr = ran.stderr.decode() if isinstance(ran.stderr, bytes) else ran.stderr
    lines = stderr.splitlines()
    assert ran.returncode == code, (ran.returncode, stderr)
    assert len(lines) == 1, stderr
    assert lines[0].startswith("peri: ")
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    assert not ran.stdout
    return str(lines[0])


# --- settings -------------------------------------------------------------------------------------------------------


CONFIGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "malformed": (lambda file: file.write_text("approve ="), "not valid TOML"),
    "unknown key": (lambda file: file.write_text('aprove = "ask"'), "aprove: unknown key; known: approve"),
    "wrong type": (lambda file: file.write_text("approve = 3"), "approve: expected a text, got 3"),
    "wrong value": (
        lambda file: file.write_text('on_stop = "burn"'),
        "on_stop: expected one of restore, keep",
    ),
    "not a number": (lambda file: file.write_text("max_seconds = nan"), "max_seconds: expected zero or more"),
    "endless": (lambda file: file.write_text("idle_s = inf"), "idle_s: expected zero or more"),
    "wrong address": (
        lambda file: file.write_text('base_url = "shop"'),
        "base_url: expected an http or https",
    ),
    "not built": (lambda file: file.write_text('provider = "gemini"'), "'gemini' is not built yet"),
    "not UTF-8": (lambda file: file.write_bytes(b"\xff\xfe"), "not valid TOML"),
    "deeply nested": (lambda file: file.write_text("model = " + "[" * 9999), "not valid TOML"),
    "a folder": (lambda file: file.mkdir(), "cannot be read"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "not a regular file"),
    "a loop of links": (lambda file: file.symlink_to(file), "cannot be read"),
    "huge": (sparse, "more than"),
    "unreadable": (lambda file: (file.write_text(""), file.chmod(0)), "cannot be read: Permission denied"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_settings_file_that_is_wrong(folder: Path, case: str) -> None:
    make, words = CONFIGS[case]
    file = folder / "home" / "config" / "config.toml"
    make(file)
    refused(run(folder, "-p", "help"), 52, str(file), words)


def test_a_settings_file_that_was_asked_for_must_be_there(folder: Path) -> None:
    refused(run(folder, "-p", "help", "--config", "no.toml"), 52, "no.toml", "no such file")


def test_a_theme_file_that_is_a_pipe_or_wrong_names_itself(folder: Path) -> None:
    from peri_tui.errors import ConfigError
    from peri_tui.tui.theming import load_theme

    os.mkfifo(folder / "x.toml")
    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read: not a regular file"):
        load_theme(folder / "x.toml")


# --- the command line and the folder --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", "help", "-C", "missing"], 42, "missing: no such file or directory"),
        (["-p", "help", "-C", "a.txt"], 42, "a.txt: not a"),
        (["-p", "help", "-C", "loop"], 42, "loop: too many levels of symbolic links"),
        (["-p", "help", "-C", "n" * 300], 42, "file name too long"),
        (["-p", "help", "-C", "closed"], 42, "closed: permission denied"),
        (["-p", "  "], 42, "the prompt is empty"),
        (["-p", "-"], 42, "the prompt is empty"),
        (["-p", "help", "--max-seconds", "nan"], 2, "--max-seconds: expected zero or more"),
        (["-p", "help", "--max-turns", "x"], 2, "--max-turns: invalid int value: 'x'"),
        (["-p", "help", "--base-url", "foo"], 2, "--base-url: expected an http or https URL"),
        (["-p", "help", "--base-url", "http://h:99999/v1"], 2, "--base-url: expected an http or https URL"),
        (["-p", "help", "--provider", "gemini"], 2, "'gemini' is not built yet"),
        (["-p", "help", "--provider", "x"], 2, "--provider: expected one of"),
        (["-p", "help", "-r", "nosuchsession"], 42, "nosuchsession"),
        (["--nonsense"], 2, "--nonsense"),
        ([], 2, "no terminal here"),
        (["trace", "nosuchtask"], 42, "nosuchtask"),
        (["undo", "nosuchtask"], 1, "nosuchtask"),
        (["stop", "nosuchtask"], 1, "nosuchtask"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_command_line_that_is_wrong(folder: Path, arguments: list[str], code: int, words: str) -> None:
    (folder / "ws" / "loop").symlink_to("loop")
    (folder / "ws" / "closed").mkdir(mode=0)
    refused(run(folder, *arguments), code, words)


def test_a_prompt_that_is_no_text(folder: Path) -> None:
    for locale in ("C", "C.UTF-8"):
        ran = run(folder, "-p", "-", stdin=b"caf\xe9", LC_ALL=locale, PYTHONIOENCODING="utf-8:strict")
        refused(ran, 42, "standard input: not UTF-8 text at byte 3")


def test_a_prompt_that_is_too_long_for_a_message(folder: Path) -> None:
    ran = run(folder, "-p", "-", *OFFLINE, stdin=b"x " * 60_000)
    refused(ran, 42, "the prompt: 120,", "more than 65,536", "put it into a file")
    assert run(folder, "-p", "-", *OFFLINE, stdin=b"x " * 30_000).returncode == 0


def test_a_standard_input_that_is_closed(folder: Path) -> None:
    def closed() -> None:
        os.close(0)

    refused(run(folder, "-p", "-", before=closed), 42, "standard input")


def test_the_word_for_a_fault_is_checked(folder: Path) -> None:
    refused(run(folder, "-p", "help", PERI_FAULTS="nosuch"), 2, "PERI_FAULTS", "nosuch")


# --- Peri's own folder ----------------------------------------------------------------------------------------------


def test_a_home_that_cannot_be_made(folder: Path) -> None:
    refused(run(folder, "-p", "help", PERI_HOME="/proc/none"), 52, "/proc/none", "cannot be made")
    refused(run(folder, "-p", "help", PERI_HOME=str(folder / "ws" / "a.txt")), 52, "a.txt", "ot a directory")
    (folder / "shut").mkdir(mode=0o500)
    refused(run(folder, "-p", "help", PERI_HOME=str(folder / "shut")), 52, "shut", "Permission denied")


@pytest.mark.parametrize("sub", ["run", "data", "state/log"])
def test_a_home_that_cannot_be_written(folder: Path, sub: str) -> None:
    assert run(folder, "-p", "help", *OFFLINE).returncode == 0
    if sub == "data":
        for file in (folder / "home" / "data").glob("state.db*"):
            file.unlink()
    (folder / "home" / sub).chmod(0o500)
    line = refused(
        run(folder, "-p", "help", *OFFLINE), 75 if sub != "data" else 1, str(folder / "home" / sub)
    )
    assert "denied" in line.lower() or "unable to open" in line


def test_a_state_file_that_is_no_database(folder: Path) -> None:
    assert run(folder, "-p", "help", *OFFLINE).returncode == 0
    db = folder / "home" / "data" / "state.db"
    for file in db.parent.glob("state.db-*"):
        file.unlink()
    db.write_bytes(b"this is not a database at all\n" * 400)
    kept = db.read_bytes()
    refused(run(folder, "-p", "help", *OFFLINE), 1, str(db), "not a database")
    assert db.read_bytes() == kept
    refused(run(folder, "tasks"), 1, str(db), "not a database")


def test_a_state_file_that_cannot_be_written(folder: Path) -> None:
    assert run(folder, "-p", "help", *OFFLINE).returncode == 0
    db = folder / "home" / "data" / "state.db"
    db.chmod(0o400)
    refused(run(folder, "-p", "help", *OFFLINE), 1, str(db), "Permission denied")


def test_a_state_file_of_a_newer_peri(folder: Path) -> None:
    assert run(folder, "-p", "help", *OFFLINE).returncode == 0
    db = folder / "home" / "data" / "state.db"
    with sqlite3.connect(db) as connection:
        connection.execute("PRAGMA user_version = 9999")
    connection.close()
    refused(run(folder, "-p", "help", *OFFLINE), 1, str(db), "newer")


# --- the model's server ---------------------------------------------------------------------------------------------


def event(delta: dict[str, Any]) -> str:
    """Return one event of a stream, as it goes over the wire."""
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\n\n"


SERVER: dict[str, tuple[list[dict[str, Any]], int, tuple[str, ...]]] = {
    "no-route": ([{"status": 404}], 1, ("404", "is the base URL right")),
    "web-page": ([{"status": 200, "body": "<html>hi", "content_type": "text/html"}], 1, ("a web page",)),
    "web-page-404": ([{"status": 404, "body": "<html>hi", "content_type": "text/html"}], 1, ("a web page",)),
    "no-key": ([{"status": 401}], 41, ("401", "it wants a key: set PERI_API_KEY")),
    "forbidden": ([{"status": 403}], 41, ("403",)),
    "broken": ([{"status": 400, "body": "x" * 5000, "content_type": "text/plain"}], 1, ("400", "xxx…")),
    "escape": ([{"status": 400, "body": "\x1b]0;t\x07\u202e"}], 1, ("400",)),
    "redirect": ([{"status": 302}], 1, ("302", "redirects")),
    "no-json": ([{"text": "so"}, {"invalid": True}], 1, ("JSON",)),
    "wrong-shape": ([{"raw": 'data: {"choices": 5}\n\n'}], 1, ("empty",)),
    "array": ([{"raw": "data: [1]\n\n"}], 1, ("model server",)),
    "no-utf8": ([{"hex": b'data: {"choices": "\xff"}\n\n'.hex()}], 1, ("empty",)),
    "cut": ([{"text": "so far "}, {"cut": "fin"}], 1, ("ended",)),
    "reset": ([{"text": "so far "}, {"cut": "rst"}], 1, ("model server",)),
    "no-done": ([{"text": "so far "}, {"done": False}], 1, ("ended",)),
    "error-object": ([{"text": "so "}, {"error": {"message": "out of\nmemory"}}], 1, ("out of memory",)),
    "nothing": ([{"text": ""}], 1, ("empty",)),
    "call-cut": ([tool("shell", command="touch x"), {"done": False}], 1, ("ended",)),
}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    replies = [{"when": case, "steps": steps} for case, (steps, _, _) in SERVER.items()]
    with Scene(replies) as made:
        yield made


def failed_line(stderr: str) -> str:
    """Return the one line that says how a task failed."""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("peri: failed: ")]
    assert line.isprintable()
    return line


@pytest.mark.parametrize("case", SERVER)
def test_a_model_server_that_errs(scene: Scene, case: str) -> None:
    _, code, words = SERVER[case]
    ran = scene.headless("-p", case)
    line = failed_line(ran.stderr)
    assert ran.returncode == code, ran.stderr
    assert f"127.0.0.1:{scene.server.port}" in line or "empty" in line
    assert [word for word in words if word not in line] == [], line
    assert len(line) < 500
    assert manifest(scene.workspace) == scene.before
    assert scene.connections() == []


def test_a_model_server_that_is_not_there(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = scene.headless("-p", "hi", "--base-url", f"http://{address}/v1")
    assert ran.returncode == 1
    assert address in failed_line(ran.stderr)
    assert "connection refused" in ran.stderr
    ran = scene.headless("-p", "hi", "--base-url", "http://nosuch.invalid/v1")
    assert ran.returncode == 1
    assert "nosuch.invalid" in failed_line(ran.stderr)
    assert manifest(scene.workspace) == scene.before


# --- the model's calls ----------------------------------------------------------------------------------------------

CALLS: list[list[tuple[dict[str, Any], str]]] = [
    [
        (tool("approve", id="1"), "approve"),
        (tool("../x"), "../x"),
        (tool("a\x1b]0;t\x07b"), "unknown tool"),
        (tool("read_file", path=5), "path"),
        (tool("read_file"), "path"),
    ],
    [
        ({"tool": "shell", "args": '["ls"]'}, "must be a JSON object, got list"),
        ({"tool": "shell", "args": "null"}, "must be a JSON object, got NoneType"),
        ({"tool": "shell", "args": '"ls"'}, "must be a JSON object, got str"),
        ({"tool": "shell", "args": '{"command": "l'}, "not valid JSON"),
        ({"tool": "shell", "args": "ls -l"}, "not valid JSON"),
    ],
    [
        (tool("read_file", path="../x"), "../x"),
        (tool("read_file", path="/etc/hostname"), "/etc/hostname: outside the workspace"),
        (tool("read_file", path="out"), "out: outside the workspace"),
        (tool("read_file", path="gone.txt"), "gone.txt: is missing"),
        (tool("read_file", path="data.bin"), "data.bin: a binary file"),
    ],
    [
        (tool("write_file", path="../x", content="x"), "../x"),
        (tool("write_file", path="a/../../x", content="x"), "a/../../x"),
        (tool("write_file", path="/etc/peri-x", content="x"), "/etc/peri-x: outside the workspace"),
        (tool("write_file", path="outdir/x", content="x"), "outdir/x: outside the workspace"),
        (tool("write_file", path="dangling", content="x"), "dangling: outside the workspace"),
    ],
    [
        (tool("write_file", path="a\0b", content="x"), "NUL"),
        (tool("write_file", path="", content="x"), "path is empty"),
        (tool("read_file", path="src"), "not a regular file but a folder"),
        (tool("write_file", path="src", content="x"), "src"),
        (tool("edit_file", path="README.md", old="A shop", new="B"), "README.md: read it first"),
    ],
    [
        (tool("read_file", path="src/cart.py"), ""),
        (tool("shell", command="touch -d 2001-01-01 src/cart.py; echo '# user' >> src/cart.py"), ""),
        (
            tool("edit_file", path="src/cart.py", old="total", new="sum_of"),
            "src/cart.py: changed since you read",
        ),
        (tool("read_file", path="/dev/zero"), "/dev/zero: outside the workspace"),
        (tool("list_files", path="README.md"), "README.md"),
    ],
]


def test_calls_that_are_wrong_are_told_to_the_model_and_change_nothing() -> None:
    replies = [{"when": "go", "steps": [{"tools": [call for call, _ in calls]}]} for calls in CALLS]
    with Scene([*replies, {"when": "go", "steps": [{"text": "that is all"}]}]) as scene:
        outside = scene.base / "secret"
        outside.mkdir()
        (outside / "s.txt").write_text("secret\n")
        (scene.workspace / "out").symlink_to(outside / "s.txt")
        (scene.workspace / "outdir").symlink_to(outside)
        (scene.workspace / "dangling").symlink_to(outside / "new.txt")
        before, kept = manifest(scene.workspace), manifest(outside)
        ran = scene.headless("-p", "please go")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "that is all\n"
        asked = scene.server.requests()
        assert scene.server.events("violation") == []
        for calls, request in zip(CALLS, asked[1:], strict=True):
            results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
            assert len(results) == len(calls)
            for (call, words), result in zip(calls, results, strict=True):
                assert words in result, (call, result)
                assert not words or (result.startswith("Error: ") and "\n" not in result), (call, result)
        after = manifest(scene.workspace)
        assert [path for path in before if after[path] != before[path]] == ["src/cart.py"]
        assert (scene.workspace / "src" / "cart.py").read_text().endswith("# user\n")
        assert set(after) == set(before)
        assert manifest(outside) == kept
        assert not Path("/etc/peri-x").exists()
        assert "\x1b" not in ran.stderr


def test_ten_thousand_calls_in_one_message_are_capped_and_each_is_answered() -> None:
    many = [{"index": n, "id": f"c{n}", "type": "function", "function": {"name": "nosuch", "arguments": "{}"}}
            for n in range(10_000)]  # fmt: skip
    flood = "".join(event({"tool_calls": many[at : at + 500]}) for at in range(0, len(many), 500))
    with Scene([{"when": "go", "steps": [{"raw": flood}, {"finish": "tool_calls"}]},
                {"when": "go", "steps": [{"text": "enough"}]}]) as scene:  # fmt: skip
        ran = scene.headless("-p", "go")
        assert scene.server.events("violation") == []
        assert ran.returncode in (0, 1)
        assert ran.stdout == "enough\n" or failed_line(ran.stderr)
        assert manifest(scene.workspace) == scene.before


# --- a disk that is full --------------------------------------------------------------------------------------------

BIG = b"0123456789abcdef\n" * 100_000


def big_edit() -> list[Any]:
    """Return replies that read a large file, replace it and make another."""
    calls = [
        tool("read_file", path="big.txt"),
        tool("write_file", path="big.txt", content="small\n"),
        tool("shell", command="touch made-by-command"),
    ]
    return [{"when": "go", "steps": [{"tools": calls}]}, {"when": "go", "steps": [{"text": "done"}]}]


def told_full(scene: Scene) -> None:
    results = [m["content"] for m in scene.server.requests()[1]["messages"] if m["role"] == "tool"]
    assert results[1].startswith("Error: ")
    assert str(scene.home) in results[1]
    assert "no space left" in results[1].lower()
    assert (scene.workspace / "big.txt").read_bytes() == BIG


def test_a_backup_larger_than_a_file_may_be_refuses_the_edit() -> None:
    with Scene(big_edit()) as scene:
        (scene.workspace / "big.txt").write_bytes(BIG)

        def bounded() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        ran = subprocess.run(
            [*PERI, *scene.options, "-p", "go"], cwd=scene.workspace, env=clean_environment(scene.home),
            capture_output=True, text=True, timeout=60, preexec_fn=bounded, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        told_full(scene)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system of memory on a folder; skips where that needs rights that we have not."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_under_the_backups_refuses_the_edit_and_the_task_goes_on() -> None:
    with Scene(big_edit()) as scene, small_disk(scene.home / "data" / "store", "512k"):
        (scene.workspace / "big.txt").write_bytes(BIG)
        ran = scene.headless("-p", "go")
        assert ran.returncode == 0, ran.stderr
        told_full(scene)


def test_a_full_disk_under_the_state_is_one_line_and_loses_nothing() -> None:
    with Scene(big_edit()) as scene, small_disk(scene.home / "data", "2m"):
        assert scene.headless("-p", "hello").returncode == 0
        with (scene.home / "data" / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(b"x" * 4096):
                pass
        ran = scene.headless("-p", "hello")
        assert "Traceback" not in ran.stderr
        assert ran.returncode != 0, ran.stderr
        assert str(scene.home / "data") in ran.stderr
        assert manifest(scene.workspace) == scene.before
        (scene.home / "data" / "filler").unlink()
        assert scene.headless("-p", "hello").returncode == 0


# --- the same on the screen -----------------------------------------------------------------------------------------


def test_a_failed_task_is_told_in_the_conversation_and_the_next_prompt_works() -> None:
    replies = [
        {"when": "1-first", "steps": [{"status": 401}]},
        {"when": "2-second", "steps": [{"text": "so far "}, {"cut": "fin"}]},
        {"when": "3-third-one", "steps": [{"invalid": True}]},
        {"when": "4-last-of-all", "steps": [{"text": "all is well"}]},
    ]
    with Scene(replies) as scene:
        terminal = scene.open()
        for prompt, words in (("1-first", "401"), ("2-second", "ended"), ("3-third-one", "JSON")):
            terminal.submit(f"{prompt} prompt")
            terminal.wait_for(words)
            terminal.send("a draft")
            terminal.wait_for("› a draft")
            terminal.send(CTRL_C)
            terminal.wait_for(lambda text: "a draft" not in text)
        terminal.submit("4-last-of-all prompt")
        terminal.wait_for("all is well")
        assert scene.server.events("violation") == []
        assert manifest(scene.workspace) == scene.before
        assert scene.quit() == 0


def test_a_screen_without_a_state_says_so_and_keeps_the_draft() -> None:
    with Scene() as scene:
        db = scene.home / "data" / "state.db"
        db.parent.mkdir(parents=True)
        db.write_bytes(b"this is not a database at all\n" * 400)
        environment = clean_environment(scene.home)
        with Terminal([*PERI, *scene.options], cwd=scene.workspace, env=environment) as terminal:
            terminal.wait_for("not a database")
            terminal.send("keep this draft")
            terminal.wait_for("keep this draft")
            terminal.send(b"\x11")
            assert terminal.wait_exit() in (0, 1)
        db.unlink()
        scene.open()
        scene.terminal.wait_for("keep this draft")
        assert scene.quit() == 0


def test_a_screen_with_wrong_settings_does_not_open() -> None:
    with Scene(config="aprove = 1\n") as scene:
        environment = clean_environment(scene.home)
        with Terminal([*PERI, *scene.options], cwd=scene.workspace, env=environment) as terminal:
            assert terminal.wait_exit() == 52
            assert "aprove: unknown key" in terminal.text.replace("\n", "")
            assert b"\x1b[?1049h" not in terminal.raw
        with Terminal([*PERI, "--theme", "none"], cwd=scene.base, env=environment) as terminal:
            assert terminal.wait_exit() == 52
