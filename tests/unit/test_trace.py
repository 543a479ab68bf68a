from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.trace import CHAIN, Ev, Layer, TraceRecord, diagnose

pytestmark = pytest.mark.unit


def record(layer: int, ev: str, at_ms: float, **data: Any) -> TraceRecord:
    return TraceRecord(task="T", layer=layer, ev=ev, mono=round(at_ms * 1e6), data=data)


def good_stop() -> list[TraceRecord]:
    return [record(link.layer, link.ev, 1000 + n) for n, link in enumerate(CHAIN)]


def test_a_good_stop_has_five_lamps() -> None:
    diagnosis = diagnose(good_stop())
    assert diagnosis.complete
    assert diagnosis.failed is None
    assert diagnosis.missing == ""
    assert [lamp.layer for lamp in diagnosis.layers] == [1, 2, 3, 4, 5]
    assert all(lamp.ok and lamp.missing == "" and lamp.ms is not None for lamp in diagnosis.layers)
    assert diagnosis.elapsed_ms == pytest.approx(len(CHAIN) - 1)


@pytest.mark.parametrize("index", range(len(CHAIN)), ids=[f"{link.ev}" for link in CHAIN])
def test_each_missing_link_names_its_layer(index: int) -> None:
    link = CHAIN[index]
    diagnosis = diagnose(r for r in good_stop() if not (r.ev == link.ev and r.layer == link.layer))
    assert not diagnosis.complete
    assert diagnosis.failed is link.layer
    assert diagnosis.missing == link.absence
    lamps = {lamp.layer: lamp for lamp in diagnosis.layers}
    assert not lamps[link.layer].ok
    assert lamps[link.layer].missing == link.absence
    assert all(lamp.ok for layer, lamp in lamps.items() if layer != link.layer)


@pytest.mark.parametrize("index", range(len(CHAIN)), ids=[f"{link.ev}" for link in CHAIN])
def test_each_link_that_says_not_ok_is_missing(index: int) -> None:
    link = CHAIN[index]
    records = good_stop()
    records[index] = record(link.layer, link.ev, 1000 + index, ok=False)
    assert diagnose(records).missing == link.absence


@pytest.mark.parametrize("index", range(len(CHAIN)), ids=[f"{link.ev}" for link in CHAIN])
def test_a_stop_that_broke_off_names_the_next_link(index: int) -> None:
    diagnosis = diagnose(good_stop()[:index])
    assert diagnosis.failed is CHAIN[index].layer
    assert diagnosis.missing == CHAIN[index].absence
    before = CHAIN[index - 1]
    assert diagnosis.last_before == (f"{before.layer.title} {before.ev}" if index else "")


@pytest.mark.parametrize("truth", [1, "yes", None, 0, "true"])
def test_only_true_is_true(truth: object) -> None:
    records = [r for r in good_stop() if r.ev != Ev.MODEL_QUIET]
    records.append(record(Layer.MODEL, Ev.MODEL_QUIET, 2000, ok=truth))
    assert diagnose(records).failed is Layer.MODEL


def test_the_newest_word_of_a_link_counts() -> None:
    refused = record(Layer.SCHEDULER, Ev.CAS, 1001, ok=False)
    healed = record(Layer.SCHEDULER, Ev.CAS, 1900, ok=True)
    others = [r for r in good_stop() if r.ev != Ev.CAS]
    assert diagnose([*others, refused, healed]).complete
    assert not diagnose([*others, record(3, Ev.CAS, 1002), record(3, Ev.CAS, 1900, ok=False)]).complete


def test_evidence_of_another_layer_does_not_count() -> None:
    records = [r for r in good_stop() if r.ev != Ev.TREE_EMPTY]
    records.append(record(Layer.MODEL, Ev.TREE_EMPTY, 1500))
    assert diagnose(records).failed is Layer.ROLLBACK


@pytest.mark.parametrize(
    ("intent", "link"),
    [
        (Ev.SOCKET_SHUTDOWN, Ev.MODEL_QUIET),
        (Ev.TREE_SIGNALLED, Ev.TREE_EMPTY),
        (Ev.ROLLBACK_BEGUN, Ev.ROLLBACK_DONE),
        (Ev.CLEANUP, Ev.RESOURCES_CLEAN),
        (Ev.ROUTED, Ev.TOKEN_SET),
        (Ev.RETRIED, Ev.ACKED),
    ],
)
def test_an_intent_is_no_evidence(intent: Ev, link: Ev) -> None:
    layer = next(e.layer for e in CHAIN if e.ev is link)
    records = [record(r.layer, intent if r.ev == link else r.ev, r.mono / 1e6, ok=True) for r in good_stop()]
    assert diagnose(records).failed is layer


def test_without_a_screen_nothing_has_to_be_painted() -> None:
    records = [r for r in good_stop() if r.ev != Ev.PAINTED]
    assert diagnose(records, headless=True).complete
    assert diagnose(records).failed is Layer.UI


def test_no_records_at_all() -> None:
    diagnosis = diagnose([])
    assert diagnosis.failed is Layer.UI
    assert (diagnosis.last_before, diagnosis.elapsed_ms) == ("", 0.0)
    assert all(lamp.ms is None and lamp.said == "" for lamp in diagnosis.layers)


def test_without_a_press_times_count_from_the_first_record() -> None:
    diagnosis = diagnose([r for r in good_stop() if r.ev != Ev.PRESSED])
    assert diagnosis.elapsed_ms == pytest.approx(len(CHAIN) - 2)


def test_a_lamp_speaks_the_layers_last_evidence() -> None:
    records = good_stop()
    index = next(n for n, link in enumerate(CHAIN) if link.ev is Ev.MODEL_QUIET)
    records[index] = record(Layer.MODEL, Ev.MODEL_QUIET, 1007.5, said="socket shut down")
    lamp = diagnose(records).layers[3]
    assert (lamp.said, lamp.ms) == ("socket shut down", pytest.approx(7.5))


def test_unknown_events_do_not_disturb() -> None:
    assert diagnose([*good_stop(), record(4, "far_future", 999), record(2, "noise", 5000)]).complete


def test_the_order_of_the_records_does_not_matter() -> None:
    first = good_stop()[:4]
    found = {msgspec.json.encode(diagnose(p).layers) for p in permutations(first)}
    assert len(found) == 1


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(list(Ev)), st.integers(0, 10**12), st.booleans()))
)
def test_any_records_are_diagnosed_and_all_lamps_agree(drawn: list[tuple[int, Ev, int, bool]]) -> None:
    records = [TraceRecord(task="T", layer=a, ev=b, mono=c, data={"ok": d}) for a, b, c, d in drawn]
    diagnosis = diagnose(records)
    assert diagnosis.complete == all(lamp.ok for lamp in diagnosis.layers)
    assert (diagnosis.missing != "") == (diagnosis.failed is not None)


def test_titles() -> None:
    assert [layer.title for layer in Layer] == ["UI", "Client", "Scheduler", "Model", "Rollback"]
