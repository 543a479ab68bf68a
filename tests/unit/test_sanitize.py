from __future__ import annotations

import unicodedata
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.sanitize import cells, clean, count_hidden, one_line, reveal

pytestmark = pytest.mark.unit

ANY = st.characters(codec=None) | st.sampled_from(
    "\x00\x07\x1b\r\n\t\x7f\x85\x9b\x9d\u00ad\u061c\u200b\u200c\u200d\u200e\u2028\u2029\u202e\u2066\u0301\u0308\ufe0f"
    "\ufeff\ufffe\ud800\udfff👩💻🏽क\U000e0041\U000e0100\U0010ffff<>[a "
)
TEXT = st.text(ANY, max_size=40)
NEIGHBOURLESS = st.text(
    ANY.filter(lambda c: c not in "\r\u200c\u200d" and unicodedata.category(c) not in ("Mn", "Me")),
    max_size=40,
)

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
ZERO_WIDTH = "\u200b\u2060\u2061\u2062\u2063\u2064\ufeff\u180e\u00ad"
OTHERS = "\ufff9\ufffa\ufffb\U000e0001\U000e0020\U000e007f\U000e0100\U000e01ef\u3164\uffa0\u115f"


def is_safe(text: str) -> bool:
    text.encode()
    return not any(
        (ord(char) < 0x20 and char not in "\t\n") or 0x7F <= ord(char) < 0xA0 or char in "\u2028\u2029"
        for char in text
    )


@given(TEXT)
def test_no_control_character_is_left(text: str) -> None:
    assert is_safe(clean(text))
    assert is_safe(reveal(text))
    assert is_safe(one_line(text, 30))
    assert "\n" not in one_line(text, 30)


@given(TEXT)
def test_a_second_pass_changes_nothing(text: str) -> None:
    assert clean(clean(text)) == clean(text)
    assert reveal(reveal(text)) == reveal(text)


@given(TEXT, TEXT)
def test_pieces_of_a_stream_are_as_safe_as_the_whole(one: str, two: str) -> None:
    assert is_safe(clean(one) + clean(two))


@given(NEIGHBOURLESS, NEIGHBOURLESS)
def test_without_neighbour_rules_the_cut_does_not_show(one: str, two: str) -> None:
    assert clean(one + two) == clean(one) + clean(two)
    assert reveal(one + two) == reveal(one) + reveal(two)
    assert count_hidden(one + two) == count_hidden(one) + count_hidden(two)


@given(
    st.text(
        st.characters(
            codec="utf-8", exclude_categories=["Cc", "Cf", "Cn", "Co", "Mn", "Me", "Zl", "Zp", "Lo"]
        )
    )
)
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert clean(text) == text == reveal(text)
    assert count_hidden(text) == 0


@given(TEXT)
def test_revealing_hides_nothing(text: str) -> None:
    assert count_hidden(reveal(text)) == 0
    assert len(reveal(text)) >= len(text)


@pytest.mark.parametrize("code", [c for c in range(0x20) if c not in (9, 10)])
def test_c0_becomes_its_picture(code: int) -> None:
    assert clean(f"a{chr(code)}b") == f"a{chr(0x2400 + code)}b"
    assert reveal(f"ä{chr(code)}b") == f"ä{chr(0x2400 + code)}b"


@pytest.mark.parametrize("code", [c for c in range(0x80, 0xA0) if c != 0x85])
def test_c1_becomes_a_number(code: int) -> None:
    assert clean(f"a{chr(code)}b") == reveal(f"a{chr(code)}b") == f"a<{code:02X}>b"


@pytest.mark.parametrize(
    ("text", "prose", "shown"),
    [
        ("\x7f", "␡", "␡"),
        ("a\tb\n", "a\tb\n", "a\tb\n"),
        ("a\r\nb\rc", "a\nb␍c", "a␍\nb␍c"),
        ("ä\r\nb", "ä\nb", "ä␍\nb"),
        ("a\u2028b\u2029c\x85d", "a\nb\nc\nd", "a<U+2028>b<U+2029>c<85>d"),
        ("a\ud800b\udfffc", "a\ufffdb\ufffdc", "a\ufffdb\ufffdc"),
        ("\ufffe\uffff\ufdd0\ufdef\U0001fffe\U0010ffff", "\ufffd" * 6, "\ufffd" * 6),
        ("rm \u202egpj.exe", "rm gpj.exe", "rm <U+202E>gpj.exe"),
        ("a\U000e0041b", "ab", "a<U+E0041>b"),
        ("❤\ufe0f", "❤\ufe0f", "❤\ufe0f"),
        ("👩\u200d💻", "👩\u200d💻", "👩\u200d💻"),
        ("👩🏽\u200d💻", "👩🏽\u200d💻", "👩🏽\u200d💻"),
        ("🏳\ufe0f\u200d🌈", "🏳\ufe0f\u200d🌈", "🏳\ufe0f\u200d🌈"),
        ("क्\u200dष", "क्\u200dष", "क्\u200dष"),
        ("می\u200cخواهم", "می\u200cخواهم", "می\u200cخواهم"),
        ("a\u200db", "ab", "a<U+200D>b"),
        ("👩\u200d\u200d💻", "👩💻", "👩<U+200D><U+200D>💻"),
        ("👩\u200d", "👩", "👩<U+200D>"),
        ("\u200d👩", "👩", "<U+200D>👩"),
        ("👩\u200d\u200b💻", "👩\u200d💻", "👩<U+200D><U+200B>💻"),
        ("e" + "\u0301" * 8, "e" + "\u0301" * 8, "e" + "\u0301" * 8),
        ("e" + "\u0301" * 10, "e" + "\u0301" * 8, "e" + "\u0301" * 8 + "<U+0301>" * 2),
        ("\x1b]52;c;QUJD\x07", "␛]52;c;QUJD␇", "␛]52;c;QUJD␇"),
        ("[/] [red]x[/red]", "[/] [red]x[/red]", "[/] [red]x[/red]"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_known_texts(text: str, prose: str, shown: str) -> None:
    assert clean(text) == prose
    assert reveal(text) == shown


@pytest.mark.parametrize("char", BIDI + ZERO_WIDTH + OTHERS, ids=lambda c: f"U+{ord(c):04X}")
def test_hidden_code_points_are_dropped_counted_or_shown(char: str) -> None:
    assert clean(f"a{char}b") == "ab"
    assert count_hidden(f"a{char}b") == 1
    assert reveal(f"a{char}b") == f"a<U+{ord(char):04X}>b"


def test_what_is_dropped_is_counted() -> None:
    assert count_hidden("plain") == 0
    assert count_hidden("plain, aber nicht ASCII: ä") == 0
    assert count_hidden("a\u200b\u202eb\u200dc" + "\u0301" * 11) == 6
    assert count_hidden("\x1b[0m\r\n\x9b") == 0


def test_marks_beyond_the_limit_in_a_row_of_emoji_and_cjk_are_told_from_letters() -> None:
    assert clean("👩" * 30) == "👩" * 30
    assert clean("漢" * 30) == "漢" * 30


# --- one line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [
        ("ls -la", 10, "ls -la"),
        ("ls -la", 6, "ls -la"),
        ("a\nb\tc", 10, "a␊b␉c"),
        ("0123456789", 9, "01234… +5"),
        ("漢字漢字漢字", 9, "漢字… +4"),
        ("漢字漢字漢字", 12, "漢字漢字漢字"),
        ("x" * 300, 12, "xxxxxx… +294"),
        ("x" * 300, 6, "… +300"),
        ("x" * 300, 5, "…"),
        ("x" * 300, 1, "…"),
        ("x" * 300, 0, ""),
        ("x" * 300, -3, ""),
        ("", 5, ""),
        ("e\u0301e\u0301", 2, "e\u0301e\u0301"),
    ],
)
def test_lines(text: str, width: int, line: str) -> None:
    assert one_line(text, width) == line


@given(TEXT, st.integers(1, 60))
def test_a_line_fits_and_says_what_it_leaves_out(text: str, width: int) -> None:
    line = one_line(text, width)
    whole = one_line(text, 10**6)
    assert cells(line) <= width
    if line != whole:
        kept, _, left = line.rpartition("…")
        assert whole.startswith(kept)
        assert left == "" or int(left.removeprefix(" +")) == len(whole) - len(kept)


def test_cells() -> None:
    assert [cells(text) for text in ("", "ab", "漢", "é", "e\u0301", "👩", "日本a")] == [0, 2, 2, 1, 1, 2, 5]


# --- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "piece",
    ["plain text\n", "naïve café – ", "漢字かな", "👩 👨 ", "e" + "\u0301" * 5, "\u200d" * 9, "👩\u200d"],
)
def test_cost_grows_with_the_length_only(piece: str) -> None:
    clean("ä")

    def cost(length: int) -> float:
        text = piece * (length // len(piece))
        best = 9.0
        for _ in range(5):
            start = perf_counter()
            clean(text)
            reveal(text)
            count_hidden(text)
            best = min(best, perf_counter() - start)
        return best

    # Same run, same machine: sixteen times the text may not cost a hundred times as much.
    assert cost(320_000) < 100 * cost(20_000) + 0.02
