"""The cancel trace: what each layer says of one stop, and which layer dropped it.

Records are appended by the processes that saw them (client and agent, same host, so ``mono`` compares) to one file a
task. ``diagnose`` is pure: it reads the records of one cancel and names the first thing that should be there and is
not. A layer is acknowledged only by its *evidence* record, never by one that says what it meant to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final

import msgspec


class Layer(IntEnum):
    """The five layers between the key press and a quiet machine."""

    UI = 1
    CLIENT = 2
    SCHEDULER = 3
    MODEL = 4
    ROLLBACK = 5

    @property
    def title(self) -> str:
        """The word for people."""
        return self.name.capitalize() if self is not Layer.UI else "UI"


class Ev(StrEnum):
    """Every event a trace may hold; the order is the order of a good stop."""

    PRESSED = "pressed"
    PAINTED = "painted"
    SENT = "sent"
    RETRIED = "retried"
    RECONNECTED = "reconnected"
    ESCALATED = "escalated"
    ACKED = "acked"
    RECEIVED = "received"
    CAS = "cas"
    ROUTED = "routed"
    TOKEN_SET = "token_set"
    TASK_UNWOUND = "task_unwound"
    SOCKET_SHUTDOWN = "socket_shutdown"
    MODEL_QUIET = "model_quiet"
    FAR_END = "far_end"
    TREE_SIGNALLED = "tree_signalled"
    TREE_EMPTY = "tree_empty"
    TREE_SURVIVED = "tree_survived"
    ROLLBACK_BEGUN = "rollback_begun"
    FILE = "file"
    ROLLBACK_DONE = "rollback_done"
    CLEANUP = "cleanup"
    RESOURCES_CLEAN = "resources_clean"
    ENDED = "ended"
    LATE = "late"


class TraceRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of a trace file. ``mono`` is monotonic nanoseconds of this host, ``ts`` wall-clock seconds."""

    task: str
    layer: int
    ev: str
    mono: int
    ts: float = 0
    src: str = ""
    cancel_id: str = ""
    data: dict[str, Any] = {}


class LayerReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One layer's lamp: acknowledged or not, when (ms since the key press), and in words."""

    layer: int
    ok: bool
    ms: float | None = None
    said: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Expectation:
    """An event that a good stop has, and what its absence means."""

    layer: Layer
    ev: Ev
    absence: str


# The chain of a stop; the first absent link names the layer. ``good`` is checked by ``_holds``.
CHAIN: Final[Sequence[Expectation]] = (
    Expectation(Layer.UI, Ev.PRESSED, "no key press or command was recorded"),
    Expectation(Layer.UI, Ev.PAINTED, "the UI loop is blocked: the press was taken, nothing was painted"),
    Expectation(Layer.CLIENT, Ev.SENT, "the client never sent the cancel"),
    Expectation(Layer.SCHEDULER, Ev.RECEIVED, "the cancel did not reach the agent"),
    Expectation(Layer.SCHEDULER, Ev.CAS, "the state store did not take the compare-and-set"),
    Expectation(Layer.SCHEDULER, Ev.TOKEN_SET, "the task's owner was not told"),
    Expectation(Layer.CLIENT, Ev.ACKED, "the agent's acknowledgement did not come back"),
    Expectation(Layer.SCHEDULER, Ev.TASK_UNWOUND, "the task's own code did not unwind"),
    Expectation(Layer.MODEL, Ev.MODEL_QUIET, "a connection to the model is still open"),
    Expectation(Layer.ROLLBACK, Ev.TREE_EMPTY, "processes of the task are alive"),
    Expectation(Layer.ROLLBACK, Ev.ROLLBACK_DONE, "the files are not verified"),
    Expectation(Layer.ROLLBACK, Ev.RESOURCES_CLEAN, "a cleanup did not end"),
    Expectation(Layer.SCHEDULER, Ev.ENDED, "the end of the task was not recorded"),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What ``diagnose`` found: five lamps, and the first gap, if any."""

    layers: tuple[LayerReport, ...]
    failed: Layer | None
    missing: str
    last_before: str
    elapsed_ms: float

    @property
    def complete(self) -> bool:
        """True when every layer acknowledged."""
        return self.failed is None


def diagnose(records: Iterable[TraceRecord], *, headless: bool = False) -> Diagnosis:
    """Return the lamps of one stop and the first layer whose evidence is missing.

    Args:
        records: the records of one task, in any order; times are compared by ``mono``.
        headless: there is no screen, so nothing has to be painted.
    """
    ordered = sorted(records, key=lambda record: record.mono)
    start = next((record.mono for record in ordered if record.ev == Ev.PRESSED), None)
    start = start if start is not None else (ordered[0].mono if ordered else 0)
    gaps = [gap for gap in CHAIN if not (headless and gap.ev is Ev.PAINTED) and not _holds(gap, ordered)]
    first = gaps[0] if gaps else None
    last = ordered[-1] if ordered else None
    return Diagnosis(
        layers=tuple(_lamp(layer, ordered, gaps, start, headless) for layer in Layer),
        failed=first.layer if first else None,
        missing=first.absence if first else "",
        last_before=f"{Layer(last.layer).title} {last.ev}" if last else "",
        elapsed_ms=(last.mono - start) / 1e6 if last else 0.0,
    )


def _holds(gap: Expectation, records: Sequence[TraceRecord]) -> bool:
    found = [record for record in records if record.ev == gap.ev and record.layer == gap.layer]
    # ``ok`` is absent on records that are facts by themselves; the newest word counts (a retry may heal).
    return bool(found) and found[-1].data.get("ok", True) is True


def _lamp(
    layer: Layer, records: Sequence[TraceRecord], gaps: Sequence[Expectation], start: int, headless: bool
) -> LayerReport:
    missing = next((gap.absence for gap in gaps if gap.layer is layer), "")
    wanted = [e.ev for e in CHAIN if e.layer is layer and not (headless and e.ev is Ev.PAINTED)]
    seen = [record for record in records if record.layer == layer and record.ev in wanted]
    said = next((str(record.data["said"]) for record in reversed(seen) if record.data.get("said")), "")
    ms = (seen[-1].mono - start) / 1e6 if seen else None
    return LayerReport(layer=int(layer), ok=not missing, ms=ms, said=said, missing=missing)
