"""Identifiers: ULIDs made by the client for tasks, sessions and requests.

A ULID is 26 characters of Crockford's base 32: 48 bits of milliseconds, 80 bits of randomness; ids sort by time.
Source: the ULID specification. The canonical form is upper case; anything else is refused, so no encoding of an
id can name a second task.
"""

from __future__ import annotations

from typing import Final, NewType

TaskId = NewType("TaskId", str)
SessionId = NewType("SessionId", str)

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LENGTH: Final = 26


def make_ulid(millis: int, randomness: bytes) -> str:
    """Return the ULID of a moment.

    Args:
        millis: milliseconds since the epoch, below 2**48.
        randomness: ten random bytes.
    """
    value = (millis & (2**48 - 1)) << 80 | int.from_bytes(randomness[:10], "big")
    digits = []
    for _ in range(_LENGTH):
        value, rest = divmod(value, 32)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits))


def is_ulid(text: str) -> bool:
    """Tell whether ``text`` is a canonical ULID."""
    return len(text) == _LENGTH and text[0] <= "7" and all(char in _ALPHABET for char in text)
