"""The prompt: Enter sends, Shift+Enter and Ctrl+J break the line, Up and Down walk through earlier prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Static, TextArea

from peri_tui.core.sanitize import clean

# Keys that come this soon after a paste are its tail (a paste cut at an ESC), not the user.
PASTE_TAIL_NS: Final = 80_000_000
PASTE_LIMIT: Final = 1_000_000


class PromptBar(Horizontal):
    """The mark and the text."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self._prompt = prompt

    def compose(self) -> ComposeResult:
        """Build both."""
        yield Static("›", id="prompt-mark", markup=False)
        yield self._prompt


class Prompt(TextArea):
    """A growing text field.

    Args:
        history: the earlier prompts, oldest first; read at each key, so it may grow.
        clock: monotonic nanoseconds.
        text: what stands in it at first.
    """

    class Sent(Message):
        """Enter was pressed on a text that is not blank."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class HelpAsked(Message):
        """``?`` in an empty prompt."""

    def __init__(
        self, history: Callable[[], Sequence[str]], clock: Callable[[], int], *, text: str = ""
    ) -> None:
        super().__init__(
            text,
            compact=True,
            highlight_cursor_line=False,
            placeholder="Describe a task",
            show_line_numbers=False,
        )
        self.cursor_blink = False
        self._history = history
        self._clock = clock
        self._at: int | None = None
        self._typed = ""
        self._pasted = -PASTE_TAIL_NS

    def replace_text(self, text: str) -> None:
        """Put a text in, with the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def on_key(self, event: events.Key) -> None:
        """Take the keys that a prompt means differently than an editor."""
        if event.key == "enter":
            self._take(event)
            if self._clock() - self._pasted < PASTE_TAIL_NS:
                self.insert("\n")
            else:
                self._send()
        elif event.key in ("shift+enter", "ctrl+j", "alt+enter"):
            self._take(event)
            self.insert("\n")
        elif event.character == "?" and not self.text:
            self._take(event)
            self.post_message(self.HelpAsked())

    def on_paste(self, event: events.Paste) -> None:
        """Insert what was pasted as text: nothing in it is a key, nothing in it is hidden."""
        self._take(event)
        self._pasted = self._clock()
        self.insert(clean(event.text[:PASTE_LIMIT].replace("\r\n", "\n").replace("\r", "\n")))

    def _take(self, event: events.Event) -> None:
        event.prevent_default()
        event.stop()

    def _send(self) -> None:
        text = self.text.strip()
        if text:
            self.replace_text("")
            self._at = None
            self.post_message(self.Sent(text))

    # --- history ---------------------------------------------------------------------------------------------------------

    def action_cursor_up(self, select: bool = False) -> None:
        """Go up a line; at the first one, to the prompt before."""
        if not select and self.cursor_location[0] == 0:
            self._walk(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Go down a line; at the last one, to the next prompt, at last to what was being typed."""
        if not select and self._at is not None and self.cursor_location[0] == self.document.line_count - 1:
            self._walk(1)
        else:
            super().action_cursor_down(select)

    def _walk(self, step: int) -> None:
        history = self._history()
        if self._at is None:
            self._typed = self.text
        at = len(history) if self._at is None else self._at
        if not 0 <= at + step <= len(history) or not history:
            return
        at += step
        self._at = None if at == len(history) else at
        self.replace_text(self._typed if self._at is None else history[at])

    def search_back(self) -> None:
        """Go to the next earlier prompt that contains what was typed."""
        history = self._history()
        if self._at is None:
            self._typed = self.text
        upper = len(history) if self._at is None else self._at
        wanted = self._typed.casefold()
        for at in range(min(upper, len(history)) - 1, -1, -1):
            if wanted in history[at].casefold() and history[at] != self.text:
                self._at = at
                self.replace_text(history[at])
                return
