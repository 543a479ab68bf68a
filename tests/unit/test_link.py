from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peri_tui.core.link import BACKLOG_HIGH, MERGED_MAX, ClientLink, StreamOutbox, Verdict
from peri_tui.core.messages import (
    CREDIT_WINDOW,
    Answer,
    Cancel,
    Credit,
    Delta,
    EndAck,
    Heartbeat,
    Hello,
    Message,
    Progressed,
    Submit,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    ToolEnded,
    ToolStarted,
    Trust,
)

pytestmark = pytest.mark.unit


def delta(
    seq: int, text: str = "x", *, task: str = "T", to: int = 0, part: str = "p", ch: str = "text"
) -> Delta:
    return Delta(task=task, seq=seq, ch=ch, part=part, text=text, seq_to=to)


def tool(seq: int, task: str = "T") -> ToolStarted:
    return ToolStarted(task=task, seq=seq, call=f"c{seq}", name="shell")


def cancelling(seq: int, cut_seq: int = 0, task: str = "T") -> TaskStateChanged:
    return TaskStateChanged(task=task, seq=seq, state="cancelling", cut_seq=cut_seq)


def ended(seq: int, task: str = "T") -> TaskEnded:
    return TaskEnded(task=task, seq=seq, state="cancelled")


# --- the client's verdicts ----------------------------------------------------------------------------------------


def test_events_in_order_are_applied_once() -> None:
    link = ClientLink()
    assert [link.receive(tool(n)) for n in (1, 2, 3)] == [Verdict.APPLY] * 3
    assert [link.receive(tool(n)) for n in (1, 3)] == [Verdict.DUPLICATE] * 2
    assert link.last_seq("T") == 3


def test_a_hole_is_a_gap_and_moves_nothing() -> None:
    link = ClientLink()
    link.receive(tool(1))
    assert link.receive(tool(3)) is Verdict.GAP
    assert link.receive(tool(4)) is Verdict.GAP
    assert link.resume_points() == {"T": 1}
    assert [link.receive(tool(n)) for n in (2, 3, 4)] == [Verdict.APPLY] * 3


def test_the_first_event_is_number_one() -> None:
    assert ClientLink().receive(tool(2)) is Verdict.GAP


def test_merged_deltas_cover_their_range() -> None:
    link = ClientLink()
    assert link.receive(delta(1, to=5)) is Verdict.APPLY
    assert link.receive(delta(3)) is Verdict.DUPLICATE
    assert link.receive(delta(2, to=5)) is Verdict.DUPLICATE
    assert link.receive(delta(6)) is Verdict.APPLY


def test_a_frame_that_is_partly_new_is_a_gap() -> None:
    link = ClientLink()
    link.receive(delta(1, to=5))
    assert link.receive(delta(4, to=8)) is Verdict.GAP
    assert link.last_seq("T") == 5


def test_text_above_the_cut_is_dropped_and_counted() -> None:
    link = ClientLink()
    link.receive(delta(1))
    link.cut("T", 2)
    assert link.receive(delta(2)) is Verdict.APPLY
    assert link.receive(delta(3, to=7)) is Verdict.CUT
    assert link.receive(delta(8)) is Verdict.CUT
    assert link.receive(tool(9)) is Verdict.APPLY
    assert link.cut_deltas == 6
    assert link.resume_points() == {"T": 9}


def test_the_state_event_cuts_by_itself() -> None:
    link = ClientLink()
    link.receive(tool(1))
    link.receive(cancelling(2, cut_seq=1))
    assert link.receive(delta(3)) is Verdict.CUT
    other = ClientLink()
    other.receive(cancelling(1))
    assert other.receive(delta(2)) is Verdict.CUT


def test_of_several_cuts_the_lowest_holds() -> None:
    link = ClientLink()
    link.cut("T", 1)
    link.cut("T", 9)
    link.receive(tool(1))
    assert link.receive(delta(2)) is Verdict.CUT


def test_a_cut_at_zero_lets_no_text_through() -> None:
    link = ClientLink()
    link.cut("T", 0)
    assert link.receive(delta(1)) is Verdict.CUT


def test_a_cut_is_of_one_task() -> None:
    link = ClientLink()
    link.cut("T", 0)
    assert link.receive(delta(1, task="U")) is Verdict.APPLY


def test_nothing_follows_the_end() -> None:
    link = ClientLink()
    assert link.receive(ended(1)) is Verdict.APPLY
    assert link.receive(ended(1)) is Verdict.DUPLICATE
    assert link.receive(tool(2)) is Verdict.LATE
    assert link.receive(tool(9)) is Verdict.LATE
    assert link.receive(Progressed(task="T", step=1, doing="model")) is Verdict.LATE
    assert link.late == 3
    assert link.resume_points() == {}
    assert link.last_seq("T") == 1


def test_events_without_a_number_pass_and_count_nothing() -> None:
    link = ClientLink()
    assert link.receive(Progressed(task="T", step=1, doing="model")) is Verdict.APPLY
    assert link.receive(delta(0)) is Verdict.APPLY
    assert link.last_seq("T") == 0
    link.cut("T", 5)
    assert link.receive(delta(0)) is Verdict.CUT


def test_a_task_may_be_taken_up_in_the_middle() -> None:
    link = ClientLink()
    link.start_at("T", 10)
    link.start_at("T", 4)
    assert link.receive(tool(10)) is Verdict.DUPLICATE
    assert link.receive(tool(11)) is Verdict.APPLY
    link.forget("T")
    assert link.last_seq("T") == 0


def test_unknown_frames_are_counted() -> None:
    link = ClientLink()
    link.count_unknown()
    assert link.unknown == 1


# --- credit -------------------------------------------------------------------------------------------------------


def test_credit_comes_back_in_halves_of_the_window() -> None:
    link = ClientLink()
    grants = [link.consumed() for _ in range(100)]
    assert [n for n in grants if n] == [32, 32, 32]
    assert link.consumed(40) == 44
    link.consumed(31)
    link.stream_opened()
    assert link.consumed(31) == 0
    assert link.consumed(1) == 32


@given(st.lists(st.integers(1, 40)))
def test_no_credit_is_lost_or_invented(steps: list[int]) -> None:
    link = ClientLink()
    granted = sum(link.consumed(n) for n in steps)
    assert 0 <= sum(steps) - granted < 32


# --- requests -----------------------------------------------------------------------------------------------------


def submit(id_: str) -> Submit:
    return Submit(id=id_, task="T", session="S", workspace="/w", prompt="p")


def test_unanswered_requests_are_sent_again_with_cancels_first() -> None:
    link = ClientLink()
    requests = [
        submit("1"),
        Answer(id="2", task="T", qid="q", outcome="deny"),
        Cancel(id="3", task="T"),
        Trust(id="4", workspace="/w", trusted=False),
        Cancel(id="5", task="U"),
    ]
    for request in requests:
        link.sent(request)
    again = link.resend()
    assert [r.id for r in again] == ["3", "5", "1", "2", "4"]  # type: ignore[union-attr]
    assert [r.attempt for r in again if isinstance(r, Cancel)] == [2, 2]
    assert [r.attempt for r in link.resend() if isinstance(r, Cancel)] == [3, 3]
    assert again[2:] == [requests[0], requests[1], requests[3]]


def test_an_answer_settles_a_request_once() -> None:
    link = ClientLink()
    link.sent(submit("1"))
    assert link.pending() == [submit("1")]
    assert link.answered("1") == submit("1")
    assert link.answered("1") is None
    assert link.answered("9") is None
    assert link.resend() == []


@pytest.mark.parametrize(
    "request_",
    [Hello(id="1", proto=[1], client="c"), EndAck(task="T"), Credit(n=1), Heartbeat()],
    ids=lambda r: type(r).__name__,
)
def test_what_belongs_to_one_connection_is_not_sent_again(request_: Message) -> None:
    link = ClientLink()
    link.sent(request_)  # type: ignore[arg-type]
    assert link.resend() == []


# --- the agent's outbox -------------------------------------------------------------------------------------------


def offered(events: list[TaskEvent], credit: int = 0) -> StreamOutbox:
    outbox = StreamOutbox(credit=credit)
    for event in events:
        outbox.offer(event)
    return outbox


def drain(outbox: StreamOutbox) -> list[TaskEvent]:
    taken: list[TaskEvent] = []
    while len(outbox):
        outbox.grant(CREDIT_WINDOW)
        taken += outbox.take()
    return taken


def test_nothing_leaves_without_credit() -> None:
    outbox = offered([tool(n) for n in range(1, 6)])
    assert outbox.take() == []
    assert not outbox.ready
    outbox.grant(2)
    assert outbox.ready
    assert outbox.take() == [tool(1), tool(2)]
    assert outbox.credit == 0
    assert len(outbox) == 3


def test_a_window_is_open_at_first_and_never_grows() -> None:
    outbox = offered([tool(n) for n in range(1, 201)], credit=CREDIT_WINDOW)
    assert len(outbox.take()) == CREDIT_WINDOW
    outbox.grant(10_000)
    outbox.grant(-5)
    assert outbox.credit == CREDIT_WINDOW
    assert len(outbox.take(10)) == 10


def test_waiting_text_is_joined() -> None:
    outbox = offered([delta(1, "a"), delta(2, "b"), delta(3, "c", to=5), delta(6, "d")])
    assert drain(outbox) == [delta(1, "abcd", to=6)]
    assert outbox.backlog == 0


def test_a_single_delta_leaves_as_it_came() -> None:
    assert drain(offered([delta(1, "a")])) == [delta(1, "a")]


@pytest.mark.parametrize(
    "second",
    [delta(2, part="q"), delta(2, ch="thinking"), delta(3), delta(2, task="U"), delta(0)],
    ids=["part", "channel", "hole", "task", "no number"],
)
def test_other_text_is_not_joined(second: Delta) -> None:
    assert drain(offered([delta(1), second])) == [delta(1), second]


def test_nothing_else_is_joined_and_text_does_not_pass_it() -> None:
    events = [delta(1, "a"), tool(2), delta(3, "b"), tool(4), tool(5)]
    assert drain(offered(events)) == events


def test_text_that_has_left_takes_nothing_along() -> None:
    outbox = offered([delta(1)], credit=1)
    assert outbox.take() == [delta(1)]
    outbox.offer(delta(2))
    assert drain(outbox) == [delta(2)]


def test_frames_are_bounded() -> None:
    outbox = offered([delta(n, "é" * 1000) for n in range(1, 101)])
    frames = drain(outbox)
    assert all(len(frame.text.encode()) <= MERGED_MAX for frame in frames)  # type: ignore[union-attr]
    assert "".join(frame.text for frame in frames) == "é" * 100_000  # type: ignore[union-attr]


def test_a_delta_beyond_the_bound_is_not_split() -> None:
    big = delta(2, "y" * (MERGED_MAX + 1))
    assert drain(offered([delta(1), big, delta(3)])) == [delta(1), big, delta(3)]


def test_a_long_backlog_loses_nothing_and_says_so() -> None:
    outbox = offered([delta(n, "z" * 1000) for n in range(1, 2001)])
    assert outbox.is_full
    assert outbox.backlog == 2_000_000 > BACKLOG_HIGH
    assert len(outbox) < 40
    assert sum(len(frame.text) for frame in drain(outbox)) == 2_000_000  # type: ignore[union-attr]
    assert not outbox.is_full


def test_tasks_leave_in_the_order_of_arrival() -> None:
    events: list[TaskEvent] = [tool(1, "A"), tool(1, "B"), tool(2, "A"), tool(1, "C"), tool(2, "B")]
    assert drain(offered(events)) == events


def test_two_tasks_that_stream_at_once_are_both_joined() -> None:
    events = [delta(n, c, task=c) for n in range(1, 4) for c in "AB"]
    assert drain(offered(events)) == [delta(1, "AAA", task="A", to=3), delta(1, "BBB", task="B", to=3)]


def test_a_cut_leaves_text_out_and_keeps_the_numbers() -> None:
    outbox = offered([delta(1, "a"), delta(2, "b"), delta(3, "c"), delta(1, "u", task="U")])
    outbox.cut("T", 2)
    outbox.offer(delta(4, "d"))
    outbox.offer(cancelling(5, 2))
    outbox.offer(delta(6, "e"))
    outbox.offer(ended(7))
    assert drain(outbox) == [
        delta(1, "ab", to=2),
        delta(1, "u", task="U"),
        delta(3, "", to=4),
        cancelling(5, 2),
        delta(6, ""),
        ended(7),
    ]


def test_a_second_lower_cut_keeps_the_numbers_too() -> None:
    outbox = offered([delta(1, "a"), delta(2, "b"), tool(3), delta(4, "c"), delta(5, "d")])
    outbox.cut("T", 4)
    outbox.offer(tool(6))
    outbox.offer(delta(7, "e"))
    outbox.cut("T", 1)
    outbox.cut("T", 9)
    outbox.offer(tool(8))
    link = ClientLink()
    frames = drain(outbox)
    assert [link.receive(frame) for frame in frames] == [Verdict.APPLY] * len(frames)
    assert "".join(frame.text for frame in frames if isinstance(frame, Delta)) == "a"
    assert link.last_seq("T") == 8


def test_a_flood_after_the_cut_costs_nothing() -> None:
    outbox = offered([])
    outbox.cut("T", 0)
    for n in range(1, 10_001):
        outbox.offer(delta(n, "flood"))
    outbox.offer(delta(0, "flood"))
    assert (len(outbox), outbox.backlog) == (0, 0)
    outbox.offer(ended(10_001))
    assert drain(outbox) == [delta(1, "", to=10_000), ended(10_001)]


# --- both ends, with a network between them -----------------------------------------------------------------------


@dataclass
class Log:
    """The durable log of two tasks."""

    events: list[TaskEvent] = field(default_factory=list)

    def after(self, task: str, seq: int) -> list[TaskEvent]:
        return [e for e in self.events if e.task == task and e.seq > seq]


def make_log(rng: random.Random, tasks: str, length: int) -> Log:
    log, seqs = Log(), dict.fromkeys(tasks, 0)
    for _ in range(length):
        task = rng.choice(tasks)
        seqs[task] += 1
        if rng.random() < 0.85:
            part = "p" if rng.random() < 0.9 else "q"
            log.events.append(
                delta(seqs[task], rng.choice("abc€\n") * rng.randint(1, 4), task=task, part=part)
            )
        else:
            log.events.append(tool(seqs[task], task))
    log.events += [ended(seqs[task] + 1, task) for task in tasks]
    return log


@pytest.mark.parametrize("seed", range(20))
def test_text_survives_any_number_of_disconnects(seed: int) -> None:
    """Cut connections, frames that come twice or out of order: every event is applied once, the text is the log's."""
    rng = random.Random(seed)
    log = make_log(rng, "AB", 300)
    link, applied, covered = ClientLink(), [], {"A": 0, "B": 0}
    for task in "AB":
        link.start_at(task, 0)
    while link.resume_points():
        outbox = StreamOutbox()
        link.stream_opened()
        for task, last in link.resume_points().items():
            for event in log.after(task, last):
                outbox.offer(event)
        frames = outbox.take(rng.randint(1, 60))
        broken = rng.random()
        if broken < 0.2 and len(frames) > 1:
            frames.insert(rng.randrange(len(frames)), frames.pop(rng.randrange(len(frames))))
        elif broken < 0.4:
            frames = [f for f in frames for _ in range(1 + (rng.random() < 0.3))]
        elif broken < 0.6:
            frames = [f for f in frames if rng.random() > 0.1]
        for frame in frames:
            if link.receive(frame) is Verdict.APPLY:
                assert frame.seq == covered[frame.task] + 1, "a number was applied twice or left out"
                covered[frame.task] = max(frame.seq, getattr(frame, "seq_to", 0))
                applied.append(frame)
    for task in "AB":
        for part in "pq":
            assert text_of(applied, task, part) == text_of(log.events, task, part)
        assert [e for e in applied if e.task == task and not isinstance(e, Delta)] == [
            e for e in log.events if e.task == task and not isinstance(e, Delta)
        ]


def text_of(events: list[TaskEvent], task: str, part: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and (e.task, e.part) == (task, part))


@given(
    st.lists(st.sampled_from(["text", "text", "text", "tool", "take", "grant"]), max_size=60),
    st.integers(0, 60),
    st.booleans(),
)
def test_after_a_cut_the_client_sees_no_hole_and_no_text_above_it(
    steps: list[str], cut_at: int, told: bool
) -> None:
    """Whenever the cut comes, and whether or not its acknowledgement arrives."""
    outbox, link = StreamOutbox(credit=4), ClientLink()
    seq, cut_seq, shown, sent = 0, None, "", {}
    frames: list[TaskEvent] = []
    for step, name in enumerate([*steps, "end"]):
        if step == cut_at or (name == "end" and cut_seq is None):
            cut_seq = seq
            outbox.cut("T", seq)
            if told:
                link.cut("T", seq)
            seq += 1
            outbox.offer(cancelling(seq, cut_seq))
        if name == "text":
            seq += 1
            sent[seq] = f"<{seq}>"
            outbox.offer(delta(seq, sent[seq]))
        elif name == "tool":
            seq += 1
            outbox.offer(ToolEnded(task="T", seq=seq, call="c", name="n", status="ok"))
        elif name == "grant":
            outbox.grant(3)
        elif name == "take":
            frames += outbox.take()
    outbox.offer(ended(seq + 1))
    frames += drain(outbox)
    for frame in frames:
        verdict = link.receive(frame)
        assert verdict in (Verdict.APPLY, Verdict.CUT)
        if isinstance(frame, Delta) and verdict is Verdict.APPLY:
            shown += frame.text
    assert cut_seq is not None
    assert shown == "".join(text for n, text in sent.items() if n <= cut_seq)
    assert link.last_seq("T") == seq + 1
