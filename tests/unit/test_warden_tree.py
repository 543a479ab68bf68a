"""What the warden's file sees of a process tree, in this very process; nothing is ever signalled here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from peri_tui.agent.processes import warden
from peri_tui.agent.processes.evidence import ProcessRef, is_alive, text_from_wire, user_name
from peri_tui.agent.processes.warden import Hunt, Seen, Tree, read_stat

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_process_is_read_with_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    one = read_stat(sleeper.pid)
    assert one is not None
    assert (one.pid, one.ppid, one.threads, one.dead) == (sleeper.pid, os.getpid(), 1, False)
    assert is_alive(ProcessRef(one.pid, one.start, "sleep"))
    assert not is_alive(ProcessRef(one.pid, one.start - 1, "the number belonged to another"))


def test_a_zombie_is_dead_and_a_gone_process_is_none(sleeper: subprocess.Popen[bytes]) -> None:
    before = read_stat(sleeper.pid)
    assert before is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    one = read_stat(sleeper.pid)
    assert one is not None
    assert one.dead
    assert not is_alive(ProcessRef(one.pid, one.start, ""))
    sleeper.wait()
    assert read_stat(sleeper.pid) is None
    assert not is_alive(ProcessRef(before.pid, before.start, ""))


def test_a_name_with_brackets_and_spaces_is_read(tmp_path) -> None:
    tool = tmp_path / "a) S (b"
    tool.symlink_to("/bin/sleep")
    with subprocess.Popen([str(tool), "1000"]) as process:
        one = read_stat(process.pid)
        process.kill()
    assert one is not None
    assert one.name == "a) S (b"
    assert one.ppid == os.getpid()


@pytest.mark.parametrize("scan", [False, True])
def test_both_ways_of_walking_see_the_same(sleeper: subprocess.Popen[bytes], scan: bool) -> None:
    assert sleeper.pid in [one.pid for one in Tree(scan).visit()]


def test_what_is_spared_is_not_visited(sleeper: subprocess.Popen[bytes]) -> None:
    tree = Tree(False)
    tree.spare.add(sleeper.pid)
    assert sleeper.pid not in [one.pid for one in tree.visit()]


def test_a_refused_signal_is_the_reason_of_a_survivor(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(warden.os, "kill", refuse)
    monkeypatch.setattr(warden.signal, "pidfd_send_signal", refuse)
    tree = Tree(False)
    [one] = [one for one in tree.visit(signal.SIGKILL) if one.pid == sleeper.pid]
    monkeypatch.undo()
    assert tree.survivor(one) == [one.pid, one.start, "sleep 1000", os.geteuid(), "not permitted"]


def test_a_process_stuck_in_the_kernel_is_said_to_be() -> None:
    stuck = Seen(2**22 + 1, 1, "nfs", "D", 1, 1, 1, 0, 0)
    assert Tree(False).survivor(stuck) == [stuck.pid, 1, "nfs", -1, "blocked in kernel"]


def test_a_reused_number_is_not_taken_for_a_child(sleeper: subprocess.Popen[bytes]) -> None:
    parent = Seen(os.getpid(), 1, "an earlier owner of our number", "S", 2, 1, 1, 0, 0)
    tree = Tree(False)
    tree.me = 1
    assert tree._visit_one(sleeper.pid, parent, (), 0) is None


def test_a_hunt_looks_again_at_once_after_finding_and_rests_when_not() -> None:
    hunt = Hunt(5)
    pauses = []
    for found in (True, False, False, False, False, False, True):
        hunt.tire(found)
        pauses.append(hunt.pause)
    assert pauses[0] == pauses[-1] == 0.001
    assert pauses[:6] == sorted(pauses[:6])
    assert max(pauses) <= 0.01


def test_names_are_bytes_until_they_are_shown() -> None:
    assert text_from_wire("grün".encode().decode("latin-1")) == "grün"
    assert text_from_wire("\xff") == "\ufffd"
    assert user_name(0) == "root"
    assert user_name(4_000_000_000) == "4000000000"
