from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.stop_plan import Action, ActiveTime, Heard, Press, PressJudge, Step, StopPlan

pytestmark = pytest.mark.unit


# --- presses ------------------------------------------------------------------------------------------------------


def judge(*times: float, **options: float) -> list[Press]:
    one = PressJudge(**options)
    return [one.press(t) for t in times]


def test_the_first_press_stops() -> None:
    assert judge(12.5) == [Press.STOP]


def test_even_a_repeat_stops_when_it_is_the_first() -> None:
    assert PressJudge().press(0, repeat=True) is Press.STOP


@pytest.mark.parametrize(
    ("gap", "meaning"), [(0.0, Press.IGNORE), (0.12, Press.IGNORE), (0.399, Press.IGNORE), (0.4, Press.FORCE), (9, Press.FORCE)]
)  # fmt: skip
def test_a_second_press_forces_from_400_ms(gap: float, meaning: Press) -> None:
    assert judge(5.0, 5.0 + gap) == [Press.STOP, meaning]


def test_a_held_key_is_one_stop() -> None:
    presses = judge(*(n / 30 for n in range(150)))
    assert presses == [Press.STOP] + [Press.IGNORE] * 149


def test_a_key_that_was_held_let_go_and_pressed_again_forces() -> None:
    held = [n / 30 for n in range(150)]
    assert judge(*held, held[-1] + 0.3)[-1] is Press.FORCE


def test_the_terminals_own_word_is_a_repeat_at_any_distance() -> None:
    one = PressJudge()
    one.press(0)
    assert one.press(0.7, repeat=True) is Press.IGNORE
    assert one.press(1.4) is Press.FORCE


def test_two_quick_presses_then_a_slow_one_force_once() -> None:
    assert judge(0, 0.2, 0.5, 0.9, 1.5) == [
        Press.STOP, Press.IGNORE, Press.FORCE, Press.IGNORE, Press.IGNORE,
    ]  # fmt: skip


def test_reset_makes_the_next_press_a_stop() -> None:
    one = PressJudge()
    one.press(0)
    one.press(1)
    one.reset()
    assert one.press(2) is Press.STOP
    assert one.press(3) is Press.FORCE


@pytest.mark.parametrize("delay", [0.225, 0.25, 0.4, 0.5, 0.66, 1.0])
def test_the_initial_delay_of_a_held_key_is_no_force_when_it_may_settle(delay: float) -> None:
    one = PressJudge(settle=0.12)
    meanings = [one.press(0)]
    for n in range(60):
        t = delay + n / 30
        meanings += [one.settled(t), one.press(t)]
    meanings.append(one.settled(99))
    assert meanings[0] is Press.STOP
    assert Press.FORCE not in meanings


def test_a_deliberate_press_forces_once_it_has_settled() -> None:
    one = PressJudge(settle=0.12)
    one.press(0)
    assert one.settles_at is None
    assert one.press(0.6) is Press.WAIT
    assert one.settles_at == pytest.approx(0.72)
    assert one.settled(0.7) is Press.IGNORE
    assert one.settled(0.72) is Press.FORCE
    assert one.settled(0.8) is Press.IGNORE
    assert one.press(1.5) is Press.IGNORE


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40))
def test_one_stop_and_at_most_one_force_whatever_is_pressed(presses: list[tuple[float, bool]]) -> None:
    one, t, meanings = PressJudge(), 0.0, []
    for gap, repeat in presses:
        t += gap
        meanings.append(one.press(t, repeat))
    assert meanings.count(Press.STOP) == min(1, len(presses))
    assert meanings.count(Press.FORCE) <= 1
    assert Press.WAIT not in meanings


# --- escalation ---------------------------------------------------------------------------------------------------


def run(plan: StopPlan, until_ms: float, heard: Heard, *, shown_after: float = 0.0) -> list[Step]:
    """Follow a plan as a client would; a warning is on screen ``shown_after`` ms after its time."""
    taken: list[Step] = []
    while (step := plan.next(taken, heard)) is not None and step.at_ms <= until_ms:
        taken.append(step)
        if step.action is Action.WARN_KILL:
            heard = Heard(others=True, warned_ms=step.at_ms + shown_after)
    return taken


def times(steps: list[Step], action: Action) -> list[float]:
    return [step.at_ms for step in steps if step.action is action]


def test_control_is_tried_by_the_schedule_and_http_beside_it() -> None:
    steps = run(StopPlan(embedded=False), 4000, Heard())
    assert times(steps, Action.SEND_CONTROL) == [0, 50, 150, 350, 750, 1550, 2550, 3550]
    assert times(steps, Action.SEND_HTTP) == [300, 1300, 2300, 3300]
    assert [s.attempt for s in steps if s.action is Action.SEND_CONTROL] == list(range(1, 9))
    assert all(one.at_ms <= two.at_ms for one, two in pairwise(steps))


def test_an_embedded_agent_alone_is_killed_at_five_seconds() -> None:
    steps = run(StopPlan(embedded=True), 60_000, Heard())
    assert times(steps, Action.SIGNAL_AGENT) == [3000]
    assert times(steps, Action.WARN_KILL) == []
    assert times(steps, Action.KILL_AGENT) == [5000]
    assert [s.action for s in steps[-2:]] == [Action.KILL_AGENT, Action.REPORT]


def test_other_tasks_are_named_first_and_there_are_three_seconds_to_say_no() -> None:
    steps = run(StopPlan(embedded=True), 60_000, Heard(others=True))
    assert times(steps, Action.WARN_KILL) == [5000]
    assert times(steps, Action.KILL_AGENT) == [8000]


def test_the_three_seconds_count_from_when_the_warning_was_on_screen() -> None:
    steps = run(StopPlan(embedded=True), 60_000, Heard(others=True), shown_after=2500)
    assert times(steps, Action.KILL_AGENT) == [10_500]


def test_an_unshown_warning_holds_the_kill_back() -> None:
    plan = StopPlan(embedded=True)
    taken = run(plan, 5000, Heard(others=True))
    assert Step(Action.WARN_KILL, 5000) in taken
    assert plan.due(500_000, taken, Heard(others=True)).action is not Action.KILL_AGENT  # type: ignore[union-attr]


def test_who_says_no_gets_a_report_and_no_kill() -> None:
    plan = StopPlan(embedded=True)
    taken = run(plan, 5000, Heard(others=True))
    heard = Heard(others=True, warned_ms=5000, declined=True)
    assert plan.due(6000, taken, heard) == Step(Action.REPORT, 5000)
    later = run(plan, 60_000, heard)
    assert times(later, Action.KILL_AGENT) == []
    assert times(later, Action.SEND_CONTROL)[-1] > 50_000


def test_a_served_agent_is_never_signalled_or_killed() -> None:
    for others in (False, True):
        actions = {s.action for s in run(StopPlan(embedded=False), 60_000, Heard(others=others))}
        assert actions == {Action.SEND_CONTROL, Action.SEND_HTTP, Action.REPORT}


@given(st.booleans(), st.booleans(), st.floats(0, 10_000), st.booleans())
def test_after_an_acknowledgement_only_silence_is_reported(
    embedded: bool, others: bool, acked_ms: float, warned: bool
) -> None:
    plan = StopPlan(embedded)
    taken = run(plan, acked_ms, Heard(others=others))
    heard = Heard(acked=True, others=others, warned_ms=5000 if warned else None, last_word_ms=acked_ms)
    step = plan.next([s for s in taken if s.action is not Action.REPORT], heard)
    assert step is not None
    assert step.action is Action.REPORT
    assert step.at_ms == pytest.approx(acked_ms + 10_000)


@given(st.booleans(), st.floats(0, 20_000))
def test_after_the_end_there_is_nothing_to_do(embedded: bool, at_ms: float) -> None:
    plan = StopPlan(embedded)
    taken = run(plan, at_ms, Heard())
    assert plan.next(taken, Heard(ended=True)) is None
    assert plan.due(10**9, taken, Heard(ended=True)) is None


def test_a_client_that_was_held_up_sends_one_cancel_not_ten() -> None:
    plan = StopPlan(embedded=False)
    taken: list[Step] = []
    while step := plan.due(2900, taken, Heard()):
        taken.append(step)
    assert taken == [Step(Action.SEND_CONTROL, 2550, 7), Step(Action.SEND_HTTP, 2300, 3)]


def test_nothing_is_due_before_its_time() -> None:
    plan = StopPlan(embedded=True)
    taken = run(plan, 49, Heard())
    assert plan.due(49, taken, Heard()) is None
    assert plan.due(50, taken, Heard()) == Step(Action.SEND_CONTROL, 50, 2)


def test_jitter_comes_from_outside_and_the_first_try_is_at_once() -> None:
    early = StopPlan(embedded=False, random=lambda: 0.0)
    steps = run(early, 200, Heard())
    assert times(steps, Action.SEND_CONTROL) == [0, 40, 120]


def test_nothing_is_tried_beyond_the_horizon() -> None:
    steps = run(StopPlan(embedded=False, horizon=2.0), 10**9, Heard())
    assert [s.action for s in steps[-2:]] == [Action.SEND_CONTROL, Action.REPORT]
    assert times(steps, Action.SEND_CONTROL)[-1] == 1550


def test_no_cancel_is_sent_to_an_agent_that_was_killed() -> None:
    plan = StopPlan(embedded=True)
    taken = run(plan, 5000, Heard())
    assert plan.next(taken, Heard()) == Step(Action.REPORT, 6000)
    assert plan.next([*taken, Step(Action.REPORT, 6000)], Heard()) is None
    # Tasks that show up, or a "no" that comes, after the kill change nothing any more.
    assert plan.next(taken, Heard(others=True)) == Step(Action.REPORT, 6000)
    assert plan.next(taken, Heard(declined=True)) == Step(Action.REPORT, 6000)


# --- time ---------------------------------------------------------------------------------------------------------


def test_only_time_in_which_the_client_ran_counts() -> None:
    time = ActiveTime(100.0)
    assert time.tick(100.2) == pytest.approx(0.2)
    assert time.tick(700.2) == pytest.approx(1.2)
    assert time.tick(700.7) == pytest.approx(1.7)
    assert time.tick(500.0) == pytest.approx(1.7)
    assert time.tick(701.2) == pytest.approx(2.2)
