"""When the guard looks, what it says, and what a limit is when nobody set one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.agent.processes.guard import LimitReport, Limits, default_memory
from peri_tui.agent.processes.warden import GUARD_IDLE_S, GUARD_MIN_S, GUARD_SHARE, Guard

pytestmark = pytest.mark.unit

MIB = 1 << 20
GIB = 1 << 30


def used(memory: float = 0, processes: int = 1, cpu: float = 0.0) -> dict[str, float]:
    return {"memory": memory, "processes": processes, "cpu": cpu}


def test_each_level_is_told_once_with_value_and_limit() -> None:
    guard = Guard({"memory": 100 * MIB}, 0.0)
    assert guard.see(used(70 * MIB), 1.0, 0) == []
    assert guard.see(used(80 * MIB), 2.0, 0) == [("memory", 80 * MIB, 100 * MIB, "warn")]
    assert guard.see(used(90 * MIB), 3.0, 0) == []
    assert guard.see(used(101 * MIB), 4.0, 0) == [("memory", 101 * MIB, 100 * MIB, "limit")]
    assert guard.see(used(50 * MIB), 5.0, 0) == []
    assert guard.see(used(120 * MIB), 6.0, 0) == []
    assert guard.see(used(125 * MIB), 7.0, 0) == [("memory", 125 * MIB, 100 * MIB, "hard")]
    assert guard.see(used(500 * MIB), 8.0, 0) == []


def test_a_jump_tells_the_highest_level_only() -> None:
    assert [level for *_, level in Guard({"memory": MIB}, 0.0).see(used(9 * MIB), 1.0, 0)] == ["hard"]


def test_time_starts_with_the_command_and_is_never_hard() -> None:
    guard = Guard({"seconds": 10}, 100.0)
    assert guard.see(used(), 107.9, 0) == []
    assert guard.see(used(), 108.0, 0) == [("seconds", 8.0, 10, "warn")]
    assert guard.see(used(), 110.0, 0) == [("seconds", 10.0, 10, "limit")]
    assert guard.see(used(), 200.0, 0) == []


def test_what_has_no_limit_is_not_looked_for() -> None:
    assert Guard({}, 0.0).pause(5.0) is None
    assert Guard({"memory": 0, "nonsense": 3}, 0.0).pause(5.0) is None
    assert Guard({"processes": 5}, 0.0).pause(0.0) is not None


def test_other_limits_are_taken_and_told_anew() -> None:
    guard = Guard({"seconds": 1}, 0.0)
    assert [level for *_, level in guard.see(used(), 5.0, 0)] == ["limit"]
    guard.set({}, 5.0)
    assert guard.pause(6.0) is None
    guard.set({"seconds": 6}, 5.0)
    assert [level for *_, level in guard.see(used(), 7.0, 0)] == ["limit"]


def test_far_from_the_limit_it_looks_twice_a_second_and_near_it_a_hundred_times() -> None:
    guard = Guard({"memory": 100 * GIB}, 0.0)
    guard.see(used(GIB), 1.0, 0)
    assert guard.due == 1.0 + GUARD_IDLE_S
    guard.see(used(100 * GIB - 100), 2.0, 0)
    assert guard.due == 2.0 + GUARD_MIN_S


def test_the_next_look_is_at_half_of_the_predicted_time() -> None:
    guard = Guard({"memory": 100 * GIB}, 0.0)
    guard.see(used(10 * GIB), 1.0, 0)
    guard.see(used(60 * GIB), 2.0, 0)  # 50 GiB a second, 40 left
    assert guard.due == pytest.approx(2.4)


def test_a_dear_look_is_not_repeated_all_the_time() -> None:
    guard = Guard({"memory": 100 * MIB}, 0.0)
    guard.see(used(99 * MIB), 1.0, cost=0.2)
    assert guard.due == 1.0 + 0.2 * GUARD_SHARE


@given(st.floats(1e6, 40e9), st.floats(1e7, 2e9), st.floats(0, 3))
def test_a_hog_within_the_assumed_pace_never_overshoots_by_more_than_one_look(
    limit: float, pace: float, idle: float
) -> None:
    guard = Guard({"memory": limit}, 0.0)
    now, overshoot = 0.0, 0.0
    for _ in range(100_000):
        now = guard.due
        value = max(0.0, now - idle) * pace
        if any(level != "warn" for *_, level in guard.see(used(value), now, 0)):
            overshoot = value - limit
            break
    assert 0 <= overshoot <= pace * GUARD_MIN_S * 1.01 + 1


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            LimitReport("T", "python hog.py", "memory", 3 * GIB // 2, GIB, "limit"),
            "over the limit: its processes use about 1.5 GiB of memory, 1.0 GiB are allowed",
        ),
        (
            LimitReport("T", "x", "processes", 410, 512, "warn"),
            "near the limit: it runs 410 processes, 512 are allowed",
        ),
        (
            LimitReport("T", "x", "seconds", 1800, 1800, "limit"),
            "over the limit: a command runs since 30 min, 30 min are allowed",
        ),
        (
            LimitReport("T", "x", "cpu", 61.2, 60, "limit"),
            "over the limit: a command used 61 s of processor time, 60 s are allowed",
        ),
        (
            LimitReport("T", "x", "output", 300 * MIB, 200 * MIB, "limit"),
            "over the limit: a command printed 300 MiB, 200 MiB are allowed",
        ),
    ],
)
def test_a_report_is_one_line_with_value_and_limit(report: LimitReport, text: str) -> None:
    assert report.text == text


@pytest.mark.parametrize(
    ("total", "free", "limit"), [(16, 12, 8), (16, 4, 3), (16, 1, 0.25), (1, 1, 0.25), (64, 60, 32)]
)
def test_the_usual_memory_is_half_or_what_is_free_less_one(
    tmp_path: Path, total: int, free: int, limit: float
) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {total * MIB} kB\nMemFree: 1 kB\nMemAvailable:  {free * MIB} kB\n")
    assert default_memory(str(file)) == limit * GIB


def test_where_the_system_does_not_tell_there_is_no_limit(tmp_path: Path) -> None:
    assert default_memory(str(tmp_path / "none")) == 0
    (tmp_path / "odd").write_text("nothing here\n")
    assert default_memory(str(tmp_path / "odd")) == 0


def test_the_supervisor_is_told_what_it_can_see() -> None:
    assert Limits(memory=1, processes=2, seconds=3, cpu=4, output=5).wire == {
        "memory": 1, "processes": 2, "seconds": 3, "cpu": 4,
    }  # fmt: skip
