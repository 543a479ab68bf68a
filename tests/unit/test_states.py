from __future__ import annotations

from itertools import product

import pytest

from peri_tui.core import states
from peri_tui.core.states import Refusal, StopReason, TaskState, TaskVersion, exit_code

pytestmark = pytest.mark.unit

# Written out a second time on purpose: a slip in the table must not pass because the test reads the same table.
ARROWS = {
    ("queued", "running"), ("queued", "cancelled"), ("queued", "failed"),
    ("running", "waiting"), ("running", "cancelling"), ("running", "completed"), ("running", "failed"),
    ("waiting", "running"), ("waiting", "cancelling"),
    ("cancelling", "cancelled"), ("cancelling", "failed"), ("cancelling", "cancel_failed"),
    ("cancel_failed", "cancelling"), ("cancel_failed", "cancelled"), ("cancel_failed", "failed"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), list(product(TaskState, TaskState)))
def test_exactly_the_arrows_of_the_design_are_legal(old: TaskState, new: TaskState) -> None:
    record = TaskVersion(old, 7, 3)
    result = record.to(new, version=7, epoch=3)
    if (old.value, new.value) in ARROWS:
        assert result == TaskVersion(new, 8, 3)
    else:
        assert result is Refusal.ILLEGAL
    assert record == TaskVersion(old, 7, 3)


@pytest.mark.parametrize(("old", "new"), list(product(TaskState, TaskState)))
def test_an_older_epoch_is_refused_whatever_the_arrow(old: TaskState, new: TaskState) -> None:
    assert TaskVersion(old, 7, 3).to(new, version=7, epoch=2) is Refusal.STALE_EPOCH
    assert TaskVersion(old, 7, 3).to(new, version=6, epoch=2) is Refusal.STALE_EPOCH


@pytest.mark.parametrize("version", [0, 6, 8])
def test_another_version_is_refused(version: int) -> None:
    assert TaskVersion(TaskState.RUNNING, 7, 3).to(TaskState.CANCELLING, version=version, epoch=3) is (
        Refusal.STALE_VERSION
    )


def test_final_states_have_no_way_out() -> None:
    assert {state for state in TaskState if state.is_final} == {
        TaskState.COMPLETED,
        TaskState.FAILED,
        TaskState.CANCELLED,
    }
    assert all(not states.LEGAL[state] for state in states.FINAL)
    assert set(states.LEGAL) == set(TaskState)


def test_what_can_be_stopped() -> None:
    assert {state.value for state in TaskState if state.is_stoppable} == {
        "queued",
        "running",
        "waiting",
        "cancelling",
    }


def test_limits_are_told_apart() -> None:
    assert {reason.value for reason in StopReason if reason.is_limit} == {
        "limit_turns",
        "limit_tokens",
        "limit_seconds",
        "limit_memory",
        "limit_processes",
        "limit_output",
        "limit_cpu",
    }


@pytest.mark.parametrize(
    ("state", "reason", "options", "code"),
    [
        (TaskState.COMPLETED, None, {}, 0),
        (TaskState.CANCELLED, StopReason.USER, {}, 130),
        (TaskState.CANCELLED, StopReason.USER, {"sigterm": True}, 143),
        (TaskState.CANCELLED, StopReason.SHUTDOWN, {"sigterm": True}, 143),
        (TaskState.CANCELLED, StopReason.LIMIT_SECONDS, {}, 53),
        (TaskState.FAILED, StopReason.LIMIT_TURNS, {}, 53),
        (TaskState.FAILED, StopReason.MODEL_ERROR, {}, 1),
        (TaskState.FAILED, StopReason.MODEL_ERROR, {"auth": True}, 41),
        (TaskState.FAILED, None, {}, 1),
        (TaskState.CANCEL_FAILED, StopReason.USER, {}, 74),
        (TaskState.CANCEL_FAILED, StopReason.LIMIT_TURNS, {"sigterm": True}, 74),
        (TaskState.RUNNING, None, {}, 74),
        (TaskState.QUEUED, None, {}, 74),
        (TaskState.CANCELLING, StopReason.USER, {}, 74),
    ],
)
def test_exit_codes(state: TaskState, reason: StopReason | None, options: dict[str, bool], code: int) -> None:
    assert exit_code(state, reason, **options) == code
