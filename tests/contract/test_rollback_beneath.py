"""The path boundary: nothing outside the workspace is read, listed or told about."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest

from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.errors import InputError, OutsideWorkspace, ToolError

pytestmark = pytest.mark.contract


@pytest.fixture
def root(tmp_path: Path):
    (tmp_path / "ws/sub").mkdir(parents=True)
    (tmp_path / "ws/a.txt").write_bytes(b"alpha\r\n")
    (tmp_path / "ws/sub/b.txt").write_bytes(b"beta")
    (tmp_path / "ws-evil").mkdir()
    (tmp_path / "ws-evil/x").write_text("canary")
    (tmp_path / "out.txt").write_text("canary")
    with Root(tmp_path / "ws") as root:
        yield root


def test_read_returns_bytes_hash_and_stat(root: Root) -> None:
    found = root.read("a.txt", 100)
    assert found.data == b"alpha\r\n"
    assert found.sha256 == hashlib.sha256(b"alpha\r\n").hexdigest()
    assert found.key.ino == root.lstat("a.txt").st_ino


@pytest.mark.parametrize(
    "path", ["a.txt", "./a.txt", "sub//../a.txt".replace("//..", "/../sub/.."), b"a.txt"]
)
def test_names_of_the_same_file(root: Root, path: str | bytes) -> None:
    if ".." in os.fsdecode(path):
        with pytest.raises(OutsideWorkspace):
            root.read(path, 10)
    else:
        assert root.read(path, 10).data == b"alpha\r\n"


def test_absolute_inside_is_accepted(root: Root) -> None:
    assert root.read(str(root.path / "sub/b.txt"), 10).data == b"beta"
    assert root.relative(str(root.path)) == b""


@pytest.mark.parametrize(
    "path", ["../out.txt", "/etc/passwd", "sub/../../out.txt", "..", "sub/..", "/", "/proc/self/environ"]
)
def test_escape_by_name_is_refused(root: Root, path: str) -> None:
    for call in (
        lambda: root.read(path, 99),
        lambda: root.lstat(path),
        lambda: root.listdir(path),
        lambda: root.exists(path),
    ):
        with pytest.raises(OutsideWorkspace) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_sibling_with_the_same_prefix_is_outside(root: Root) -> None:
    with pytest.raises(OutsideWorkspace):
        root.read(str(root.path) + "-evil/x", 99)


@pytest.mark.parametrize("path", ["", "a\0b", b"\0"])
def test_empty_and_nul_are_refused(root: Root, path: str | bytes) -> None:
    with pytest.raises(ToolError):
        root.read(path, 99)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../out.txt", "sub/../../out.txt", "../not-there", "/dev/zero", "../ws-evil/x"]
)
def test_link_that_leaves_is_refused(root: Root, target: str) -> None:
    (root.path / "link").symlink_to(target)
    with pytest.raises(OutsideWorkspace):
        root.read("link", 99)
    with pytest.raises(OutsideWorkspace):
        root.resolve("link")
    assert root.lstat("link").st_size == len(target)


def test_linked_folder_that_leaves_is_refused(root: Root) -> None:
    (root.path / "dir").symlink_to("../ws-evil")
    for path in ("dir/x", "dir/new"):
        with pytest.raises(OutsideWorkspace):
            root.resolve(path)
    with pytest.raises(OutsideWorkspace):
        root.listdir("dir")


def test_links_inside_are_followed(root: Root) -> None:
    (root.path / "one").symlink_to("two")
    (root.path / "two").symlink_to("sub/../sub/b.txt")
    (root.path / "abs").symlink_to(root.path / "sub")
    (root.path / "dangling").symlink_to("sub/new.txt")
    assert root.read("one", 99).data == b"beta"
    assert root.read("abs/b.txt", 99).data == b"beta"
    assert root.resolve("dangling") == b"sub/new.txt"
    assert not root.exists("sub/new.txt")
    assert root.exists("dangling")


def test_loop_of_links(root: Root) -> None:
    (root.path / "x").symlink_to("y")
    (root.path / "y").symlink_to("x")
    with pytest.raises(ToolError, match="too many links"):
        root.read("x", 99)


def test_only_regular_files_are_read(root: Root) -> None:
    os.mkfifo(root.path / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(root.path / "sock"))
        for path, word in (("pipe", "fifo"), ("sub", "folder"), ("sock", "socket")):
            with pytest.raises(ToolError, match=word):
                root.read(path, 99)


def test_size_limit(root: Root) -> None:
    with (root.path / "huge").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(ToolError, match="limit of 99"):
        root.read("huge", 99)


def test_missing_is_named(root: Root) -> None:
    for path in ("gone", "gone/deeper", "a.txt/deeper"):
        with pytest.raises(ToolError, match=path):
            root.read(path, 99)
    assert not root.exists("gone/deeper")
    assert not root.exists("a.txt/deeper")


def test_listing_sorts_by_bytes_and_keeps_odd_names(root: Root) -> None:
    os.mkdir(os.fsencode(root.path) + b"/sub/n\xff")
    (root.path / "sub/a\nb").write_text("")
    assert [os.fsencode(entry.name) for entry in root.listdir("sub")] == [b"a\nb", b"b.txt", b"n\xff"]
    assert {entry.name: entry.kind for entry in root.listdir()} == {"a.txt": "file", "sub": "dir"}


def test_show_is_one_printable_line() -> None:
    assert show(b"a\nb\x1b[m\xff") == "a\\nb\\x1b[m\\udcff"


def test_workspace_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone"):
        Root(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        Root(tmp_path / "file")
