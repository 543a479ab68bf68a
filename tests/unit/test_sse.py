"""The SSE reader: every framing that the standard allows, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.models.sse import SseEvent, SseReader
from peri_tui.errors import ModelProtocolError

pytestmark = pytest.mark.unit

CORPUS = [
    ("lf", b"data: a\n\ndata: b\n\n", ["a", "b"]),
    ("cr", b"data: a\r\rdata: b\r\r", ["a", "b"]),
    ("crlf", b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    ("mixed ends", b"data: a\r\ndata: b\n\rdata: c\r\n\n", ["a\nb", "c"]),
    ("several data lines", b"data: a\ndata: b\ndata:\ndata: c\n\n", ["a\nb\n\nc"]),
    ("one optional space", b"data:a\n\ndata:  a\n\n", ["a", " a"]),
    ("colon in the value", b"data: a: b:c\n\n", ["a: b:c"]),
    ("byte order mark", b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    ("byte order mark twice", b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", ["b"]),
    ("comments", b": OPENROUTER PROCESSING\n\n:\n\ndata: a\n: x\n\n", ["a"]),
    ("unknown fields", b"foo: x\nretry: 3\ndata: a\nbar\n\n", ["a"]),
    ("no value", b"data\n\n", [""]),
    ("blank lines", b"\n\n\n\ndata: a\n\n\n\n", ["a"]),
    ("event without data", b"event: ping\n\ndata: a\n\n", ["a"]),
    ("end without blank line", b"data: a\n\ndata: b\n", ["a"]),
    ("end inside a line", b"data: a\n\ndata: b", ["a"]),
    ("line separators of Unicode", "data: a\u2028b\u2029c\x85d\x0be\x0cf\n\n".encode(), ["a\u2028b\u2029c\x85d\x0be\x0cf"]),
    ("four byte characters", "data: 🙂äö\n\n".encode(), ["🙂äö"]),
    ("not UTF-8", b"data: a\xffb\n\n", ["a\ufffdb"]),
    ("[DONE]", b'data: {"a":1}\n\ndata: [DONE]\n\n', ['{"a":1}', "[DONE]"]),
]  # fmt: skip


def read(*pieces: bytes) -> list[SseEvent]:
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@pytest.mark.parametrize(("stream", "datas"), [case[1:] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_corpus_whole_and_every_byte_its_own_piece(stream: bytes, datas: list[str]) -> None:
    assert [event.data for event in read(stream)] == datas
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == read(stream)


@pytest.mark.parametrize("stream", [case[1] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_corpus_cut_in_two_anywhere(stream: bytes) -> None:
    for cut in range(len(stream) + 1):
        assert read(stream[:cut], b"", stream[cut:]) == read(stream)


def test_event_names_and_ids() -> None:
    events = read(b"event: error\nid: 7\ndata: a\n\ndata: b\n\nid: 8\0\ndata: c\n\nid\ndata: d\n\n")
    assert events == [
        SseEvent("error", "a", "7"),
        SseEvent("message", "b", "7"),
        SseEvent("message", "c", "7"),
        SseEvent("message", "d", ""),
    ]


def test_comments_are_counted_and_are_no_events() -> None:
    reader = SseReader()
    assert list(reader.feed(b": a\n:b\n\n")) == []
    assert reader.comments == 2


def test_a_line_of_one_mebibyte_is_read() -> None:
    assert read(b"data: " + b"x" * 2**20 + b"\n\n")[0].data == "x" * 2**20


def test_a_line_that_never_ends_is_refused_without_keeping_it() -> None:
    reader = SseReader()
    with pytest.raises(ModelProtocolError, match="a line of more than 8388608 bytes"):
        for _ in range(10):
            list(reader.feed(b"x" * 2**20))


def test_an_event_that_never_ends_is_refused() -> None:
    reader = SseReader(max_line=1000)
    with pytest.raises(ModelProtocolError, match="an event of more than 1000 bytes"):
        list(reader.feed(b"data: " + b"x" * 90 + b"\n" + (b"data: " + b"x" * 90 + b"\n") * 20))


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), max_size=8
    ),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=40),
)
def test_any_data_survives_any_cutting(datas: list[str], end: bytes, sizes: list[int]) -> None:
    stream = b"".join(b"data: " + data.encode() + end * 2 for data in datas)
    pieces, position, turn = [], 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        pieces.append(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert [event.data for event in read(*pieces)] == datas
