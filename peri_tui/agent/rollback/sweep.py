"""Clear a dead or failed task's temporary names away; what an exchange took out and a crash left there goes back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Final

from peri_tui.agent.rollback import calls, place
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.journal import AnyRecord, Intent, Seen, of_kind
from peri_tui.agent.rollback.node import State, observe, same
from peri_tui.agent.rollback.vault import Vault
from peri_tui.errors import PeriError

_NAME: Final = re.compile(rb"\.peri-(?P<task>[A-Za-z0-9_-]+)-(?P<back>r?)(?P<seq>\d+)(?P<part>\.w|\.o)?\Z")

MakeKeep = Callable[[bytes], place.Keep]


def sweep(
    root: Root, vault: Vault, task: str, records: Sequence[AnyRecord], keeper: MakeKeep
) -> dict[bytes, str]:
    """Remove every temporary name of ``task`` from the folders it worked in; returns those left, with the reason."""
    left: dict[bytes, str] = {}
    intents = {intent.seq: intent for intent in of_kind(records, Intent)}
    for rel in sorted({intent.path.rpartition(b"/")[0] for intent in intents.values()}):
        try:
            folder = root.open_dir(rel)
        except OSError:
            continue  # gone or replaced: nothing of ours is in there
        try:
            for name in map(os.fsencode, os.listdir(folder)):
                match = _NAME.match(name)
                if match is not None and match["task"] == task.encode():
                    intent = intents.get(int(match["seq"]))
                    try:
                        _clear(folder, name, match, intent, vault, records, keeper)
                    except (OSError, PeriError) as error:
                        left[rel + b"/" + name if rel else name] = str(error).splitlines()[0]
        finally:
            os.close(folder)
    return left


def _clear(
    folder: int,
    temp: bytes,
    match: re.Match[bytes],
    intent: Intent | None,
    vault: Vault,
    records: Sequence[AnyRecord],
    keeper: MakeKeep,
) -> None:
    if match["part"] == b".w":
        calls.unlink(folder, temp)
        return
    state = observe(folder, temp)
    known = _states(records, intent.path) if intent else []
    path = intent.path if intent else temp
    if any(same(state, one) for one in known) and (state.kind != "file" or state.sha in vault.store):
        calls.unlink(folder, temp)
    elif intent is None or match["part"]:
        keeper(path)(folder, temp)
    else:
        ours = _base(records, intent.path) if match["back"] else intent.post
        place.give_back_after_crash(folder, path.rpartition(b"/")[2], temp, ours, keeper(path))


def _states(records: Sequence[AnyRecord], path: bytes) -> list[State]:
    found = [state for one in of_kind(records, Intent) if one.path == path for state in (one.pre, one.post)]
    return found + [seen.state for seen in of_kind(records, Seen) if seen.path == path]


def _base(records: Sequence[AnyRecord], path: bytes) -> State:
    return next(intent.pre for intent in of_kind(records, Intent) if intent.path == path)
