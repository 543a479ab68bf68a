"""The macOS back end with a fake system: what is found, what is hit, what is said. macOS itself is not run."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from peri_tui.agent.processes import darwin
from peri_tui.agent.processes.darwin import PsLook
from peri_tui.agent.processes.evidence import ProcessRef
from peri_tui.agent.processes.link import WardenLink
from peri_tui.agent.processes.mac_supervisor import Lines, PsHost, Row, Supervisor, Tree, parse_table
from peri_tui.agent.processes.platforms import find_platform
from peri_tui.agent.processes.spawn import Processes
from peri_tui.errors import ProcessError
from tests.doubles.fake_host import FakeHost

pytestmark = pytest.mark.unit

INT, TERM, KILL, CONT = (int(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGCONT))
LEADER = 100
INIT = Row(1, 0, 1, 1, 0, 1, "launchd")
STRANGER = Row(50, 1, 50, 50, 501, 900, "editor")


def row(pid: int, ppid: int, pgid: int = LEADER, sid: int = LEADER, start: int = 1000, uid: int = 501) -> Row:
    return Row(pid, ppid, pgid, sid, uid, start, f"p{pid}")


class Agent:
    """The other end of a supervisor, which is worked by hand; its clock is ``now``."""

    def __init__(self, host: FakeHost, limits: dict[str, float] | None = None) -> None:
        self.host = host
        self.now = 0.0
        self.ours, theirs = socket.socketpair()
        self.wire = Lines(self.ours)
        self.peer = Lines(theirs)
        self.tree = Tree(host, LEADER)
        self.supervisor = Supervisor(self.peer, self.tree, self._poll, limits, lambda: self.now)

    def _poll(self) -> int | None:
        return None if LEADER in self.host.rows else -KILL

    def ask(self, **message: object) -> list[dict[str, object]]:
        self.wire.send(json.dumps(message).encode())
        return self.work()

    def work(self, times: int = 1) -> list[dict[str, object]]:
        for _ in range(times):
            if not self.supervisor.over:
                self.supervisor.work()
        heard = []
        while True:
            try:
                heard.append(json.loads(self.wire.recv()))
            except BlockingIOError:
                return heard

    def close(self) -> None:
        self.wire.close()
        self.peer.close()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made: list[Agent] = []
    yield made
    for one in made:
        one.close()


def agent_for(agents: list[Agent], *rows: Row, limits: dict[str, float] | None = None) -> Agent:
    agents.append(Agent(FakeHost(INIT, STRANGER, *rows), limits))
    return agents[-1]


# --- the process table ------------------------------------------------------------------------------------------------


def test_a_line_of_ps_is_read_with_seconds_since_1970_and_a_short_name() -> None:
    text = (
        "  501     1   501   502   2048 Ss   Thu Jan  1 00:16:40 1970 /Applications/A B.app/Contents/MacOS/My App\n"
        "  502   501   501   502      0 Z    Thu Jan  1 00:16:41 1970 (sh)\n"
        "nonsense\n"
    )
    table = parse_table(text, lambda pid: pid + 7)
    assert table[501] == Row(501, 1, 501, 508, 502, 1000, "My App", 2048 * 1024, dead=False)
    assert table[502].dead
    assert list(table) == [501, 502]


def test_a_ps_that_hangs_is_an_error_and_not_an_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("ps", 5)

    monkeypatch.setattr("peri_tui.agent.processes.mac_supervisor.subprocess.run", hang)
    with pytest.raises(OSError, match="ps gave no answer within 5 s"):
        PsHost().list_processes()
    assert PsLook(PsHost(), lambda *_: None).is_alive(ProcessRef(1, 1, "x"))


def test_alive_means_the_same_number_and_the_same_start() -> None:
    host = FakeHost(row(7, 1), Row(8, 1, 8, 8, 501, 1000, "z", dead=True))
    look = PsLook(host, host.probe)
    assert look.is_alive(ProcessRef(7, 1000, "x"))
    assert not look.is_alive(ProcessRef(7, 999, "x"))
    assert not look.is_alive(ProcessRef(8, 1000, "x"))
    assert not look.is_alive(ProcessRef(9, 1000, "x"))


# --- who is of the tree -----------------------------------------------------------------------------------------------


def test_a_child_in_its_own_session_is_found_by_the_chain_of_parents() -> None:
    host = FakeHost(
        INIT, STRANGER, row(LEADER, 10), row(101, LEADER), row(102, 101, 102, 102), row(103, 102, 103, 103)
    )
    assert {one.pid for one in Tree(host, LEADER).look()} == {100, 101, 102, 103}


def test_one_that_was_seen_stays_known_when_it_loses_its_parent() -> None:
    host = FakeHost(INIT, row(LEADER, 10), row(101, LEADER), row(102, 101, 102, 102))
    tree = Tree(host, LEADER)
    tree.look()
    host.kill(101, KILL)
    assert host.rows[102].ppid == 1
    assert {one.pid for one in tree.look()} == {100, 102}


def test_a_reused_number_is_neither_known_nor_hit() -> None:
    host = FakeHost(INIT, row(LEADER, 10), row(101, LEADER, 101, 101))
    tree = Tree(host, LEADER)
    seen = tree.look()
    host.rows[101] = Row(101, 1, 101, 101, 501, 2000, "innocent")
    assert [one.pid for one in tree.hit(seen, KILL)] == [LEADER]
    assert (101, KILL) not in host.sent
    assert [one.pid for one in tree.look()] == []


def test_the_leaders_number_as_anothers_group_is_left_alone() -> None:
    host = FakeHost(INIT, row(LEADER, 10))
    tree = Tree(host, LEADER)
    tree.look()
    del host.rows[LEADER]
    tree.reaped = True
    assert tree.look() == []
    host.rows[LEADER] = row(LEADER, 1, start=3000)
    host.rows[101] = row(101, LEADER, start=3000)
    assert tree.look() == []
    assert not tree.hit_group(KILL)
    assert host.sent_to_group == []


# --- signals and the last word ----------------------------------------------------------------------------------------


def test_the_rungs_reach_the_group_then_the_tree_then_everyone(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10), row(101, LEADER), row(102, 101, 102, 102))
    agent.host.deaf = {LEADER, 101, 102}
    agent.ask(op="signal", sig=INT, scope="group")
    assert agent.host.sent_to_group == [(LEADER, INT)]
    assert agent.host.sent == []
    told = agent.ask(op="signal", sig=TERM, scope="tree", cont=True)
    assert agent.host.sent == [(pid, number) for pid in (100, 101, 102) for number in (TERM, CONT)]
    assert told == [{"ev": "signalled", "sig": TERM, "n": 3, "names": ["p100", "p101", "p102"]}]
    told = agent.ask(op="kill", deadline_ms=1000) + agent.work(4)
    assert agent.host.sent_to_group[-1] == (LEADER, KILL)
    assert agent.host.rows == {1: INIT, 50: STRANGER}
    assert [one["ev"] for one in told] == ["killing", "exit", "gone"]
    assert told[-1]["killed"] == [[pid, 1000, f"p{pid}", KILL] for pid in (100, 101, 102)]


def test_a_kill_is_repeated_until_two_looks_find_nobody(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10), row(101, LEADER, 101, 101))
    agent.ask(op="stats")
    # After the first pass one more shows up, forked by a child that died meanwhile and was of the group.
    agent.supervisor.begin_kill(1.0)
    agent.host.rows[104] = row(104, 1)
    told = agent.work(6)
    assert 104 not in agent.host.rows
    assert told[-1]["ev"] == "gone"
    assert not any(one["ev"] == "empty" for one in told)


def test_those_that_cannot_be_ended_are_named_with_the_reason(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peri_tui.agent.processes.mac_supervisor.os.geteuid", lambda: 501)
    agent = agent_for(agents, row(LEADER, 10), row(101, LEADER, uid=0), row(102, LEADER))
    agent.host.stuck = {101, 102}
    agent.ask(op="kill", deadline_ms=1000)
    assert agent.work(3)[-1:] == []
    agent.now = 1.1
    (told,) = agent.work(3)
    assert told["ev"] == "survivors"
    assert told["list"] == [
        [101, 1000, "p101", 0, "not permitted"],
        [102, 1000, "p102", 501, "blocked in kernel"],
    ]
    agent.host.stuck = set()
    assert agent.work(4)[-1]["ev"] == "gone"


def test_the_end_of_the_agent_kills_everything(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10), row(101, LEADER, 101, 101))
    agent.wire.close()
    for _ in range(5):
        agent.supervisor.work()
    assert agent.supervisor.over
    assert agent.host.rows == {1: INIT, 50: STRANGER}


def test_the_commands_own_exit_lists_what_it_left(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10), row(101, LEADER, 101, 101))
    agent.ask(op="stats")
    agent.host.kill(LEADER, KILL)
    told = agent.work()
    assert told == [
        {"ev": "exit", "status": -KILL},
        {"ev": "orphans", "n": 1, "sample": [[101, 1000, "p101"]]},
    ]
    assert not agent.supervisor.over


def test_a_limit_is_told_once_a_level(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10), limits={"seconds": 10.0, "memory": 0, "processes": 5})
    agent.now = 8.5
    told = agent.work(2)
    assert told == [{"ev": "limit", "which": "seconds", "value": 8.5, "limit": 10.0, "level": "warn"}]
    agent.now = 11.0
    assert [one["level"] for one in agent.work(3)] == ["limit"]


def test_messages_that_arrive_in_pieces_are_put_together(agents: list[Agent]) -> None:
    agent = agent_for(agents, row(LEADER, 10))
    agent.ours.send(b'{"op": "sta')
    assert agent.work() == []
    agent.ours.send(b'ts"}\n{"op": "stats"}\n')
    assert [one["ev"] for one in agent.work()] == ["stats", "stats"]


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_back_end_is_chosen_by_the_name_of_the_system() -> None:
    assert find_platform("linux").launch is WardenLink
    assert find_platform("linux").notes == ()
    mac = find_platform("darwin")
    assert mac.launch is darwin.MacLink
    assert "macOS: best effort, no proof that a process which left its session is gone" in mac.notes


async def test_a_system_without_a_back_end_is_refused() -> None:
    with pytest.raises(ProcessError, match="on Linux and macOS only"):
        await Processes(platform=find_platform("win32")).start()


async def test_what_cannot_be_promised_is_said_once() -> None:
    processes = Processes(platform=find_platform("darwin"), containment="strict")
    await processes.start()
    await processes.start()
    assert processes.warden_pid is None
    assert processes.notes == [
        *darwin.NOTES,
        "strict containment is not possible here (macOS has no namespaces): the usual one is used",
    ]
    await processes.close()
