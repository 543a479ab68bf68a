from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core import messages as m

pytestmark = pytest.mark.unit

# Text as it may enter a message: no lone surrogate, everything else, NUL too.
TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def messages_of(kind: type[m.Message]) -> st.SearchStrategy[Any]:
    """Build messages of one type with every field drawn."""
    return st.builds(kind, **{f.name: field_values(f.type) for f in msgspec.structs.fields(kind)})


def field_values(kind: Any) -> st.SearchStrategy[Any]:
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXT,
        m.Int64: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        list[str]: st.lists(TEXT, max_size=3),
        list[m.Int64]: st.lists(st.integers(0, 9), max_size=3),
        dict[str, m.Int64]: st.dictionaries(TEXT, st.integers(0, 9), max_size=3),
        dict[str, Any]: st.dictionaries(TEXT, JSON, max_size=3),
    }
    if kind in known:
        return known[kind]
    if getattr(kind, "__origin__", None) is list:
        return st.lists(messages_of(get_args(kind)[0]), max_size=2)
    return messages_of(kind)


REQUESTS = get_args(m.Request)
REPLIES = get_args(m.Reply)
EVENTS = get_args(m.TaskEvent)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_requests_come_back_as_they_went(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    assert m.decode_request(m.encode(message)) == message


@pytest.mark.parametrize("kind", [*REPLIES, *EVENTS], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_replies_and_events_come_back_as_they_went(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    assert m.decode_from_agent(m.encode(message)) == message
    if kind in EVENTS:
        assert m.decode_event(m.encode(message)) == message


def test_every_message_is_told_apart_by_its_own_word() -> None:
    kinds = {*REQUESTS, *REPLIES, *EVENTS}
    words = {kind.__struct_config__.tag for kind in kinds}
    assert len(words) == len(kinds)
    assert all(kind.__struct_config__.tag_field == "t" for kind in kinds)


def test_a_frame_as_it_looks_on_the_wire() -> None:
    frame = m.encode(m.Cancel(id="1", task="2", t_ui=5))
    assert json.loads(frame) == {"t": "cancel", "id": "1", "task": "2", "t_ui": 5}


@given(JSON)
def test_any_json_is_a_message_or_malformed(value: Any) -> None:
    _decode_all(json.dumps(value))


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_a_message_or_malformed(frame: bytes | str) -> None:
    _decode_all(frame)


@given(
    st.sampled_from(sorted(kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES, *EVENTS))), st.data()
)
def test_a_known_word_with_any_fields_is_a_message_or_malformed(word: str, data: st.DataObject) -> None:
    fields = data.draw(
        st.dictionaries(st.sampled_from(["id", "task", "seq", "re", "state", "n", "proto", "text"]), JSON)
    )
    _decode_all(json.dumps({"t": word} | fields))


def _decode_all(frame: bytes | str) -> None:
    for decode in (m.decode_request, m.decode_from_agent, m.decode_event):
        try:
            assert isinstance(decode(frame), m.Message)
        except m.MalformedFrame:
            continue


@pytest.mark.parametrize(
    "frame",
    ["", "{", "[]", "null", "NaN", '{"t":"hb","mono":1e999}', '{"t":"hb","mono":NaN}', "[" * 100_000,
     '{"t":' * 50_000, b"\xff\xfe", b'{"t":"hb","mono":"\xed\xa0\x80"}', '{"t":"hb"}{"t":"hb"}', '{"t":"cancel"}',
     '{"t":"credit","n":"3"}', '{"t":"credit","n":' + "9" * 100 + "}", '{"id":"1"}', '{"t":7}'],
)  # fmt: skip
def test_bad_frames_are_malformed_and_not_unknown(frame: bytes | str) -> None:
    with pytest.raises(m.MalformedFrame) as caught:
        m.decode_request(frame)
    assert not caught.value.unknown
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decode", [m.decode_request, m.decode_from_agent, m.decode_event])
def test_a_newer_peers_word_is_unknown(decode: Any) -> None:
    with pytest.raises(m.MalformedFrame) as caught:
        decode('{"t":"telepathy","id":"1"}')
    assert caught.value.unknown


def test_a_bad_value_that_speaks_of_the_tag_is_not_unknown() -> None:
    with pytest.raises(m.MalformedFrame) as caught:
        m.decode_request('{"t":"cancel","id":"Invalid value `$.t`","task":5}')
    assert not caught.value.unknown


def test_unknown_fields_are_ignored() -> None:
    assert m.decode_request('{"t":"credit","n":3,"bytes":9}') == m.Credit(n=3)


def test_a_request_is_no_event() -> None:
    with pytest.raises(m.MalformedFrame):
        m.decode_event(m.encode(m.Credit(n=1)))
    with pytest.raises(m.MalformedFrame):
        m.decode_request(m.encode(m.Ok(re="1")))


def test_defaults_are_not_shared_between_messages() -> None:
    one, two = m.TaskEnded(task="1", state="failed"), m.TaskEnded(task="2", state="failed")
    one.files.restored.append("a")
    one.residue.append("b")
    assert two.files.restored == []
    assert two.residue == []


@given(st.text(st.characters(codec=None), max_size=50))
def test_scrubbed_text_can_be_sent(text: str) -> None:
    scrubbed = m.scrub(text)
    assert m.decode_event(m.encode(m.Delta(task="1", ch="text", part="p", text=scrubbed))).text == scrubbed  # type: ignore[union-attr]
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert scrubbed == text


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\U0001f600", "\U0001f600"),
        ("", ""),
    ],
)
def test_lone_surrogates_are_replaced(text: str, scrubbed: str) -> None:
    assert m.scrub(text) == scrubbed


def test_what_was_not_scrubbed_is_refused_here_and_not_on_the_socket() -> None:
    with pytest.raises(UnicodeEncodeError):
        m.encode(m.Delta(task="1", ch="text", part="p", text="\ud800"))
