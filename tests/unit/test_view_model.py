"""The pure half of the screen: reduce, the words of the card, the strip, the pump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core import messages as m
from peri_tui.core.trace import Ev
from peri_tui.tui import view_model as v
from peri_tui.tui.pump import FLUSH_CHARS, MOST_CHARS, Pump
from peri_tui.tui.reducer import diff_path, reduce
from peri_tui.tui.stop_report import as_text, clock, duration, report
from peri_tui.tui.widgets.layer_strip import strip_line

pytestmark = pytest.mark.unit

MS = 1_000_000
NOW = 10**12


def apply(*events: object) -> v.ViewState:
    state = reduce(v.ViewState(), v.Submitted("T", "do it"), NOW)
    for event in events:
        state = reduce(state, event, NOW)  # type: ignore[arg-type]
    return state


def traced(layer: int, ev: str, ms: float, **data: object) -> m.Traced:
    return m.Traced(task="T", layer=layer, ev=ev, mono=NOW + int(ms * MS), data=data)


def test_a_press_lights_two_lamps_and_proves_nothing() -> None:
    task = apply(v.Pressed("T", NOW)).tasks["T"]
    assert [lamp.state for lamp in task.lamps] == ["active", "active", "pending", "pending", "pending"]
    assert not task.verified


def test_a_second_press_keeps_the_first_time() -> None:
    task = apply(v.Pressed("T", NOW), v.Pressed("T", NOW + 5 * MS)).tasks["T"]
    assert task.pressed == NOW


@pytest.mark.parametrize(("layer", "ev"), [(3, Ev.CAS), (4, Ev.MODEL_QUIET), (5, Ev.RESOURCES_CLEAN)])
def test_only_the_evidence_of_a_layer_lights_it(layer: int, ev: Ev) -> None:
    for other in Ev:
        if other in (Ev.TREE_SURVIVED,):
            continue
        task = apply(v.Pressed("T", NOW), traced(layer, other, 3)).tasks["T"]
        assert (task.lamps[layer - 1].state == "ok") == (other is ev), other


def test_evidence_that_is_not_ok_fails_the_lamp() -> None:
    task = apply(v.Pressed("T", NOW), traced(4, "model_quiet", 3, ok=False, said="a socket is open")).tasks[
        "T"
    ]
    assert task.lamps[3].state == "failed"
    assert task.lamps[3].said == "a socket is open"


def test_records_of_our_own_layers_are_not_taken_from_the_agent() -> None:
    task = apply(v.Pressed("T", NOW), traced(1, "painted", 1), traced(2, "acked", 1)).tasks["T"]
    assert [lamp.state for lamp in task.lamps[:2]] == ["active", "active"]


def test_unknown_records_and_events_of_a_newer_agent_are_ignored() -> None:
    state = apply(v.Pressed("T", NOW), traced(4, "from_the_future", 1), traced(9, "cas", 1))
    assert [lamp.state for lamp in state.tasks["T"].lamps[2:]] == ["pending"] * 3


def test_a_replayed_event_changes_nothing() -> None:
    event = m.FileChanged(task="T", seq=4, path="a", kind="added")
    once = apply(event)
    assert reduce(once, event, NOW + 1) is once


def test_a_file_that_was_put_back_is_changed_no_longer() -> None:
    changed = [
        m.FileChanged(task="T", seq=seq, path=path, kind="modified") for seq, path in ((4, "a"), (5, "b"))
    ]
    files = m.Files(restored=["a"], conflicts=["b"])
    end = m.TaskEnded(task="T", seq=6, state="cancelled", stop_reason="user", files=files)
    assert [item.path for item in apply(*changed, end).tasks["T"].files] == ["b"]


@given(st.permutations([3, 4, 5]), st.sampled_from([3, 4, 5]))
def test_no_order_of_evidence_verifies_with_one_missing(order: list[int], missing: int) -> None:
    proof = {3: "cas", 4: "model_quiet", 5: "resources_clean"}
    events = [traced(layer, proof[layer], 3) for layer in order if layer != missing]
    delta = m.Delta(task="T", seq=1, ch="text", part="p", text="x")
    end = m.TaskEnded(task="T", seq=9, state="cancelled", stop_reason="user", verified=True)
    task = apply(delta, v.Pressed("T", NOW), v.Painted("T", NOW + MS), *events, end).tasks["T"]
    assert not task.verified
    assert report(task).title.startswith("Not verified")
    assert "as it was" not in as_text(task)


def test_a_task_stopped_before_it_started_needs_no_proof_of_what_never_was() -> None:
    end = m.TaskEnded(task="T", seq=2, state="cancelled", stop_reason="user")
    task = apply(v.Pressed("T", NOW), v.Painted("T", NOW + MS), end).tasks["T"]
    assert task.verified
    assert report(task).title == "Stopped · verified"
    assert report(task).files == ("No file was touched.",)


def test_a_completion_that_was_faster_than_the_stop_is_called_so() -> None:
    end = m.TaskEnded(task="T", seq=2, state="completed")
    task = apply(v.Pressed("T", NOW), v.Painted("T", NOW + MS), end).tasks["T"]
    assert report(task).title == "Finished before the stop took effect"


def test_the_report_of_a_task_that_is_not_over_is_refused() -> None:
    with pytest.raises(ValueError, match="is not over"):
        report(apply().tasks["T"])


def test_the_rate_is_counted_over_the_last_second() -> None:
    state = apply()
    for second in range(4):
        event = m.UsageCounted(task="T", seq=second + 1, tokens_in=10, tokens_out=40 * second)
        state = reduce(state, event, NOW + second * 10**9)
    assert state.tasks["T"].rate == pytest.approx(40, rel=0.01)


def test_a_diff_names_its_file() -> None:
    assert diff_path("--- a/x y.py\t2020\n+++ b/x y.py\n") == "x y.py"
    assert diff_path("--- a/gone.py\n+++ /dev/null\n") == "gone.py"
    assert diff_path("no diff") == ""


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, ""), (0.4, "0 ms"), (4, "4 ms"), (310.2, "310 ms"), (999.6, "1.0 s"), (5000, "5.0 s")],
)
def test_durations(ms: float | None, text: str) -> None:
    assert duration(ms) == text


def test_clock() -> None:
    assert (clock(42), clock(61.9), clock(3723)) == ("00:42", "01:01", "1:02:03")


@given(
    st.integers(60, 240),
    st.lists(st.tuples(st.sampled_from(list(v.LampState)), st.floats(0, 99_999)), min_size=5, max_size=5),
)
def test_no_lamp_ever_moves(width: int, states: list[tuple[v.LampState, float]]) -> None:
    lamps = tuple(
        v.Lamp(lamp.layer, state, "2 of 3 files", "", ms)
        for lamp, (state, ms) in zip(v.DARK, states, strict=True)
    )
    dark, lit = strip_line(v.DARK, width).plain, strip_line(lamps, width).plain
    assert len(lit) <= width
    for lamp in v.DARK:
        assert dark.index(lamp.layer.title) == lit.index(lamp.layer.title)


# --- the pump ----------------------------------------------------------------------------------------------------------


def pump() -> tuple[Pump, list[object], list[object]]:
    facts: list[object] = []
    told: list[object] = []
    return Pump(facts.extend, told.append, lambda: None), facts, told


def delta(text: str, seq: int = 1) -> m.Delta:
    return m.Delta(task="T", seq=seq, ch="text", part="p", text=text)


def test_a_flush_takes_at_most_two_thousand_characters() -> None:
    made, _facts, told = pump()
    made.push(delta("x" * 5000))
    made.flush()
    assert sum(len(event.text) for event in told) == FLUSH_CHARS  # type: ignore[attr-defined]
    made.flush()
    made.flush()
    assert "".join(event.text for event in told) == "x" * 5000  # type: ignore[attr-defined]
    assert [event.off for event in told] == [0, 2000, 4000]  # type: ignore[attr-defined]


def test_more_than_a_second_of_text_is_taken_in_big_pieces() -> None:
    made, _facts, told = pump()
    for n in range(100):
        made.push(delta("x" * 1000, n))
    made.flush()
    assert sum(len(event.text) for event in told) == MOST_CHARS  # type: ignore[attr-defined]


def test_an_urgent_fact_is_applied_at_once_and_the_story_keeps_its_order() -> None:
    made, facts, told = pump()
    made.push(delta("x" * 5000))
    made.push(m.FileChanged(task="T", path="a", kind="added"))
    end = m.TaskEnded(task="T", state="cancelled")
    made.push(end)
    assert facts[-1] is end
    assert end not in told
    while made.waiting:
        made.flush()
    made.flush()
    assert told[-1] is end
