"""From bytes to keys: the Stop key is at once where it may be, and no false Stop where sequences come apart."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual._parser import Parser
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.drivers._writer_thread import WriterThread
from textual.message import Message

from peri_tui.tui import key_feed
from peri_tui.tui.key_feed import InputLexer, KeyFeed, escape_wait

pytestmark = pytest.mark.tui

PASTE = ("\x1b[200~", "\x1b[201~")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("textual._parser", "peri_tui.tui.key_feed"):
            monkeypatch.setattr(f"{module}.get_time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def keys(messages: list[Message]) -> list[str]:
    return [
        message.key if isinstance(message, events.Key) else f"paste:{message.text}"
        for message in messages
        if isinstance(message, events.Key | events.Paste)
    ]


def take(feed: KeyFeed, data: bytes | str, *, more: bool = False, running: bool = False) -> list[str]:
    raw = data.encode() if isinstance(data, str) else data
    return keys(list(feed.take(raw, more=lambda: more, running=running)))


def test_esc_alone_is_a_key_at_once_where_sequences_come_whole(clock: Clock) -> None:
    assert take(KeyFeed(0.0), "\x1b") == ["escape"]


def test_esc_with_more_to_read_waits_for_it(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    assert take(feed, "\x1b", more=True) == []
    assert take(feed, "[15~") == ["f5"]


def test_f5_in_one_write_is_f5(clock: Clock) -> None:
    assert take(KeyFeed(0.0), "\x1b[15~") == ["f5"]


def test_a_sequence_split_by_20_ms_is_whole_under_the_remote_rule(clock: Clock) -> None:
    feed = KeyFeed(0.05)
    assert take(feed, "\x1b") == []
    assert 0.049 < feed.timeout() <= 0.05
    clock.now += 0.02
    assert keys(list(feed.tick())) == []
    assert take(feed, "[15~") == ["f5"]


def test_esc_alone_under_the_remote_rule_is_a_key_after_50_ms(clock: Clock) -> None:
    feed = KeyFeed(0.05)
    assert take(feed, "\x1b") == []
    clock.now += 0.051
    assert feed.timeout() == 0
    assert keys(list(feed.tick())) == ["escape"]
    assert feed.timeout() == key_feed.IDLE_SELECT_S


def test_kitty_needs_no_wait(clock: Clock) -> None:
    assert take(KeyFeed(0.05), "\x1b[27u") == ["escape"]


def test_three_escapes_in_one_read_are_three(clock: Clock) -> None:
    assert take(KeyFeed(0.0), "\x1b\x1b\x1b") == ["escape"] * 3


def test_alt_and_a_character_is_esc_and_the_character_while_a_task_runs(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    assert take(feed, "\x1bx") == []
    clock.now += 1.0
    assert keys(list(feed.tick())) == ["alt+x"]
    assert take(KeyFeed(0.0), "\x1bx", running=True) == ["escape", "x"]
    feed = KeyFeed(0.05)
    assert take(feed, "\x1b", running=True) == []
    assert take(feed, "x", running=True) == ["escape", "x"]


def test_sequences_and_word_keys_stay_whole_while_a_task_runs(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    assert take(feed, "\x1b[A\x1bOP\x1b[1;3D", running=True) == ["up", "f1", "alt+left"]
    assert take(feed, "\x1bb\x1bf", running=True) == ["ctrl+left", "ctrl+right"]


def test_a_paste_with_esc_is_one_paste_and_no_stop(clock: Clock) -> None:
    body = "one\x1b[31mtwo\x1b\nthree\x03"
    text = PASTE[0] + body + PASTE[1] + "z"
    assert take(KeyFeed(0.0), text, running=True) == ["paste:one[31mtwo\nthree\x03", "z"]


def test_a_paste_may_be_cut_anywhere(clock: Clock) -> None:
    whole = "a" + PASTE[0] + "one\x1bx two" + PASTE[1] + "z"
    for cut in range(1, len(whole)):
        feed = KeyFeed(0.05)
        got = take(feed, whole[:cut], running=True) + take(feed, whole[cut:], running=True)
        assert got == ["a", "paste:onex two", "z"], cut


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(["\x1b[A", "x", "ü", "\x1b[15~"]),
            st.text("ab\x1b[20~1\n", max_size=12).map(lambda body: f"{PASTE[0]}{body}{PASTE[1]}"),
        ),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_however_the_input_is_cut_it_means_the_same(parts: list[str], cuts: list[int]) -> None:
    whole = "".join(parts)

    def lexed(reads: list[str]) -> str:
        lexer = InputLexer()
        return "".join(
            piece
            for read in reads
            if read
            for piece in lexer.split(read, now=0.0, running=True)
            if isinstance(piece, str)
        )

    edges = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    assert lexed([whole[a:b] for a, b in pairwise(edges)]) == lexed([whole])


def test_a_paste_that_never_ends_cannot_swallow_the_stop_key(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    assert take(feed, PASTE[0] + "text") == []
    clock.now += 1.0
    assert take(feed, "\x1b", running=True) == ["paste:text", "escape"]


def test_invalid_utf8_is_replaced_and_the_keys_after_it_arrive(clock: Clock) -> None:
    got = take(KeyFeed(0.0), b"a\xff\x9bb\xc3")
    assert (got[0], got[-1]) == ("a", "b")


def test_a_character_split_between_reads_is_whole(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    raw = "ü".encode()
    assert take(feed, raw[:1]) == []
    assert len(take(feed, raw[1:])) == 1


def test_a_report_out_of_range_does_not_end_the_input(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    take(feed, "\x1b[97;1;99999999999u")
    assert feed.restarts == 1
    assert take(feed, "\x1b") == ["escape"]


@pytest.mark.parametrize(
    ("environ", "wait"),
    [
        ({}, 0.0),
        ({"SSH_CONNECTION": "1.2.3.4"}, 0.05),
        ({"SSH_TTY": "/dev/pts/1", "TMUX": "/tmp/tmux"}, 0.0),
        ({"SSH_TTY": "/dev/pts/1", "STY": "1.pts"}, 0.0),
        ({"MOSH_IP": "1.2.3.4"}, 0.05),
        ({"SSH_TTY": "/dev/pts/1", "ESCDELAY": "7"}, 0.007),
        ({"ESCDELAY": "100"}, 0.1),
        ({"ESCDELAY": "soon"}, 0.0),
    ],
)
def test_how_long_to_wait(environ: dict[str, str], wait: float) -> None:
    assert escape_wait(environ, lambda: False) == wait


def test_a_terminal_carried_into_a_container_waits() -> None:
    assert escape_wait({}, lambda: True) == 0.05
    assert escape_wait({"TMUX": "x"}, lambda: True) == 0.0


def test_the_private_names_are_there() -> None:
    parser = XTermParser()
    assert parser._timeout_time is None
    list(parser.feed("\x1b"))
    assert isinstance(parser._timeout_time, float), "Parser._timeout_time is our select's deadline"
    assert "self._timeout_time" in inspect.getsource(Parser.tick)
    assert "self._queue" in inspect.getsource(WriterThread.write)
    source = inspect.getsource(linux_driver.LinuxDriver)
    for name in (
        "_writer_thread",
        "exit_event",
        "run_input_thread",
        "process_message",
        "self.fileno",
        "_get_terminal_size",
        "_in_band_window_resize",
    ):
        assert name in source, f"textual's LinuxDriver no longer has {name}"


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "report",
    ["\x1b]11;rgb:ffff/ffff/ffff\x1b\\", "\x1b]4;1;red\x07", "\x1bP>|tmux 3.3a\x1b\\", "\x1b_Gi=1;OK\x1b\\"],
)
def test_an_answer_that_nobody_asked_for_is_no_stop_and_no_text(report: str, running: bool) -> None:
    assert take(KeyFeed(0.0), f"a{report}b", running=running) == ["a", "b"]


def test_esc_before_a_bracket_is_still_a_stop(clock: Clock) -> None:
    feed = KeyFeed(0.0)
    assert "escape" in take(feed, "\x1b", running=True)
    assert take(feed, "]11;x", running=True) == ["right_square_bracket", "1", "1", "semicolon", "x"]
