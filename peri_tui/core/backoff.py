"""Retry schedules; randomness is passed in, so a schedule can be replayed.

Two shapes: ``delays`` for the link to our own agent (first retry almost at once, because a stop waits on it), and
``full_jitter`` for model APIs, where many clients must not come back at the same moment.
Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015 (the "full jitter" rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator


def delays(
    *,
    base: float = 0.05,
    factor: float = 2.0,
    cap: float = 1.0,
    jitter: float = 0.2,
    random: Callable[[], float],
) -> Iterator[float]:
    """Yield seconds to wait before each retry, without end: 0.05, 0.1, 0.2, 0.4, 0.8, 1, 1 … ± ``jitter``.

    Args:
        base: the first delay in seconds.
        factor: growth from one delay to the next.
        cap: the longest delay before jitter, in seconds.
        jitter: share by which a delay may be shorter or longer, 0 to 1.
        random: returns a number from 0 to below 1.
    """
    delay = min(base, cap)
    while True:
        yield delay * (1 + jitter * (2 * random() - 1))
        delay = min(delay * factor, cap)


def full_jitter(
    *, base: float = 1.0, factor: float = 2.0, cap: float = 30.0, random: Callable[[], float]
) -> Iterator[float]:
    """Yield seconds to wait before each retry of a model request: anything from 0 to the growing bound.

    Args:
        base: the first bound in seconds.
        factor: growth from one bound to the next.
        cap: the highest bound in seconds.
        random: returns a number from 0 to below 1.
    """
    bound = min(base, cap)
    while True:
        yield bound * random()
        bound = min(bound * factor, cap)
