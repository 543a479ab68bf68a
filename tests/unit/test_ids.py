from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.ids import is_ulid, make_ulid

pytestmark = pytest.mark.unit

MILLIS = st.integers(0, 2**48 - 1)
RANDOM = st.binary(min_size=10, max_size=10)


def test_known_values() -> None:
    assert make_ulid(0, bytes(10)) == "0" * 26
    assert make_ulid(2**48 - 1, b"\xff" * 10) == "7" + "Z" * 25
    # The example of the ULID specification: 01ARZ3NDEKTSV4RRFFQ69G5FAV is 2016-07-30T22:36:16.205Z... in its first ten.
    assert make_ulid(1469922850259, bytes(10))[:10] == "01ARZ3NDEK"


@given(MILLIS, RANDOM)
def test_made_ids_are_canonical(millis: int, randomness: bytes) -> None:
    assert is_ulid(make_ulid(millis, randomness))


@given(MILLIS, MILLIS, RANDOM, RANDOM)
def test_ids_sort_by_time(one: int, two: int, first: bytes, second: bytes) -> None:
    if one != two:
        assert (make_ulid(one, first) < make_ulid(two, second)) == (one < two)


@given(MILLIS, RANDOM, RANDOM)
def test_other_randomness_is_another_id(millis: int, one: bytes, two: bytes) -> None:
    assert (make_ulid(millis, one) == make_ulid(millis, two)) == (one == two)


@pytest.mark.parametrize(
    "text",
    ["", "0" * 25, "0" * 27, "8" + "0" * 25, "0" * 25 + "i", "0" * 25 + "I", "0" * 25 + "U", "0" * 25 + "\u0660",
     "01arz3ndektsv4rrffq69g5fav", "../../../../../../../../..", "0" * 25 + "\n"],
)  # fmt: skip
def test_what_is_no_canonical_ulid(text: str) -> None:
    assert not is_ulid(text)


@given(st.text(max_size=30))
def test_any_text_is_judged(text: str) -> None:
    assert is_ulid(text) in (True, False)
