from __future__ import annotations

import re
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.blocks import MAX_CHARS, MAX_LINES, Block, BlockSplitter, Kind

pytestmark = pytest.mark.unit

LINES = [
    "", " ", "word", "two words", "# Title", "## Sub ##", "###### six", "#no", "- item", "* item", "12. item", "  more",
    "    code", "> quote", "| a | b |", "|---|:-:|", "a | b", "--- | ---", "```python", "```", "~~~", "~~~~ js", "  ```",
    "---", "===", "***", "- - -", "``` a`b", "é漢👩", "*emphasis*", "1)", "-",
]  # fmt: skip
SOURCE = st.lists(st.sampled_from(LINES) | st.text("ab `#-|>~*\t", max_size=12), max_size=60).map("\n".join)


def split(text: str, *, every: int = 0) -> list[Block]:
    splitter, blocks = BlockSplitter(), []
    pieces = [text[n : n + every] for n in range(0, len(text), every)] if every else [text]
    for piece in pieces:
        blocks += splitter.feed(piece)
    return blocks + splitter.close()


def paragraph(text: str, *, continued: bool = False) -> Block:
    return Block(Kind.PARAGRAPH, text, continued=continued)


@pytest.mark.parametrize(
    ("source", "blocks"),
    [
        ("", []),
        ("\n\n \n", []),
        ("one\ntwo\n\nthree", [paragraph("one\ntwo"), paragraph("three")]),
        ("# A\n## B ##\n#\n# C#\n###### F ###", [
            Block(Kind.HEADING, "A", level=1), Block(Kind.HEADING, "B", level=2), Block(Kind.HEADING, "", level=1),
            Block(Kind.HEADING, "C#", level=1), Block(Kind.HEADING, "F", level=6),
        ]),
        ("####### seven\n#none", [paragraph("####### seven\n#none")]),
        ("text\n# A\ntext", [paragraph("text"), Block(Kind.HEADING, "A", level=1), paragraph("text")]),
        ("Title\n===\nSub\n---\n", [Block(Kind.HEADING, "Title", level=1), Block(Kind.HEADING, "Sub", level=2)]),
        ("a\n\n---\n\nb\n***", [paragraph("a"), Block(Kind.RULE, "---"), paragraph("b"), Block(Kind.RULE, "***")]),
        ("```Python title=x\nx = 1\n\n# no heading\n```\nafter", [
            Block(Kind.FENCE, "x = 1\n\n# no heading", language="python"), paragraph("after"),
        ]),
        ("```\n```", [Block(Kind.FENCE, "")]),
        ("```{.rust}\nfn\n```", [Block(Kind.FENCE, "fn")]),
        ("~~~ c`c\n```\n~~~~", [Block(Kind.FENCE, "```", language="c`c")]),
        ("````\n```\n````", [Block(Kind.FENCE, "```")]),
        ("```js\nopen", [Block(Kind.FENCE, "open", language="js")]),
        ("``` a`b\ntext", [paragraph("``` a`b\ntext")]),
        ("   ```sh\n   ls\n     -l\n   ```", [Block(Kind.FENCE, "ls\n  -l", language="sh")]),
        ("- a\n- b\n  more\nlazy\n\n1. c\n2) d", [
            Block(Kind.LIST, "- a\n- b\n  more\nlazy"), Block(Kind.LIST, "1. c\n2) d"),
        ]),
        ("text\n- a", [paragraph("text"), Block(Kind.LIST, "- a")]),
        ("- a\n  ```\n  x\n  ```\n- b", [
            Block(Kind.LIST, "- a"), Block(Kind.FENCE, "x"), Block(Kind.LIST, "- b"),
        ]),
        ("- a\n---\n", [Block(Kind.LIST, "- a"), Block(Kind.RULE, "---")]),
        ("> a\nlazy\n> b\n\n> c", [Block(Kind.QUOTE, "> a\nlazy\n> b"), Block(Kind.QUOTE, "> c")]),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n3 | 4\ntext", [
            Block(Kind.TABLE, "| a | b |\n|---|---|\n| 1 | 2 |\n3 | 4"), paragraph("text"),
        ]),
        ("intro\na | b\n--|:-:\n1 | 2\n", [paragraph("intro"), Block(Kind.TABLE, "a | b\n--|:-:\n1 | 2")]),
        ("a | b\nno rule", [paragraph("a | b\nno rule")]),
        ("**bold** text", [paragraph("**bold** text")]),
        ("-5 degrees", [paragraph("-5 degrees")]),
    ],
)  # fmt: skip
def test_known_sources(source: str, blocks: list[Block]) -> None:
    assert split(source) == blocks


@given(SOURCE, st.lists(st.integers(0, 400), max_size=30))
def test_the_blocks_do_not_depend_on_how_the_text_was_cut(source: str, cuts: list[int]) -> None:
    splitter, blocks, last = BlockSplitter(), [], 0
    for cut in sorted(cuts):
        blocks += splitter.feed(source[last:cut])
        last = max(last, cut)
    blocks += splitter.feed(source[last:])
    assert blocks + splitter.close() == split(source) == split(source, every=1)


@pytest.mark.parametrize("every", [1, 3, 1000, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize("length", [8191, 8192, 8193, 16_384, 16_385, 40_000])
def test_a_line_without_end_is_sealed_in_pieces(length: int, every: int) -> None:
    line = "".join(chr(ord("a") + n % 26) for n in range(length))
    blocks = split("x\n\n" + line, every=every)[1:]
    assert "".join(block.text for block in blocks) == line
    assert all(len(block.text) <= MAX_CHARS for block in blocks)
    assert [block.continued for block in blocks] == [False] + [True] * (len(blocks) - 1)


def test_a_long_heading_goes_on_as_a_paragraph() -> None:
    blocks = split("# " + "x" * 9000 + "\nnext")
    assert [block.kind for block in blocks] == [Kind.HEADING, Kind.PARAGRAPH]
    assert "".join(block.text for block in blocks) == "x" * 9000 + "\nnext"


def test_a_long_line_in_a_fence_stays_code() -> None:
    blocks = split("```\n" + "x" * 20_000 + "\n```\nafter")
    assert [(block.kind, len(block.text)) for block in blocks] == [
        (Kind.FENCE, 8192), (Kind.FENCE, 8192), (Kind.FENCE, 3616), (Kind.PARAGRAPH, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "line", "kind"),
    [("```py\n", "x = 1", Kind.FENCE), ("", "- a", Kind.LIST), ("", "word", Kind.PARAGRAPH), ("", "> q", Kind.QUOTE),
     ("| a |\n", "| 1 |", Kind.TABLE)],
)  # fmt: skip
def test_every_kind_is_sealed_at_forty_lines(head: str, line: str, kind: Kind) -> None:
    splitter = BlockSplitter()
    sealed = splitter.feed(head + (line + "\n") * 100)
    assert [block.text.count("\n") + 1 for block in sealed] == [MAX_LINES, MAX_LINES]
    blocks = sealed + splitter.close()
    assert {block.kind for block in blocks} == {kind}
    assert [block.continued for block in blocks] == [False, True, True]
    assert {block.language for block in blocks} == {"py" if kind is Kind.FENCE else ""}


def test_a_fence_that_ends_at_the_seal_leaves_no_empty_block() -> None:
    for lines in (39, 40, 41, 80):
        blocks = split("```\n" + "x\n" * lines + "```\n")
        assert sum(block.text.count("x") for block in blocks) == lines
        assert all(block.text for block in blocks)


def test_wide_lines_are_sealed_by_characters() -> None:
    blocks = split(("y" * 1000 + "\n") * 20)
    assert all(len(block.text) <= MAX_CHARS for block in blocks)
    assert "\n".join(block.text for block in blocks) == "\n".join(["y" * 1000] * 20)


def test_the_tail_is_what_is_not_sealed() -> None:
    splitter = BlockSplitter()
    assert splitter.feed("# A\npara") == [Block(Kind.HEADING, "A", level=1)]
    assert splitter.tail == "para"
    assert splitter.feed("graph\nmore") == []
    assert splitter.tail == "paragraph\nmore"
    assert splitter.peek() == [paragraph("paragraph\nmore")]
    assert splitter.peek() == [paragraph("paragraph\nmore")]
    assert splitter.feed("\n\n") == [paragraph("paragraph\nmore")]
    assert splitter.tail == ""
    assert splitter.peek() == splitter.close() == []


def test_a_splitter_is_as_new_after_close() -> None:
    splitter = BlockSplitter()
    splitter.feed("```py\nx")
    assert splitter.close() == [Block(Kind.FENCE, "x", language="py")]
    assert splitter.feed("text\n\n") == [paragraph("text")]


@given(SOURCE)
def test_a_peek_is_what_close_gives_and_changes_nothing(source: str) -> None:
    splitter = BlockSplitter()
    splitter.feed(source)
    tail, seen = splitter.tail, splitter.peek()
    assert splitter.tail == tail
    assert splitter.close() == seen


@given(SOURCE)
def test_the_bounds_hold_and_no_word_is_lost(source: str) -> None:
    blocks = split(source)
    assert all(block.text.count("\n") < MAX_LINES and len(block.text) <= MAX_CHARS for block in blocks)
    assert all(block.text or block.kind in (Kind.FENCE, Kind.HEADING) for block in blocks)
    # Marks of fences, headings and rules may go; letters may not, except a fence's info line.
    letters = re.compile("[é漢👩]")
    assert letters.findall("".join(block.text for block in blocks)) == letters.findall(source)


@pytest.mark.parametrize(
    "line",
    ["#" + " #" * 4000, "# " + "\t" * 8000 + "x", "```" + "a" * 8000 + "`", "`" * 8000, " " * 8000 + "x", "|" * 8000,
     "-" + " -" * 4000 + "x", "- " * 4000, "| - " * 2000 + "x", ">" * 8000, "a|b\n" + " " * 8000 + "x", "1" * 8000 + "."],
    ids=range(12),
)  # fmt: skip
def test_hostile_lines_do_not_hold_the_screen_up(line: str) -> None:
    start = perf_counter()
    split(line + "\n" + line)
    assert perf_counter() - start < 0.5
