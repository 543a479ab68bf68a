"""The second net: whatever a widget lets through, no control or hidden code point reaches the terminal.

``sanitize`` is the first net and the only one that explains what it found. This one is a filter over every rendered
line; it uses Textual's private list of filters, so a test pins that it is called.
"""

from __future__ import annotations

import re
from typing import Final

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_BAD: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


class SecondNet(LineFilter):
    """Deletes what must never be written."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments, cleaned; the same list where nothing was found."""
        if not any(_BAD.search(segment.text) for segment in segments):
            return segments
        return [
            Segment(_BAD.sub("", segment.text), segment.style, segment.control) if segment.text else segment
            for segment in segments
        ]
