"""Text of models, tools and files never becomes markup, a control, or a blocked loop."""

from __future__ import annotations

import gc
import time

import pytest
from rich.segment import Segment
from textual.color import Color

from peri_tui.core import messages as m
from peri_tui.tui.second_net import SecondNet
from tests.doubles.fake_session import FakeSession
from tests.tui.stage import Stage, stage

pytestmark = pytest.mark.tui

MARKUP = ["[/]", "[/foo]", "[/", "[b", "[ red]", "[$x]", "\\[b]", "[@click=app.quit]X", '[link="x]']
CONTROLS = [
    *(chr(code) for code in (*range(9), *range(11, 32), 127, *range(128, 160))),
    "\x1b]0;title\x07", "\x1b]52;c;eA==\x1b\\", "\x1b]8;;http://x\x1b\\x", "\x1b[2J", "\x1b[6n", "\x1b[?1049l", "\x1bc",
    "\x1bPq\x1b\\", "\x9b2J", "\u202e", "\u2066", "\u200b", "\ufeff", "\U000e0041", "\u2028",
]  # fmt: skip
BAD = {chr(code) for code in (*range(32), *range(127, 160))} | set("\u202e\u2066\u200b\ufeff\u2028\U000e0041")


async def everywhere(scene: Stage, text: str) -> None:
    """Put one text into every place that comes from outside."""
    await scene.prompt("p " + text)
    scene.say(m.TaskStateChanged, state="running", prev="queued", prompt="p " + text)
    scene.text(
        f"a {text} b\n\n# {text}\n\n- {text}\n\n```{text}\n{text}\n```\n\n| {text} | b |\n|---|---|\n| {text} | c |\n\n"
    )
    scene.text(text, ch="thinking", part="t")
    scene.text(text, ch="notice", part="n")
    scene.say(m.ToolStarted, call="1", name=text, summary=text)
    scene.say(m.Delta, ch="tool_out", part="1", text=text + "\n")
    scene.say(
        m.ToolEnded,
        call="1",
        name=text,
        status="error",
        summary=text,
        diff=f"--- a/{text}\n+++ b/{text}\n-{text}\n",
    )
    scene.say(m.FileChanged, path=text, kind="modified", by="shell")
    scene.say(m.Progressed, step=1, doing=text, detail=text)
    scene.app.say(text)
    scene.session.on_link(_news(text))
    await scene.settled()


def _news(text: str):
    from tests.doubles.fake_session import FakeNews

    return FakeNews("restarted", text)


async def walk(scene: Stage, text: str) -> str:
    """Open every screen and end the task with the text; return all that was on screen."""
    seen = scene.screen() + scene.lines()
    for key in ("ctrl+t", "f2"):
        await scene.pilot.press(key)
        await scene.pilot.pause()
        seen += scene.screen()
        await scene.pilot.press(key)
    scene.say(
        m.Asked, qid="q", kind="tool", tool=text, title=text, detail=text, diff=text, where=text, note=text
    )
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.pilot.pause()
    seen += scene.screen()
    scene.end(
        "cancel_failed",
        verified=False,
        message=text,
        residue=[text],
        files=m.Files(not_restored=[text]),
        evidence=[m.LayerEvidence(layer=layer, ok=False, missing=text) for layer in (3, 4, 5)],
    )
    await scene.settled()
    seen += scene.screen() + scene.lines()
    await scene.pilot.press("ctrl+p")
    await scene.pilot.pause()
    return seen + scene.screen()


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_is_shown_literally_everywhere(text: str) -> None:
    async with stage() as scene:
        await everywhere(scene, text)
        seen = await walk(scene, text)
        assert text in seen
        assert scene.app.is_running
        assert not scene.session.closed


async def test_no_control_reaches_a_rendered_line() -> None:
    async with stage() as scene:
        await everywhere(scene, " ".join(CONTROLS))
        seen = await walk(scene, " ".join(CONTROLS))
        assert not (set(seen) - {"\n"}) & BAD


async def test_controls_split_over_pieces_of_a_stream() -> None:
    async with stage() as scene:
        await scene.run()
        for char in "".join(CONTROLS):
            scene.text(char)
        scene.text("\n\n")
        await scene.settled()
        assert not (set(scene.lines()) - {"\n"}) & BAD


async def test_the_second_net_is_in_place_and_cleans_what_slips_through() -> None:
    async with stage() as scene:
        nets = [item for item in scene.app._filters if isinstance(item, SecondNet)]
        assert len(nets) == 1
        segments = [Segment("a\x1b[2Jb\u202e\x9bc")]
        assert nets[0].apply(segments, Color(0, 0, 0))[0].text == "a[2Jbc"
        clean = [Segment("äöü ✓ 日本")]
        assert nets[0].apply(clean, Color(0, 0, 0)) is clean


async def test_a_lone_surrogate_and_wide_characters_keep_the_app_alive() -> None:
    async with stage((60, 20)) as scene:
        await scene.run()
        scene.text("\ud800 日本語 👨‍👩‍👧 🇩🇪 e" + "\u0301" * 60 + "\n\n")
        await scene.settled()
        assert "日本語" in scene.lines()


FLOODS = {
    "one line": lambda: "x" * 1_000_000,
    "words": lambda: "word " * 200_000,
    "lines": lambda: "a line\n" * 50_000,
    "paragraphs": lambda: "a paragraph\n\n" * 5_000,
    "quotes": lambda: ">" * 500 + " deep\n\n",
    "brackets": lambda: "[" * 20_000 + "\n\n",
    "marks": lambda: "e" + "\u0301" * 200_000 + "\n\n",
    "table": lambda: "|a|b|\n|-|-|\n" + "|x|y|\n" * 5_000,
    "fence": lambda: "```python\n" + "x = 1\n" * 20_000,
    "stars": lambda: "*" * 100_000 + "\n\n",
    "backticks": lambda: "`" * 50_001 + " a\n\n",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_cannot_delay_the_stop(name: str) -> None:
    text = FLOODS[name]()
    async with stage() as scene:
        await scene.run()
        pieces = [text[at : at + 2000] for at in range(0, len(text), 2000)]
        # As the app does in a terminal: a whole test run's objects are not for this app's collector to walk.
        gc.collect()
        gc.freeze()
        try:
            worst = await _longest_cpu_gap(scene, pieces)
        finally:
            gc.unfreeze()
        before = time.thread_time()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        spent = time.thread_time() - before
        assert worst < 0.5, f"the loop was busy for {worst:.2f} s of CPU at a stretch"
        assert spent < 1.0
        scene.end()
        await scene.until(lambda: scene.view.task.is_over)


async def _longest_cpu_gap(scene: Stage, pieces: list[str]) -> float:
    import asyncio

    worst = 0.0
    for at in range(0, len(pieces), 10):
        for piece in pieces[at : at + 10]:
            scene.text(piece)
        before = time.thread_time()
        await asyncio.sleep(0)
        scene.app.pump.flush()
        await asyncio.sleep(0.005)
        worst = max(worst, time.thread_time() - before)
    return worst


async def test_an_urgent_event_does_not_wait_behind_text() -> None:
    session = FakeSession()
    async with stage(session=session) as scene:
        await scene.run()
        for _ in range(200):
            scene.text("x" * 200 + "\n")
        scene.say(m.Asked, qid="q", kind="tool", tool="shell", title="Run?", detail="ls")
        assert scene.view.task.question is not None
        assert scene.app.pump.waiting > 2000


async def test_the_view_follows_the_end_until_the_user_scrolls_up() -> None:
    async with stage((80, 24)) as scene:
        await scene.run()
        scene.text("".join(f"line {n}\n\n" for n in range(100)))
        await scene.settled()
        transcript = scene.app.main.transcript
        assert transcript.follows
        assert "line 99" in scene.screen()
        await scene.pilot.press("pageup")
        transcript.focus()
        await scene.pilot.press("pageup")
        await scene.until(lambda: not transcript.follows)
        top = transcript.scroll_offset.y
        scene.text("".join(f"more {n}\n\n" for n in range(50)))
        await scene.settled()
        assert transcript.scroll_offset.y == top
        await scene.pilot.press("end")
        await scene.until(lambda: transcript.follows)
        assert "more 49" in scene.screen()


async def test_lines_are_drawn_again_for_another_width_and_theme() -> None:
    async with stage((120, 40)) as scene:
        await scene.run()
        scene.text("word " * 60 + "**bold**\n\n" + "tail " * 30)
        await scene.settled()
        wide = len(scene.app.main.transcript.lines)
        await scene.pilot.resize_terminal(60, 20)
        await scene.settled()
        assert len(scene.app.main.transcript.lines) > wide
        assert max(len(line) for line in scene.app.main.transcript.lines) <= 60
        before = scene.app.main.transcript.render_line(0)
        scene.app.theme = "peri-light"
        await scene.until(lambda: scene.app.main.transcript.render_line(0) != before)


async def test_the_conversation_is_bounded() -> None:
    async with stage() as scene:
        await scene.run()
        for _ in range(10):
            scene.text("a line\n\n" * 800)
            scene.app.pump.flush()
            await scene.settled()
        transcript = scene.app.main.transcript
        assert transcript.virtual_size.height <= 20_000
        assert len(scene.app.desk.conversation.blocks) <= 6_000
