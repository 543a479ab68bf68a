"""The ladder: which signal is due when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.processes.ladder import GIT, MODEL, SERVER, Alive, Ladder, Rung, is_git

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


@pytest.mark.parametrize(
    ("ladder", "steps"),
    [
        (SERVER, [(0.0, Rung.CLOSE), (0.49, Rung.CLOSE), (0.5, Rung.TERMINATE), (1.5, Rung.KILL)]),
        (MODEL, [(0.0, Rung.INTERRUPT), (1.0, Rung.TERMINATE), (2.99, Rung.TERMINATE), (3.0, Rung.KILL)]),
        (GIT, [(0.0, Rung.INTERRUPT), (4.99, Rung.INTERRUPT), (5.0, Rung.KILL)]),
    ],
    ids=["server", "model", "git"],
)
def test_profiles(ladder: Ladder, steps: list[tuple[float, Rung]]) -> None:
    assert [ladder.next_rung(when, False, Alive.LEADER) for when, _ in steps] == [rung for _, rung in steps]
    assert ladder.next_rung(0.0, True, Alive.LEADER) is Rung.KILL


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 20))
def test_no_ladder_ever_waits_for_nothing(
    close: float, interrupt: float, terminate: float, now: float
) -> None:
    ladder = Ladder(interrupt, terminate, close_s=close)
    left = ladder.until_next(now)
    assert (left == 0) == (now >= ladder.kill_at)
    assert ladder.next_rung(now + left + 1e-9, False, Alive.LEADER) > Rung.NONE


@pytest.mark.parametrize(
    ("words", "git"),
    [
        ("git commit -m 'x; y'", True),
        ("cd sub && git pull", True),
        ("GIT_EDITOR=true git rebase --continue", True),
        ("/usr/bin/git status | git apply", True),
        ("git add . && pytest", False),
        ("pytest; git commit", False),
        ("git add .\npytest", False),
        ("echo git", False),
        ("grep git log", False),
        ("echo 'open", False),
        ("", False),
    ],
)
def test_git_is_known_by_its_program(words: str, git: bool) -> None:
    assert is_git(["/bin/bash", "-c", words]) is git


def test_git_is_known_without_a_shell() -> None:
    assert is_git(["git", "status"])
    assert not is_git(["rg", "git"])
    assert not is_git([])
