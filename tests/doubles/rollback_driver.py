"""Ends a process at its n-th file-changing call, in work or in recovery, and checks what the next start makes of it.

Run as ``python -m tests.doubles.rollback_driver SCENARIO FOLDER FIRST STEP``: for n = FIRST, FIRST + STEP, … until the
work ends by itself it builds a workspace, forks a child that is killed before its n-th call, recovers, compares, and
prints one JSON line: how many points there were, and what differed. Forking happens here, in a process without
threads, and never in the test runner.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.recover import pending, recover, undo
from peri_tui.agent.rollback.transaction import Transaction
from peri_tui.config import Paths
from tests.doubles.workspace import CONTENTS, Survey, build_workspace, differences, paths_in, survey

Act = Callable[[Path, Paths], None]


class Killer:
    """A probe that ends this process with SIGKILL before its n-th call; a write is cut in half first."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, name: str, args: tuple) -> None:
        self.left -= 1
        if self.left > 0:
            return
        if name == "write":
            os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
        elif name == "pwrite":
            os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
        os.kill(os.getpid(), signal.SIGKILL)


def dies_at(number: int, act: Act, ws: Path, paths: Paths) -> bool:
    """Run ``act`` in a child that ends before its ``number``-th call; False when it got to its end first."""
    child = os.fork()
    if child == 0:
        try:
            calls.set_probe(Killer(number))
            act(ws, paths)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the work failed by itself"
    return False


def work(ws: Path, paths: Paths) -> None:
    """A task of every kind of edit that ends by a rollback."""
    edit_all(ws, paths).rollback()


def work_and_keep(ws: Path, paths: Paths) -> None:
    """The same, kept, then undone."""
    edit_all(ws, paths).keep()
    undo(paths, ws, "CRASH")


def edit_all(ws: Path, paths: Paths) -> Transaction:
    """Make a task with one edit of each kind."""
    task = Transaction.open(paths, ws, "CRASH")
    task.edit("crlf.txt", b"agent\r\n", expected_sha=None)
    task.edit("plain.txt", b"in place, longer than before\n", expected_sha=None)
    task.edit("new/er/file", b"new", expected_sha="")
    task.edit("bom.txt", None, expected_sha=None)
    task.edit("link", None, expected_sha=None)
    task.edit("crlf.txt", b"agent again", expected_sha=None)
    task.edit("private", b"", expected_sha=None)
    task.edit("sub/second name", None, expected_sha=None)
    return task


def put_back(ws: Path, paths: Paths) -> None:
    """What the next start does."""
    recover(paths)


def check(ws: Path, paths: Paths, before: Survey, *, kept: Survey | None = None) -> list[str]:
    """Recover until done; return what is wrong."""
    wrong = [f"not complete: {one}" for one in recover(paths) if not one.complete]
    after = survey(ws)
    if kept is None or differences(kept, after):
        wrong += differences(before, after)
    wrong += [f"left: {path}" for path in ws.rglob(".peri-*")]
    wrong += [f"pending: {one}" for one in pending(paths)]
    writes: list[str] = []
    calls.set_probe(lambda name, args: writes.append(name))
    wrong += [f"not idempotent: {one}" for one in recover(paths)]
    calls.set_probe(None)
    return wrong + [f"a second recovery called {name}" for name in writes]


def fresh(folder: Path) -> tuple[Path, Paths, Survey]:
    """Build a new workspace and empty Peri folders."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ws = build_workspace(folder / "ws")
    return ws, paths_in(folder / "home"), survey(ws)


def sweep_work(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Die in the task or its rollback, then recover."""
    ws, paths, before = fresh(folder)
    died = dies_at(number, work, ws, paths)
    return died, check(ws, paths, before)


def sweep_undo(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Die in a task that is kept, or in its undo: all as before, or all as the task left it."""
    ws, paths, _ = fresh(folder)
    edit_all(ws, paths).keep()
    kept = survey(ws, times=True)
    undo(paths, ws, "CRASH")
    before = survey(ws)
    shutil.rmtree(paths.state)
    died = dies_at(number, work_and_keep, ws, paths)
    wrong = [f"not complete: {one}" for one in recover(paths) if not one.complete]
    names = {path: row[:4] for path, row in survey(ws, times=False).items()}
    same_names = names in ({p: r[:4] for p, r in before.items()}, {p: r[:4] for p, r in kept.items()})
    return died, wrong + ([] if same_names else ["neither before nor after"])


def sweep_recovery(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Leave a task unfinished at an arbitrary point, die in its recovery, then recover."""
    ws, paths, before = fresh(folder)
    in_work, in_recovery = divmod(number, 50)
    dies_at(20 + in_work * 6, work, ws, paths)
    dies_at(in_recovery + 1, put_back, ws, paths)
    return in_work < 22, check(ws, paths, before)


def sweep_many(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Four deaths in a row at random points."""
    rng = random.Random(number)
    ws, paths, before = fresh(folder)
    dies_at(rng.randrange(1, 150), work, ws, paths)
    for _ in range(3):
        dies_at(rng.randrange(1, 60), put_back, ws, paths)
    return number < 500, check(ws, paths, before)


def sweep_user(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Die in the task, then the user saves a file before the next start: theirs stays."""
    ws, paths, before = fresh(folder)
    died = dies_at(number, lambda ws, paths: edit_all(ws, paths)._end("left"), ws, paths)
    (ws / "crlf.txt.new").write_bytes(b"user")
    (ws / "crlf.txt.new").rename(ws / "crlf.txt")
    wrong = [f"not complete: {one}" for one in recover(paths) if not one.complete]
    if (ws / "crlf.txt").read_bytes() != b"user":
        wrong.append("the user's bytes are gone")
    skip = (b"/crlf.txt", b"")
    after = {path: row for path, row in survey(ws).items() if path not in skip}
    wrong += differences({path: row for path, row in before.items() if path not in skip}, after)
    return died, wrong


def sweep_store(folder: Path, number: int) -> tuple[bool, list[str]]:
    """Die in a task, then go on with another one on the same store: its backups are good."""
    ws, paths, before = fresh(folder)
    died = dies_at(number, lambda ws, paths: edit_all(ws, paths)._end("left"), ws, paths)
    wrong = check(ws, paths, before)
    task = Transaction.open(paths, ws, "NEXT")
    task.edit("crlf.txt", b"next", expected_sha=None)
    wrong += [] if task.rollback().complete else ["the next task is not restored"]
    return died, wrong + differences(before, survey(ws))


SCENARIOS = {
    "work": sweep_work,
    "undo": sweep_undo,
    "recovery": sweep_recovery,
    "many": sweep_many,
    "user": sweep_user,
    "store": sweep_store,
}


def main() -> None:
    """Run one scenario and print the result."""
    scenario, folder = SCENARIOS[sys.argv[1]], Path(sys.argv[2])
    number, step, limit = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    points, wrong = 0, []
    alive = True
    while alive and points < limit:
        alive, found = scenario(folder / f"at{number % 2}", number)
        wrong += [f"{number}: {line}" for line in found]
        points, number = points + 1, number + step
    print(json.dumps({"points": points, "last": number - step, "wrong": wrong, "contents": len(CONTENTS)}))


if __name__ == "__main__":
    main()
