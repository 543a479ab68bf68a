"""What the screen says of processes: whom a stop waits for, what was ended and by which signal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peri_tui.core.messages import TaskEnded, Traced
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.tui import reducer
from peri_tui.tui import view_model as v
from peri_tui.tui.stop_report import as_text, headline, report
from peri_tui.tui.view_model import TaskView
from peri_tui.tui.widgets.stop_card import card_content
from peri_tui.tui.widgets.task_bar import bar_parts

pytestmark = pytest.mark.unit

KILLED = ["41 sh -c pytest SIGINT", "42 python SIGTERM", "43 node SIGKILL"]
SAID = "interrupt sent, 3 processes (pytest, python, sleep), force in 2.1 s"


def ended(**facts: object) -> TaskView:
    end = TaskEnded(task="T", **{"state": "cancelled", "stop_reason": "user", "killed": KILLED} | facts)
    return replace(TaskView("T"), state=TaskState(end.state), pressed=1, end=end)


def test_the_card_lists_what_was_ended_by_which_signal() -> None:
    card = report(ended())
    assert card.ended == tuple(KILLED)
    assert "ended " + " · ".join(KILLED) in card_content(card, 120).plain
    assert "ended: 42 python SIGTERM" in as_text(ended())


def test_many_are_counted_on_the_card_and_all_are_in_the_report() -> None:
    task = ended(killed=[f"{pid} sleep SIGKILL" for pid in range(300)])
    assert "and 294 more" in card_content(report(task), 400).plain
    assert "ended: 299 sleep SIGKILL" in as_text(task)


def test_a_hostile_name_stays_one_line() -> None:
    plain = card_content(report(ended(killed=["7 \x1b]52;c;x\x07\nsh SIGKILL"])), 100).plain
    assert "\x1b" not in plain
    assert "\nsh" not in plain


def test_a_limit_of_the_guard_is_said_in_its_own_words() -> None:
    text = "over the limit: its processes use about 1.1 GiB of memory, 1.0 GiB are allowed"
    task = ended(stop_reason="limit_memory", message=text)
    task = replace(
        task, confirmed=True, lamps=tuple(replace(one, state=v.LampState.OK) for one in task.lamps)
    )
    assert text in headline(task, task.end)


def test_the_bar_says_what_the_stop_waits_for() -> None:
    state = v.ViewState()
    for event in (
        v.Submitted("T", "do it"),
        v.Pressed("T", 1),
        *(
            Traced(task="T", layer=layer, ev=ev.value, mono=1)
            for layer, ev in ((3, Ev.CAS), (4, Ev.MODEL_QUIET))
        ),
        Traced(task="T", layer=5, ev=Ev.TREE_SIGNALLED.value, mono=2, data={"said": SAID}),
    ):
        state = reducer.reduce(state, event, 2)
    lamps = state.tasks["T"].lamps
    assert lamps[Layer.ROLLBACK - 1].said == SAID
    task = replace(
        state.tasks["T"], lamps=tuple(replace(one, state=v.LampState.OK) for one in lamps[:4]) + lamps[4:]
    )
    text = "".join(part for part, _ in bar_parts(replace(state, tasks={"T": task}), 2))
    assert SAID in text
