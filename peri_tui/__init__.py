"""Peri: a terminal IDE companion whose agent can be stopped at any moment, with proof."""

from __future__ import annotations

__version__ = "0.1.0"
