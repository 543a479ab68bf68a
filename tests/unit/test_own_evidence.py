"""Layer 1 is proven by what the terminal took, never by what somebody says; the user's time begins with the key."""

from __future__ import annotations

import threading

import pytest

from peri_tui.core import messages as m
from peri_tui.tui import view_model as v
from peri_tui.tui.counted_output import CountedOutput
from peri_tui.tui.reducer import reduce
from peri_tui.tui.stop_report import headline

pytestmark = pytest.mark.unit

MS = 1_000_000
NOW = 10**12
PROOF = [m.LayerEvidence(layer=layer, ok=True, ms=40, summary="done") for layer in (1, 2, 3, 4, 5)]


def stopped(*events: object, **end: object) -> v.TaskView:
    """Return a task that was pressed, and ended with the agent's word for all five layers."""
    facts = {"state": "cancelled", "stop_reason": "user", "verified": True, "evidence": PROOF} | end
    state = reduce(v.ViewState(), v.Submitted("T", "go"), NOW)
    for event in (v.Pressed("T", NOW), *events, m.TaskEnded(task="T", **facts)):
        state = reduce(state, event, NOW + 50 * MS)  # type: ignore[arg-type]
    return state.tasks["T"]


def test_the_agent_cannot_say_what_was_painted() -> None:
    task = stopped()
    assert task.lamps[0].state is v.LampState.ACTIVE
    assert not task.settled
    assert not task.verified
    shown = stopped(v.Painted("T", NOW + 3 * MS))
    assert shown.verified
    assert not shown.is_unclean


def test_an_end_waits_for_the_answer_to_its_cancel() -> None:
    lost = stopped(v.Painted("T", NOW + MS), state="failed", stop_reason="owner_lost")
    assert not lost.settled
    state = v.ViewState(tasks={"T": lost}, shown="T")
    answer = m.CancelNoop(re="r", task="T", state="failed")
    healed = reduce(state, v.Acknowledged(answer, NOW + 90 * MS, 1), NOW + 90 * MS).tasks["T"]
    assert healed.settled
    assert healed.verified
    silent = reduce(state, v.CancelLost("T", NOW + 90 * MS, "no answer"), NOW + 90 * MS).tasks["T"]
    assert silent.settled
    assert headline(silent, silent.end).startswith("Not verified · Client")


def test_a_press_that_was_shown_too_late_is_not_clean() -> None:
    late = stopped(v.Painted("T", NOW + 2500 * MS))
    assert late.settled
    assert late.is_unclean
    assert headline(late, late.end).startswith("Not verified · UI")


def test_what_was_not_pressed_here_needs_no_frame() -> None:
    state = reduce(v.ViewState(), v.Submitted("T", "go"), NOW)
    end = m.TaskEnded(task="T", state="cancelled", stop_reason="user", verified=True, evidence=PROOF)
    task = reduce(state, end, NOW).tasks["T"]
    assert task.verified
    assert not task.is_unclean


def test_a_press_after_another_end_does_not_claim_it() -> None:
    state = reduce(v.ViewState(), v.Submitted("T", "go"), NOW)
    end = m.TaskEnded(task="T", state="cancelled", stop_reason="limit_turns", verified=True, evidence=PROOF)
    task = reduce(reduce(state, end, NOW), v.Pressed("T", NOW + MS), NOW).tasks["T"]
    assert task.lamps[1].said == "the task had ended already"


def test_a_retry_has_to_be_painted_again() -> None:
    task = stopped(v.Painted("T", NOW + 3 * MS), state="cancel_failed", verified=False, seq=8)
    state = v.ViewState(tasks={"T": task}, shown="T")
    again = m.TaskStateChanged(task="T", seq=9, state="cancelling", prev="cancel_failed")
    task = reduce(state, again, NOW + 90 * MS).tasks["T"]
    assert task.awaits_frame


@pytest.mark.parametrize(("reason", "said"), [("user", "0.04 s"), ("shutdown", "3.10 s")])
def test_the_time_of_a_stop_by_way_of_a_signal_begins_with_the_key(reason: str, said: str) -> None:
    quiet = m.Traced(task="T", layer=5, ev="resources_clean", mono=NOW + 3100 * MS, data={"ok": True})
    state = m.TaskStateChanged(task="T", seq=1, state="cancelling", prev="running")
    answer = v.Acknowledged(m.CancelNoop(re="r", task="T", state="cancelled"), NOW + 3200 * MS, 1)
    task = stopped(v.Painted("T", NOW + MS), state, quiet, answer, stop_reason=reason, stop_seconds=0.04)
    assert said in headline(task, task.end)


# --- what the terminal took -------------------------------------------------------------------------------------------


class FakeTerminal:
    """Takes bytes only while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        self.open.wait(5)


def test_a_frame_in_the_queue_or_in_a_buffer_is_not_on_the_screen() -> None:
    terminal, called = FakeTerminal(), []
    output = CountedOutput(terminal)  # type: ignore[arg-type]
    output.noted()
    output.when_flushed(lambda: called.append("first"))
    output.write("frame")
    assert called == []
    writer = threading.Thread(target=output.flush)
    writer.start()
    output.noted()
    output.when_flushed(lambda: called.append("second"))
    assert called == []
    terminal.open.set()
    writer.join(5)
    assert called == ["first"]
    output.write("frame")
    output.flush()
    assert called == ["first", "second"]


def test_what_the_queue_did_not_take_is_not_waited_for() -> None:
    called = []
    output = CountedOutput(FakeTerminal())  # type: ignore[arg-type]
    output.noted()
    output.withdrawn()
    output.when_flushed(lambda: called.append("at once"))
    assert called == ["at once"]
