"""Builds the app on doubles, and speaks for the agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from peri_tui.core import messages as m
from peri_tui.tui.app import PeriApp
from peri_tui.tui.widgets.header import Place
from tests.doubles.fake_session import FakeClock, FakeDrafts, FakeLane, FakeSession


class Stage:
    """An app, its doubles, and a script of events."""

    def __init__(self, **options: Any) -> None:
        self.session: FakeSession = options.pop("session", None) or FakeSession()
        self.drafts = options.pop("drafts", None) or FakeDrafts()
        self.clock = options.pop("clock", None) or FakeClock()
        self.lane: FakeLane | None = options.pop("lane", None)
        self.traced: list[tuple[str, int, str, dict[str, Any]]] = []
        self.seqs: dict[str, int] = {}
        place = Place("~/shop", "main", "gpt-5-mini", options.pop("approve", "ask"), "0.0.0")
        self.app = PeriApp(
            self.session.open, place=place, drafts=self.drafts, trace=self._trace, lane=self.lane,
            clock=self.clock, **options,
        )  # fmt: skip
        self.pilot: Pilot[int]

    def _trace(self, task: str, layer: int, ev: str, **facts: Any) -> None:
        self.traced.append((task, layer, str(ev), facts))

    @property
    def task(self) -> str:
        return self.session.submitted[-1][0]

    @property
    def view(self):
        return self.app.view

    def say(self, event: type, /, **fields: Any) -> None:
        """Let the agent send an event of the newest task."""
        task = fields.pop("task", None) or self.task
        self.seqs[task] = self.seqs.get(task, 0) + 1
        self.session.on_event(event(task=task, seq=self.seqs[task], **fields))

    def text(self, text: str, part: str = "p1", ch: str = "text") -> None:
        key = f"off {self.task} {part}"
        off = self.seqs.get(key, 0)
        self.seqs[key] = off + len(text)
        self.say(m.Delta, ch=ch, part=part, text=text, off=off)

    def lamp(self, layer: int, ev: str, ms: float, **data: Any) -> None:
        task = self.app.view.tasks[self.task]
        self.say(m.Traced, layer=layer, ev=ev, mono=task.pressed + int(ms * 1e6), data=data)

    def end(self, state: str = "cancelled", **fields: Any) -> None:
        if "evidence" not in fields and state != "completed":
            fields["evidence"] = evidence()
        fields.setdefault("stop_reason", "user" if state != "completed" else "")
        self.say(m.TaskEnded, state=state, **fields)

    async def until(self, check: Callable[[], Any]) -> None:
        """Wait for a condition."""
        for _ in range(400):
            await self.pilot.pause()
            if check():
                return
        raise AssertionError("the condition never came true")

    async def settled(self) -> None:
        """Wait until everything that was said is drawn."""
        transcript = self.app.main.transcript
        await self.until(lambda: not self.app.pump._story and transcript.settled)
        await self.pilot.pause()

    async def prompt(self, text: str = "Move the price rules out of cart.py") -> None:
        """Type and send a prompt, and let the agent run it."""
        before = len(self.session.submitted)
        self.app.prompt.replace_text(text)
        await self.pilot.press("enter")
        await self.until(lambda: len(self.session.submitted) > before)

    async def run(self, text: str = "Move the price rules out of cart.py") -> None:
        await self.prompt(text)
        self.say(m.TaskStateChanged, state="queued", prompt=text)
        self.say(m.TaskStateChanged, state="running", prev="queued")
        await self.pilot.pause()

    def lines(self) -> str:
        return "\n".join(self.app.main.transcript.lines)

    def screen(self) -> str:
        """The text of the whole screen."""
        width, _height = self.app.size
        rows = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text[:width].rstrip() for strip in rows)


def evidence(**failing: str) -> list[m.LayerEvidence]:
    """Return the evidence of the agent's three layers; ``rollback="…"`` makes one fail."""
    said = {
        3: ("scheduler", 3.0, "running → cancelling → cancelled"),
        4: ("model", 4.0, "connection closed, far end: assumed, 1,204 tokens so far"),
        5: ("rollback", 310.0, "3 files restored, 2 processes ended (pytest, python), 0 left"),
    }
    return [
        m.LayerEvidence(
            layer=layer, ok=name not in failing, ms=ms, summary=words, missing=failing.get(name, "")
        )
        for layer, (name, ms, words) in said.items()
    ]


@asynccontextmanager
async def stage(size: tuple[int, int] = (120, 40), **options: Any) -> AsyncIterator[Stage]:
    """Run the app on a virtual screen until the link is up."""
    made = Stage(**options)
    async with made.app.run_test(size=size, notifications=True) as pilot:
        made.pilot = pilot
        await made.until(lambda: made.app.view.link == "up")
        yield made
