"""The words of a stop: the proof comes first, our own helpers are not counted, each fate of a file is named."""

from __future__ import annotations

import pytest

from peri_tui.agent.stopping import SUPERVISOR, describe_files, describe_processes
from peri_tui.core.messages import Files

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([], "0 processes left"),
        ([SUPERVISOR], "0 processes left"),
        (["/bin/bash -c 'sleep 6'", "sleep", SUPERVISOR], "0 processes left, 2 ended (bash, sleep)"),
        (["a", "b", "c", "d", "e"], "0 processes left, 5 ended (a, b, c, d, …)"),
    ],
)
def test_what_became_of_processes(commands: list[str], words: str) -> None:
    assert describe_processes(commands) == words


def test_without_proof_the_words_claim_none() -> None:
    assert describe_processes([], proven=False) == "0 known processes left (best effort)"
    assert (
        describe_processes(["/bin/sleep 9"], proven=False)
        == "0 known processes left (best effort), 1 ended (sleep)"
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (Files(), "no file was changed"),
        (Files(restored=["a"]), "1 file restored"),
        (Files(restored=["a", "b"], conflicts=["c"]), "2 files restored, 1 left as you changed them"),
        (Files(kept=["a"]), "1 kept by choice"),
        (Files(not_restored=["a", "b"]), "2 changed by commands: not restored"),
    ],
)
def test_what_became_of_files(files: Files, words: str) -> None:
    assert describe_files(files) == words
