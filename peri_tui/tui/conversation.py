"""The conversation as a list of blocks: what was said, done and shown, in order.

Blocks are plain mutable values with a version, so that a view (one, or a new one after a remount) sees what changed
by comparing versions. Text is stored as it came; it is cleaned where it is drawn. Streamed Markdown is cut into
sealed blocks (drawn once, in a thread) and an open tail (plain text).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from peri_tui.core.blocks import Block as Piece
from peri_tui.core.blocks import BlockSplitter
from peri_tui.core.messages import (
    Delta,
    Resolved,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    ToolEnded,
    ToolStarted,
)

OUTPUT_LINES: Final = 400
OUTPUT_CHARS: Final = 64 * 1024
BLOCKS_KEPT: Final = 6000


class Kind(StrEnum):
    """What a block is."""

    USER = "user"
    MARKDOWN = "markdown"
    TAIL = "tail"
    THINKING = "thinking"
    TOOL = "tool"
    NOTICE = "notice"
    END = "end"


@dataclass(slots=True, eq=False)
class ToolFacts:
    """What is known of one tool call; ``output`` holds the newest lines."""

    call: str
    name: str
    summary: str = ""
    status: str = "running"
    result: str = ""
    diff: str = ""
    seconds: float = 0.0
    output: deque[str] = field(default_factory=lambda: deque(maxlen=OUTPUT_LINES))
    cut: int = 0


@dataclass(slots=True, eq=False)
class Block:
    """One entry of the conversation. ``tone`` colours an end: ok, warn, fail; ``piece`` is sealed Markdown."""

    kind: Kind
    text: str = ""
    task: str = ""
    version: int = 0
    tool: ToolFacts | None = None
    tone: str = ""
    piece: Piece | None = None

    def touch(self) -> None:
        """Say that the block looks different now."""
        self.version += 1


class Conversation:
    """Grows by events; ``version`` counts changes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.version = 0
        self.unfolded = False
        self._tools: dict[tuple[str, str], Block] = {}
        self._offsets: dict[tuple[str, str], int] = {}
        self._open: tuple[str, str, str] | None = None
        self._splitter = BlockSplitter()
        self._tail: Block | None = None

    def say(self, text: str, task: str = "") -> None:
        """Add a prompt of the user."""
        self.close()
        self._add(Block(Kind.USER, text, task))

    def notice(self, text: str, tone: str = "") -> None:
        """Add one line from Peri itself."""
        self.close()
        self._add(Block(Kind.NOTICE, text, tone=tone))

    def end(self, text: str, tone: str, task: str) -> None:
        """Add the line that a task's end leaves behind."""
        self.close()
        self._add(Block(Kind.END, text, task, tone=tone))

    def fold(self) -> None:
        """Show or hide the output of tools."""
        self.unfolded = not self.unfolded
        for block in self.blocks:
            if block.kind is Kind.TOOL:
                block.touch()
        self.version += 1

    def clear(self) -> None:
        """Forget what was shown (a new conversation)."""
        self.__init__()  # type: ignore[misc]

    def drop_first(self, count: int) -> None:
        """Forget the oldest blocks; the agent's store keeps the whole text."""
        gone = {id(block) for block in self.blocks[:count]}
        del self.blocks[:count]
        self._tools = {key: block for key, block in self._tools.items() if id(block) not in gone}
        self.version += 1

    def apply(self, event: TaskEvent) -> None:
        """Add what one event shows; events must come in order."""
        match event:
            case Delta():
                self._delta(event)
            case ToolStarted():
                self.close()
                block = Block(
                    Kind.TOOL, task=event.task, tool=ToolFacts(event.call, event.name, event.summary)
                )
                self._tools[event.task, event.call] = block
                self._add(block)
            case ToolEnded():
                self._tool_ended(event)
            case TaskEnded():
                self.close()
                self._settle_tools(event.task)
            case TaskStateChanged() | Resolved():
                self.version += 1
            case _:
                return

    def close(self) -> None:
        """Seal the open text, if any."""
        if self._tail is not None:
            self._seal(self._splitter.close())
            self._drop_tail()
        self._splitter = BlockSplitter()
        self._open = None

    def _add(self, block: Block) -> None:
        self.blocks.append(block)
        self._grew()

    def _grew(self) -> None:
        self.version += 1
        if len(self.blocks) > BLOCKS_KEPT:
            self.drop_first(len(self.blocks) - BLOCKS_KEPT * 9 // 10)

    def _delta(self, event: Delta) -> None:
        if event.ch == "tool_out":
            self._output(event)
            return
        if event.ch == "notice":
            self.notice(event.text)
            return
        text = self._fresh(event)
        if not text:
            return
        if self._open != (event.task, event.ch, event.part):
            self.close()
            self._open = (event.task, event.ch, event.part)
            self._tail = Block(Kind.THINKING if event.ch == "thinking" else Kind.TAIL, task=event.task)
            self._add(self._tail)
        if event.ch == "thinking":
            self._grow(text)
            return
        self._seal(self._splitter.feed(text))
        self._set_tail(self._splitter.tail)

    def _fresh(self, event: Delta) -> str:
        # A replay after a reconnect may overlap; the offset says which characters are new.
        key = (event.task, event.part)
        have = self._offsets.get(key, 0)
        if event.off > have or event.off + len(event.text) > have:
            self._offsets[key] = event.off + len(event.text)
        return event.text[max(0, have - event.off) :]

    def _grow(self, text: str) -> None:
        if self._tail is not None:
            self._tail.text = (self._tail.text + text)[-OUTPUT_CHARS:]
            self._tail.touch()
            self.version += 1

    def _set_tail(self, text: str) -> None:
        if self._tail is not None:
            self._tail.text = text
            self._tail.touch()
            self.version += 1

    def _seal(self, sealed: Iterable[Piece]) -> None:
        if self._tail is None:
            return
        fresh = [Block(Kind.MARKDOWN, piece.text, self._tail.task, piece=piece) for piece in sealed]
        if fresh:
            # The tail is always the last block: whatever comes after it closes it first.
            self.blocks[-1:-1] = fresh
            self._grew()

    def _drop_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is None or tail.kind is Kind.THINKING:
            return
        self.blocks.pop()
        self.version += 1

    def _output(self, event: Delta) -> None:
        block = self._tools.get((event.task, event.part)) or self._newest_tool(event.task)
        if block is None or block.tool is None:
            return
        tool = block.tool
        text = (tool.output.pop() if tool.output else "") + event.text
        lines = text.split("\n")
        tool.cut += max(0, len(tool.output) + len(lines) - OUTPUT_LINES)
        tool.output.extend(line[-OUTPUT_CHARS:] for line in lines[-OUTPUT_LINES:])
        block.touch()
        self.version += 1

    def _newest_tool(self, task: str) -> Block | None:
        return next((block for key, block in reversed(self._tools.items()) if key[0] == task), None)

    def _tool_ended(self, event: ToolEnded) -> None:
        block = self._tools.get((event.task, event.call))
        if block is None or block.tool is None:
            return
        tool = block.tool
        tool.status, tool.result, tool.diff, tool.seconds = (
            event.status,
            event.summary,
            event.diff,
            event.seconds,
        )
        block.touch()
        self.version += 1

    def _settle_tools(self, task: str) -> None:
        # A tool that was cut off says so: it must not look as if it were still running.
        for (owner, _call), block in self._tools.items():
            if owner == task and block.tool is not None and block.tool.status == "running":
                block.tool.status = "cancelled"
                block.touch()
        self.version += 1
