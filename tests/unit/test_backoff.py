from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.backoff import delays, full_jitter

pytestmark = pytest.mark.unit

RANDOM = st.floats(0, 1, exclude_max=True)


def test_the_schedule_of_the_link() -> None:
    assert list(islice(delays(random=lambda: 0.5), 8)) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1])


def test_jitter_is_twenty_percent_both_ways() -> None:
    assert next(delays(random=lambda: 0.0)) == pytest.approx(0.04)
    assert next(delays(random=lambda: 1.0)) == pytest.approx(0.06)


def test_each_delay_draws_anew() -> None:
    numbers = iter([0.0, 0.5, 0.75])
    drawn = list(islice(delays(random=lambda: next(numbers)), 3))
    assert drawn == pytest.approx([0.04, 0.1, 0.22])


@given(st.lists(RANDOM, min_size=20, max_size=20))
def test_delays_stay_in_their_bounds(numbers: list[float]) -> None:
    draw = iter(numbers)
    middles = [0.05, 0.1, 0.2, 0.4, 0.8] + [1.0] * 15
    waits = list(islice(delays(random=lambda: next(draw)), 20))
    assert all(
        middle * 0.8 - 1e-9 <= wait <= middle * 1.2 + 1e-9
        for wait, middle in zip(waits, middles, strict=True)
    )


@given(st.lists(RANDOM, min_size=12, max_size=12))
def test_full_jitter_stays_below_the_growing_bound(numbers: list[float]) -> None:
    draw = iter(numbers)
    waits = list(islice(full_jitter(random=lambda: next(draw)), 12))
    bounds = [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30]
    assert all(0 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))


def test_a_base_above_the_cap_is_the_cap() -> None:
    assert next(delays(base=5, cap=2, random=lambda: 0.5)) == pytest.approx(2)
    assert next(full_jitter(base=50, random=lambda: 0.999)) < 30
