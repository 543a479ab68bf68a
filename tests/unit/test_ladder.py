"""The ladder: which signal is due when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.processes.ladder import Alive, Ladder, Rung

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("elapsed", "rung"),
    [
        (0.0, Rung.INTERRUPT),
        (1.999, Rung.INTERRUPT),
        (2.0, Rung.TERMINATE),
        (2.999, Rung.TERMINATE),
        (3.0, Rung.KILL),
        (99.0, Rung.KILL),
    ],
)
def test_rungs_are_interrupt_terminate_kill(elapsed: float, rung: Rung) -> None:
    assert Ladder().next_rung(elapsed, False, Alive.LEADER) is rung


def test_forced_means_kill_at_once() -> None:
    assert Ladder().next_rung(0.0, True, Alive.LEADER) is Rung.KILL


def test_what_outlives_the_command_is_killed_at_once() -> None:
    assert Ladder().next_rung(0.0, False, Alive.REST) is Rung.KILL


def test_nothing_alive_needs_no_rung_even_when_forced() -> None:
    assert Ladder().next_rung(9.0, True, Alive.NOTHING) is Rung.NONE


@pytest.mark.parametrize(("elapsed", "left"), [(0.0, 2.0), (1.5, 0.5), (2.0, 1.0), (3.0, 0.0), (8.0, 0.0)])
def test_until_next(elapsed: float, left: float) -> None:
    assert Ladder().until_next(elapsed) == left


@given(st.lists(st.floats(0, 20), min_size=2).map(sorted), st.floats(0, 5), st.floats(0, 5))
def test_rungs_never_go_down(times: list[float], interrupt_s: float, terminate_s: float) -> None:
    ladder = Ladder(interrupt_s, terminate_s)
    rungs = [ladder.next_rung(when, False, Alive.LEADER) for when in times]
    assert rungs == sorted(rungs)


@given(st.floats(0, 20))
def test_waiting_as_told_reaches_the_next_rung(elapsed: float) -> None:
    ladder = Ladder()
    rung = ladder.next_rung(elapsed, False, Alive.LEADER)
    later = ladder.next_rung(elapsed + ladder.until_next(elapsed) + 1e-9, False, Alive.LEADER)
    assert later > rung or rung is Rung.KILL


@pytest.mark.parametrize("rung", list(Rung))
def test_words_go_both_ways(rung: Rung) -> None:
    assert Rung.from_word(rung.word) is rung


def test_an_unknown_word_is_named() -> None:
    with pytest.raises(ValueError, match="SIGHUP"):
        Rung.from_word("SIGHUP")
