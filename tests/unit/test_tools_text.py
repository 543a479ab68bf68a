"""An edit changes the bytes of its span and no other: encodings, line ends, marks."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.tools.text_file import TextFile, decode, replace, unify
from peri_tui.errors import ToolError

pytestmark = pytest.mark.unit


def edit(data: bytes, old: str, new: str, *, every: bool = False) -> bytes:
    return replace(decode(data, "f"), old, new, every=every, path="f")


SPANS: list[tuple[str, bytes, str, str, bytes]] = [
    ("crlf", b"a\r\nb\r\nc\r\n", "b", "B", b"a\r\nB\r\nc\r\n"),
    ("crlf over lines", b"a\r\nb\r\nc\r\n", "a\nb\nc", "a\nX\nY\nc", b"a\r\nX\r\nY\r\nc\r\n"),
    ("cr", b"a\rb\rc", "b\nc", "b\nd\ne", b"a\rb\rd\re"),
    ("mixed keeps neighbours", b"a\r\nb\nc\r\n", "a\nb\nc", "a\nB\nc", b"a\r\nB\nc\r\n"),
    ("no final newline", b"a\nb", "b", "c", b"a\nc"),
    ("adds final newline", b"a\nb", "b", "b\n", b"a\nb\n"),
    ("utf-8 mark", codecs.BOM_UTF8 + "é\n".encode(), "é", "è", codecs.BOM_UTF8 + "è\n".encode()),
    (
        "utf-16",
        codecs.BOM_UTF16_LE + "a\r\n€\r\n".encode("utf-16-le"),
        "€",
        "$\n€",
        codecs.BOM_UTF16_LE + "a\r\n$\r\n€\r\n".encode("utf-16-le"),
    ),
    (
        "utf-16 big",
        codecs.BOM_UTF16_BE + "ab".encode("utf-16-be"),
        "b",
        "c",
        codecs.BOM_UTF16_BE + "ac".encode("utf-16-be"),
    ),
    ("latin-1", b"caf\xe9\r\nx\r\n", "x", "\xfc", b"caf\xe9\r\n\xfc\r\n"),
    ("form feed and U+2028 stay", "a\x0c\u2028b\n".encode(), "b", "c", "a\x0c\u2028c\n".encode()),
    ("crlf written by the model", b"a\nb\n", "a\r\nb", "a\r\nc", b"a\nc\n"),
    ("one line becomes two", b"x\r\n", "x", "x\ny", b"x\r\ny\r\n"),
    ("deletes a line", b"a\r\nb\r\nc\r\n", "b\n", "", b"a\r\nc\r\n"),
]


@pytest.mark.parametrize(
    ("data", "old", "new", "wanted"), [row[1:] for row in SPANS], ids=[row[0] for row in SPANS]
)
def test_only_the_span_differs(data: bytes, old: str, new: str, wanted: bytes) -> None:
    assert edit(data, old, new) == wanted


@given(
    st.lists(st.tuples(st.text("abé ", max_size=4), st.sampled_from(["\r\n", "\n", "\r"])), max_size=6),
    st.sampled_from(["utf-8", "latin-1", "utf-16-le"]),
)
def test_bytes_before_and_after_the_span_are_the_same(lines: list[tuple[str, str]], encoding: str) -> None:
    mark = codecs.BOM_UTF16_LE if encoding == "utf-16-le" else b""
    text = "".join(line + end for line, end in lines)
    # A byte that is no UTF-8 makes it Latin-1 whatever else it holds.
    text = f"\xfe{text}" if encoding == "latin-1" else text
    before, after = text + "<", ">" + text
    data = mark + (before + "MARK" + after).encode(encoding)
    changed = edit(data, "MARK", "one\ntwo")
    assert changed.startswith(mark + before.encode(encoding))
    assert changed.endswith(after.encode(encoding))


@given(st.binary(max_size=200))
def test_what_counts_as_text_encodes_back_to_its_bytes(data: bytes) -> None:
    try:
        file = decode(data, "f")
    except ToolError:
        return
    assert file.encode(file.text) == data


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01",
        b"\x89PNG\r\n\x1a\n\x00",
        b"\xff\xfe\x00\xd8",
        b"a\x00b",
        b"\xff\x01\x02",
    ],
)
def test_binary_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ToolError, match=r"^some\.bin: .*binary"):
        decode(data, "some.bin")


def test_every_occurrence_or_exactly_one() -> None:
    assert edit(b"a b a\r\n", "a", "c", every=True) == b"c b c\r\n"
    with pytest.raises(ToolError, match="found 2 times"):
        edit(b"a b a\r\n", "a", "c")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "x", "'old' is empty"),
        ("zzz", "x", "not found"),
        ("a", "a", "nothing to change"),
        ("a   b", "x", "white space differs"),
    ],
)
def test_a_replacement_that_cannot_be_done_says_why(old: str, new: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        edit(b"a b\n", old, new)


def test_a_character_that_the_encoding_lacks_is_refused() -> None:
    with pytest.raises(ToolError, match="latin-1, which cannot hold '€'"):
        edit(b"caf\xe9", "caf", "€")
    with pytest.raises(ToolError, match="utf-8, which cannot hold"):
        edit(b"cafe", "caf", "\ud800")


def test_line_ends_of_a_file() -> None:
    assert TextFile("a\r\nb\r\n").line_end == "\r\n"
    assert TextFile("a\r\nb\n").line_end == ""
    assert TextFile("a").line_end == ""
    assert unify("a\r\nb\rc\n") == "a\nb\nc\n"
