"""The gate: who may read and stop, who may write, who may not come in."""

from __future__ import annotations

from typing import Any

import pytest

from peri_tui.agent.access import Admitted, Refused, admit

pytestmark = pytest.mark.unit

TOKEN = "t" * 43


def judge(**changed: Any) -> Admitted | Refused:
    facts: dict[str, Any] = {
        "peer_uid": 1000, "own_uid": 1000, "hosts": ["localhost"], "origins": [], "authorizations": [f"Bearer {TOKEN}"],
    }  # fmt: skip
    return admit(TOKEN, **(facts | changed))


def test_the_token_may_write_and_the_same_user_without_it_may_read_and_stop() -> None:
    assert judge() == Admitted(may_write=True)
    assert judge(authorizations=[]) == Admitted(may_write=False)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"peer_uid": 1001}, 403),
        ({"peer_uid": -1}, 403),
        ({"origins": ["https://evil.example"]}, 403),
        ({"origins": ["null"]}, 403),
        ({"origins": ["http://localhost"]}, 403),
        ({"hosts": ["evil.example"]}, 403),
        ({"hosts": ["localhost.evil.example"]}, 403),
        ({"hosts": []}, 403),
        ({"hosts": ["localhost", "localhost"]}, 403),
        ({"authorizations": ["Bearer wrong"]}, 401),
        ({"authorizations": ["Bearer "]}, 401),
        ({"authorizations": [""]}, 401),
        ({"authorizations": [f"Basic {TOKEN}"]}, 401),
        ({"authorizations": ["Bearer é"]}, 401),
        ({"authorizations": ["Bearer \udcff"]}, 401),
        ({"authorizations": [f"Bearer {TOKEN}x"]}, 401),
        ({"authorizations": [f"Bearer {TOKEN}", f"Bearer {TOKEN}"]}, 400),
    ],
)
def test_everything_else_is_refused(changed: dict[str, Any], status: int) -> None:
    judged = judge(**changed)
    assert isinstance(judged, Refused)
    assert judged.status == status


def test_every_wrong_token_gets_the_same_words() -> None:
    answers = {judge(authorizations=[f"Bearer {wrong}"]) for wrong in ("", "x", "t" * 42, "u" * 43)}
    assert len(answers) == 1
