"""The tools over a real folder: what they read and change, and the one line they give for what they cannot."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.tools.contract import ToolResult, settled
from peri_tui.agent.tools.list_files import MAX_LISTED
from peri_tui.agent.tools.registry import default_tools
from peri_tui.agent.tools.walk import Glob, Walk, is_harmless
from peri_tui.core.messages import FileChanged as FileChangedEvent
from peri_tui.errors import FileChanged, OutsideWorkspace, ToolError
from tests.doubles.body import Body

pytestmark = pytest.mark.unit


@pytest.fixture
async def body(tmp_path: Path) -> AsyncIterator[Body]:
    (tmp_path / "ws").mkdir()
    made = Body(tmp_path / "ws")
    yield made
    made.close()


async def call(body: Body, name: str, seen: dict[str, str] | None = None, /, **args: Any) -> ToolResult:
    tool = default_tools().find(name)
    return await tool.run(tool.decode(json.dumps(args)), body.tool_context(seen=seen))


def put(body: Body, path: str, data: bytes | str = "x\n") -> Path:
    target = body.workspace / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data if isinstance(data, bytes) else data.encode())
    return target


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("", "missing required field `path`"),
        ("[1]", "must be a JSON object, got list"),
        ('"text"', "must be a JSON object, got str"),
        ("null", "must be a JSON object, got NoneType"),
        ('{"path": 5}', "Expected `str`, got `int` - at `$.path`"),
        ('{"path": "a", "offset": "x"}', "Expected `int`, got `str` - at `$.offset`"),
        ('{"path": "a', "not valid JSON"),
        ('{"path": "\ud800"}', "not valid JSON"),
    ],
)
def test_wrong_arguments_name_tool_and_field(raw: str, words: str) -> None:
    with pytest.raises(ToolError) as caught:
        default_tools().find("read_file").decode(raw)
    assert str(caught.value).startswith("read_file: ")
    assert words in str(caught.value)


def test_a_number_as_text_and_unknown_fields_are_taken() -> None:
    args = default_tools().find("read_file").decode('{"path": "a", "offset": "3", "why": "because"}')
    assert args.offset == 3


@pytest.mark.parametrize("name", ["approve", "set_policy", "../x", "\x1b[2J", ""])
def test_an_unknown_tool_is_an_error_that_names_the_known(name: str) -> None:
    with pytest.raises(ToolError, match=r"unknown tool .*read_file") as caught:
        default_tools().find(name)
    assert "\x1b" not in str(caught.value)


def test_schemas_are_flat_objects() -> None:
    for schema in default_tools().schemas():
        parameters = schema["function"]["parameters"]
        assert parameters["type"] == "object"
        assert "$ref" not in json.dumps(schema)
        assert schema["function"]["description"]


# --- paths (T37, T39) -----------------------------------------------------------------------------------------------

OUTSIDE = ["../x", "/etc/passwd", "a/../../x", "../ws-evil/x", "link_file", "link_dir/x", "dangling"]


@pytest.mark.parametrize("path", [*OUTSIDE, "a\0b", ""])
@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file"])
async def test_paths_outside_are_refused_and_nothing_outside_changes(
    body: Body, name: str, path: str
) -> None:
    outside = body.workspace.parent
    (outside / "ws-evil").mkdir()
    (outside / "ws-evil" / "x").write_text("secret")
    (outside / "x").write_text("secret")
    (body.workspace / "link_file").symlink_to(outside / "x")
    (body.workspace / "link_dir").symlink_to(outside / "ws-evil")
    (body.workspace / "dangling").symlink_to(outside / "new")
    args = {"path": path, "content": "evil", "old": "secret", "new": "evil"}
    with pytest.raises(ToolError) as caught:
        await call(body, name, {path: ""}, **args)
    assert "\0" not in str(caught.value)
    assert isinstance(caught.value, OutsideWorkspace) or path in ("a\0b", "")
    assert (outside / "x").read_text() == "secret"
    assert (outside / "ws-evil" / "x").read_text() == "secret"
    assert not (outside / "new").exists()
    assert body.files.edits == []


async def test_what_is_no_regular_file_is_refused_at_once(body: Body) -> None:
    os.mkfifo(body.workspace / "pipe")
    (body.workspace / "folder").mkdir()
    with open(body.workspace / "huge", "wb") as huge:
        huge.truncate(5 << 30)
    began = time.monotonic()
    for path, words in (("pipe", "fifo"), ("folder", "folder"), ("huge", "limit"), ("none", "missing")):
        with pytest.raises(ToolError, match=words):
            await call(body, "read_file", path=path)
    assert time.monotonic() - began < 1


# --- read_file ------------------------------------------------------------------------------------------------------


async def test_read_gives_lines_a_header_and_remembers_the_hash(body: Body) -> None:
    data = "".join(f"line {n}\n" for n in range(1, 11)).encode()
    put(body, "a.txt", data)
    seen: dict[str, str] = {}
    result = await call(body, "read_file", seen, path="a.txt", offset=3, limit=2)
    assert result.text == "[a.txt: lines 3-4 of 10; go on with offset=5]\nline 3\nline 4"
    assert seen == {"a.txt": hashlib.sha256(data).hexdigest()}
    with pytest.raises(ToolError, match="has 10 lines, so there is no line 11"):
        await call(body, "read_file", path="a.txt", offset=11)


async def test_read_says_encoding_and_line_ends(body: Body) -> None:
    put(body, "a.txt", b"caf\xe9\r\n")
    assert "latin-1, CRLF, kept by edits" in (await call(body, "read_file", path="a.txt")).text
    put(body, "empty", b"")
    assert "empty file" in (await call(body, "read_file", path="empty")).text


async def test_read_is_bounded(body: Body) -> None:
    put(body, "wide", "x" * 100_000)
    result = await call(body, "read_file", path="wide")
    assert len(result.text) < 41_000
    assert "60000 more characters" in result.text
    put(body, "long", "0123456789\n" * 10_000)
    result = await call(body, "read_file", path="long", limit=100_000)
    assert len(result.text) < 41_000
    assert "go on with offset=" in result.text


async def test_read_refuses_binary(body: Body) -> None:
    put(body, "b", b"\0\1\2")
    with pytest.raises(ToolError, match=r"^b: a binary file"):
        await call(body, "read_file", path="b")


# --- list_files and search ------------------------------------------------------------------------------------------


def _tree(body: Body) -> None:
    for path in (
        "a.py",
        "src/b.py",
        "src/c.js",
        "build/out.py",
        "src/gen/d.py",
        "src/gen/keep.py",
        ".git/config",
    ):
        put(body, path, "needle\n")
    put(body, ".gitignore", "build/\n*.log\n")
    put(body, "src/.gitignore", "gen/*\n!gen/keep.py\n")
    put(body, "x.log")
    (body.workspace / "loop").symlink_to(body.workspace)


async def test_list_obeys_ignore_files_and_follows_no_link(body: Body) -> None:
    _tree(body)
    listed = (await call(body, "list_files")).text.split("\n")
    assert listed == [".gitignore", "a.py", "src/.gitignore", "src/b.py", "src/c.js", "src/gen/keep.py"]
    assert (await call(body, "list_files", path="src", glob="*.py")).text.split("\n") == [
        "src/b.py",
        "src/gen/keep.py",
    ]
    assert (await call(body, "list_files", glob="*.zig")).text == "no files"
    with pytest.raises(ToolError, match="missing"):
        await call(body, "list_files", path="nowhere")


async def test_list_is_bounded_and_shows_odd_names(body: Body) -> None:
    for n in range(MAX_LISTED + 5):
        put(body, f"f{n:05}")
    put(body, "a\x1b[31m\nb")
    result = await call(body, "list_files")
    assert "\x1b" not in result.text
    assert f"only the first {MAX_LISTED}" in result.text
    assert len(result.text.split("\n")) == MAX_LISTED + 1


async def test_search_finds_text_by_path_and_line(body: Body) -> None:
    _tree(body)
    put(body, "two.py", "a needle\r\nnone\r\nneedle(\r\n")
    put(body, "bin", b"needle\0")
    result = await call(body, "search", pattern="needle", glob="*.py")
    assert result.text.split("\n") == [
        "a.py:1: needle",
        "src/b.py:1: needle",
        "src/gen/keep.py:1: needle",
        "two.py:1: a needle",
        "two.py:3: needle(",
    ]
    assert (await call(body, "search", pattern="needle(")).text == "two.py:3: needle("
    assert (await call(body, "search", pattern="haystack")).text == "no hits"


async def test_search_is_bounded_and_neutral(body: Body) -> None:
    put(body, "many", "needle \x1b[31m\n" * 1000)
    text = (await call(body, "search", pattern="needle")).text
    assert "\x1b" not in text
    assert len(text.split("\n")) == 201
    with pytest.raises(ToolError, match="pattern"):
        await call(body, "search", pattern="")


async def test_a_stop_ends_a_walk_between_files(body: Body) -> None:
    for n in range(300):
        put(body, f"f{n}", "needle\n")
    body.stop()
    assert (await call(body, "search", pattern="needle")).text == "[stopped]"


def test_a_walk_ends_in_bounded_time_and_says_so(body: Body) -> None:
    for n in range(300):
        put(body, f"d{n % 3}/f{n}")
    ticks = iter(range(0, 10_000, 20))
    walk = Walk(body.root, "", lambda: False, clock=lambda: float(next(ticks)))
    assert 0 < len(list(walk)) < 300
    assert walk.cut == "ended after 30 s"


def test_patterns_that_could_hang_are_refused() -> None:
    assert is_harmless("src/**/*.py")
    assert not is_harmless("*a*a*a*a*b")
    assert not is_harmless("x" * 1000)
    with pytest.raises(ToolError, match="too many"):
        Glob("*a*a*a*a*b")
    assert Glob("").matches("anything")
    assert Glob("[").matches("x") in (True, False)  # odd, but no crash


# --- edit_file and write_file ---------------------------------------------------------------------------------------


async def test_an_edit_needs_a_read_of_these_very_bytes(body: Body) -> None:
    put(body, "a.py", "one\ntwo\n")
    seen: dict[str, str] = {}
    with pytest.raises(ToolError, match=r"^a\.py: read it first"):
        await call(body, "edit_file", seen, path="a.py", old="one", new="1")
    await call(body, "read_file", seen, path="a.py")
    result = await call(body, "edit_file", seen, path="a.py", old="one", new="1")
    assert result.summary == "−1 +1"
    assert "-one" in result.diff
    await call(body, "edit_file", seen, path="a.py", old="two", new="2")  # its own edit counts as read
    put(body, "a.py", "user was here\n")
    with pytest.raises(FileChanged, match="changed since you read it"):
        await call(body, "edit_file", seen, path="a.py", old="user", new="me")
    assert (body.workspace / "a.py").read_text() == "user was here\n"


async def test_an_edit_keeps_every_other_byte(body: Body) -> None:
    data = "\ufeffeins\r\nzwei\nca\u0301fe\r\nvier".encode()
    put(body, "f", data)
    seen: dict[str, str] = {}
    await call(body, "read_file", seen, path="f")
    await call(body, "edit_file", seen, path="f", old="zwei", new="2\n3")
    assert (body.workspace / "f").read_bytes() == data.replace(b"zwei", b"2\r\n3")
    (event,) = body.of(FileChangedEvent)
    assert (event.path, event.kind, event.by) == ("f", "modified", "edit")


async def test_a_link_inside_counts_as_its_target(body: Body) -> None:
    put(body, "real.py", "one\n")
    (body.workspace / "alias.py").symlink_to("real.py")
    seen: dict[str, str] = {}
    await call(body, "read_file", seen, path="alias.py")
    assert list(seen) == ["real.py"]
    await call(body, "edit_file", seen, path="real.py", old="one", new="1")
    assert (body.workspace / "real.py").read_text() == "1\n"


async def test_write_makes_a_file_that_may_be_edited_then(body: Body) -> None:
    seen: dict[str, str] = {}
    result = await call(body, "write_file", seen, path="new/a.py", content="one\n")
    assert result.summary == "+1"
    await call(body, "edit_file", seen, path="new/a.py", old="one", new="two")
    assert (body.workspace / "new/a.py").read_text() == "two\n"


async def test_write_over_an_unread_file_is_refused(body: Body) -> None:
    put(body, "a.py", "precious\n")
    with pytest.raises(ToolError, match="exists already; read it first"):
        await call(body, "write_file", path="a.py", content="gone")
    assert (body.workspace / "a.py").read_text() == "precious\n"


async def test_write_over_a_read_file_keeps_its_line_ends_and_mark(body: Body) -> None:
    put(body, "a", b"\xef\xbb\xbfone\r\ntwo\r\n")
    seen: dict[str, str] = {}
    await call(body, "read_file", seen, path="a")
    await call(body, "write_file", seen, path="a", content="1\n2\n")
    assert (body.workspace / "a").read_bytes() == b"\xef\xbb\xbf1\r\n2\r\n"
    with pytest.raises(ToolError, match="has this content already"):
        await call(body, "write_file", seen, path="a", content="1\n2\n")


async def test_the_preview_warns_of_other_names(body: Body) -> None:
    put(body, "a", "one\n")
    os.link(body.workspace / "a", body.workspace.parent / "outside")
    seen: dict[str, str] = {}
    await call(body, "read_file", seen, path="a")
    tool = default_tools().find("edit_file")
    args = tool.decode('{"path": "a", "old": "one", "new": "two"}')
    preview = await tool.preview(args, body.tool_context(seen=seen))
    assert "2 names (hard links)" in preview.danger
    assert preview.targets == {"a": hashlib.sha256(b"one\n").hexdigest()}
    assert (body.workspace / "a").read_text() == "one\n"


@pytest.mark.parametrize(
    ("command", "words"), [("  ", "empty"), ("a\0b", "NUL"), ("x" * 30_000, "more than")]
)
async def test_a_command_that_cannot_be_one_is_refused(body: Body, command: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        await call(body, "shell", command=command)
    assert body.processes.asked == []


async def test_thread_work_is_awaited_to_its_end_before_a_cancel_goes_on() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(settled(work))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiter.done()
    work.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await waiter
