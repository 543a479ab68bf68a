"""The stop lane: it stops while everything else in the client is stuck."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.client.stop_lane import PressReport, StopLane
from peri_tui.core import messages as m
from peri_tui.core.stop_plan import Press
from peri_tui.core.trace import Ev
from peri_tui.log import Log, read_trace
from tests.doubles.fake_agent import FakeAgent

pytestmark = pytest.mark.contract

TASK = "01J0000000000000000000000A"


class Rig:
    def __init__(self, folder: Path, agent: FakeAgent, **options: Any) -> None:
        self.agent = agent
        self.traces = folder / "trace"
        self.traces.mkdir(exist_ok=True)
        self.reports: list[PressReport] = []
        self.acks: list[Any] = []
        self.lane = StopLane(
            agent.path, log=Log(folder / "log", self.traces, "lane"), on_press=self.reports.append,
            on_ack=lambda request, answer: self.acks.append((request, answer)), **options,
        )  # fmt: skip
        self.lane.start()
        until(lambda: self.lane.connected)

    def records(self, ev: Ev) -> list[Any]:
        return [record for record in read_trace(self.traces, TASK) if record.ev == ev]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path / "a.sock") as agent:
        yield agent


@pytest.fixture
def rig(tmp_path: Path, agent: FakeAgent) -> Iterator[Rig]:
    rig = Rig(tmp_path, agent)
    yield rig
    rig.lane.close()


def test_nothing_is_stopped_without_an_aim(rig: Rig, agent: FakeAgent) -> None:
    assert not rig.lane.press("escape", time.monotonic_ns())
    assert not rig.reports
    assert not agent.cancels


def test_a_press_sends_one_cancel_and_traces_it(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("task", TASK)
    at = time.monotonic_ns()
    assert rig.lane.press("escape", at)
    assert rig.reports[0].sent
    until(lambda: len(rig.acks) == 1)
    assert (rig.acks[0][0], rig.acks[0][1].task) == (rig.reports[0].request, TASK)
    assert [seen.request.t_ui for seen in agent.cancels] == [at]
    until(lambda: bool(rig.records(Ev.ACKED)))
    assert rig.records(Ev.PRESSED)[0].mono == at
    assert rig.records(Ev.SENT)[0].data["route"] == "lane"


def test_the_lane_sends_while_the_main_thread_sleeps(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("task", TASK)
    # The main thread, where the UI loop would run, does nothing at all for a second.
    threading.Timer(0.2, lambda: rig.lane.press("ctrl+c", time.monotonic_ns())).start()
    begin = time.monotonic_ns()
    time.sleep(1.0)
    woke = time.monotonic_ns()
    assert begin < agent.cancels[0].at < woke
    assert rig.acks


def test_from_press_to_agent_it_takes_milliseconds(rig: Rig, agent: FakeAgent) -> None:
    took = []
    for n in range(30):
        task = f"01J00000000000000000000{n:03d}"
        rig.lane.aim("task", task)
        at = time.monotonic_ns()
        rig.lane.press("escape", at)
        until(lambda n=n: len(rig.acks) == n + 1)
        took.append((agent.cancels[-1].at - at) / 1e6)
    assert statistics.median(took) < 50


def test_a_held_key_is_one_cancel(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("task", TASK)
    base = time.monotonic_ns()
    swallowed = []
    # One press, the keyboard's delay of half a second, then thirty a second.
    for at in [0.0, *(0.5 + n / 30 for n in range(20))]:
        stamp = base + int(at * 1e9)
        swallowed.append(rig.lane.holds("escape", stamp))
        rig.lane.press("escape", stamp)
    until(lambda: bool(rig.acks))
    time.sleep(0.3)
    assert [report.press for report in rig.reports] == [Press.STOP]
    assert len(agent.cancels) == 1
    assert swallowed == [False, False, *[True] * 19]


def test_a_second_deliberate_press_forces(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("task", TASK)
    rig.lane.press("escape", time.monotonic_ns() - 600_000_000)
    rig.lane.press("escape", time.monotonic_ns())
    until(lambda: len(rig.acks) == 2)
    assert [seen.request.mode for seen in agent.cancels] == ["graceful", "force"]


def test_a_lost_acknowledgement_is_asked_for_again(rig: Rig, agent: FakeAgent) -> None:
    agent.script.drop_acks = 1
    rig.lane.aim("task", TASK)
    rig.lane.press("escape", time.monotonic_ns())
    until(lambda: bool(rig.acks))
    assert len({seen.request.id for seen in agent.cancels}) == 1
    assert len(agent.effects) == 1
    assert rig.records(Ev.RETRIED)


def test_a_cut_connection_is_made_again(rig: Rig, agent: FakeAgent) -> None:
    agent.script.cut_after_cancel = 1
    rig.lane.aim("task", TASK)
    rig.lane.press("escape", time.monotonic_ns())
    until(lambda: bool(rig.acks))
    assert agent.control_connections >= 2


def test_http_when_control_is_deaf(rig: Rig, agent: FakeAgent) -> None:
    agent.script.drop_cancels = 1000
    rig.lane.aim("task", TASK)
    rig.lane.press("escape", time.monotonic_ns())
    until(lambda: bool(rig.acks))
    assert [seen.route for seen in agent.cancels] == ["http"]


def test_an_acknowledgement_that_comes_after_the_end_is_still_recorded(rig: Rig, agent: FakeAgent) -> None:
    agent.script.drop_acks = 1
    rig.lane.aim("task", TASK)
    rig.lane.press("escape", time.monotonic_ns())
    until(lambda: bool(agent.cancels))
    rig.lane.settled(TASK)
    late = m.CancelNoop(re=rig.reports[0].request, task=TASK, state="cancelled")
    agent.tell(late)
    until(lambda: bool(rig.records(Ev.ACKED)))
    assert rig.acks == [(rig.reports[0].request, late)]


def test_an_overlay_has_a_quarter_second_to_take_the_key(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("dismiss", TASK)
    assert not rig.lane.press("escape", time.monotonic_ns())
    rig.lane.taken()
    time.sleep(0.35)
    assert not agent.cancels
    pressed = time.monotonic_ns()
    assert not rig.lane.press("escape", pressed)
    until(lambda: bool(rig.acks))
    assert 240e6 < agent.cancels[0].at - pressed < 1000e6


def test_ctrl_c_stops_through_an_overlay(rig: Rig, agent: FakeAgent) -> None:
    rig.lane.aim("dismiss", TASK)
    assert rig.lane.press("ctrl+c", time.monotonic_ns())
    until(lambda: len(agent.cancels) == 1)


def test_a_new_agent_gets_the_cancel_that_the_old_one_did_not_answer(rig: Rig, tmp_path: Path) -> None:
    rig.agent.script.drop_cancels = 1000
    rig.agent.script.http_deaf = True
    with FakeAgent(tmp_path / "b.sock") as second:
        rig.lane.aim("task", TASK)
        rig.lane.press("escape", time.monotonic_ns())
        rig.lane.retarget(second.path)
        until(lambda: bool(rig.acks))
        assert second.cancels


def test_a_press_before_the_agent_listens_is_delivered_later(tmp_path: Path) -> None:
    path = tmp_path / "late.sock"
    agent = FakeAgent(path)
    lane = StopLane(path, log=Log(tmp_path / "log", tmp_path, "lane"))
    lane.start()
    lane.aim("task", TASK)
    lane.press("escape", time.monotonic_ns())
    with agent:
        until(lambda: bool(agent.cancels))
        lane.close()


def test_a_callback_that_fails_does_not_reach_the_input_thread(tmp_path: Path, agent: FakeAgent) -> None:
    def fail(report: PressReport) -> None:
        raise RuntimeError("the loop is closed")

    lane = StopLane(agent.path, log=Log(tmp_path / "log", tmp_path, "lane"), on_press=fail)
    lane.start()
    until(lambda: lane.connected)
    lane.aim("task", TASK)
    assert lane.press("escape", time.monotonic_ns())
    until(lambda: bool(agent.cancels))
    lane.close()


def test_the_lane_shows_no_token_and_asks_for_no_session(rig: Rig, agent: FakeAgent) -> None:
    until(lambda: bool(agent.hellos))
    assert agent.authorizations == [""]
    assert agent.hellos[0].session == ""
    assert isinstance(agent.hellos[0], m.Hello)
