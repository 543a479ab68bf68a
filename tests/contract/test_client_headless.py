"""``peri -p`` against a scripted session: what goes where, exit codes, signals, a reader that leaves."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peri_tui.client.headless import run_headless
from peri_tui.client.session import LinkNews
from peri_tui.core import messages as m
from peri_tui.core.trace import Ev
from peri_tui.errors import AgentUnreachable, InputError
from peri_tui.log import Log, read_trace

pytestmark = pytest.mark.contract

TASK = "01J0000000000000000000000A"
ALL = ("text", "json", "stream-json")


class FakeSession:
    """Plays a script of events after the submission; a cancel ends the task."""

    def __init__(self, events: list[Any], *, ends: m.TaskEnded | None = None) -> None:
        self.events = events
        self.ends = ends
        self.answers: list[tuple[str, str]] = []
        self.cancels: list[str] = []
        self.ended: list[str] = []
        self.closed = False
        self.submitted: dict[str, Any] = {}
        self.during_submit: Callable[[], None] = lambda: None
        self.noop = ""

    async def open(self, on_event: Callable[[Any], None], on_link: Callable[[LinkNews], None]) -> FakeSession:
        self.on_event, self.on_link = on_event, on_link
        return self

    async def connect(self) -> Any:
        return None

    def new_task_id(self) -> str:
        return TASK

    async def submit(self, prompt: str, **options: Any) -> str:
        self.submitted = {"prompt": prompt, **options}
        self.during_submit()
        asyncio.get_running_loop().call_soon(self._play)
        return TASK

    def _play(self) -> None:
        for n, event in enumerate(self.events, 1):
            event.seq = n
            if isinstance(event, Exception):
                raise event
            self.on_event(event)

    async def cancel(self, task: str, *, mode: str = "graceful", **_: Any) -> Any:
        self.cancels.append(mode)
        if self.noop:
            return m.CancelNoop(re="r", task=task, state=self.noop)
        if self.ends is not None and (mode == "force" or self.ends.message != "only force"):
            self.on_event(self.ends)
        return m.CancelAccepted(
            re="r", task=task, state="cancelling", cancel_id="c", first=True, reason="user", mode=mode, cut_seq=0,
            deadline_ms=1,
        )  # fmt: skip

    async def answer(self, task: str, qid: str, outcome: str, text: str = "") -> bool:
        self.answers.append((qid, outcome))
        return True

    def acknowledge_end(self, task: str) -> None:
        self.ended.append(task)

    async def close(self) -> None:
        self.closed = True


def good_end(**options: Any) -> m.TaskEnded:
    return m.TaskEnded(task=TASK, state="completed", answer="42", **options)


def stopped(**options: Any) -> m.TaskEnded:
    return m.TaskEnded(task=TASK, state="cancelled", stop_reason="user", exit_code=130, **options)


class Result:
    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.code = -1


async def run(session: FakeSession, tmp_path: Path, output_format: Any = "text", **options: Any) -> Result:
    result = Result()
    result.code = await run_headless(
        session.open, "what is it?", output_format=output_format, stdout=options.pop("stdout", result.out),
        stderr=result.err, log=Log(tmp_path / "log", tmp_path, "t"), **options,
    )  # fmt: skip
    assert session.closed
    return result


async def test_the_answer_is_on_stdout_and_progress_on_stderr(tmp_path: Path) -> None:
    session = FakeSession(
        [
            m.TaskStateChanged(task=TASK, state="queued"),
            m.Delta(task=TASK, ch="text", part="p", text="let me see"),
            m.ToolStarted(task=TASK, call="c", name="read", summary="src/a.py"),
            good_end(),
        ]
    )
    result = await run(session, tmp_path, approve="all")
    assert (result.code, result.out.getvalue()) == (0, "42\n")
    assert "read src/a.py" in result.err.getvalue()
    assert session.submitted == {
        "prompt": "what is it?", "approve": "all", "task": TASK, "interactive": False,
    }  # fmt: skip
    assert session.ended == [TASK]


async def test_json_is_the_end_alone(tmp_path: Path) -> None:
    session = FakeSession([m.TaskStateChanged(task=TASK, state="queued"), good_end()])
    result = await run(session, tmp_path, "json")
    [line] = result.out.getvalue().splitlines()
    assert (json.loads(line)["t"], json.loads(line)["answer"]) == ("task.end", "42")


async def test_stream_json_is_every_message_in_order(tmp_path: Path) -> None:
    other = m.TaskStateChanged(task="01J0000000000000000000000B", state="running")
    session = FakeSession([m.TaskStateChanged(task=TASK, state="queued"), other, good_end()])
    result = await run(session, tmp_path, "stream-json")
    kinds = [(json.loads(line)["t"], json.loads(line)["task"]) for line in result.out.getvalue().splitlines()]
    assert kinds == [("task.state", TASK), ("task.end", TASK)]


async def test_questions_are_denied_named_once_and_end_with_1(tmp_path: Path) -> None:
    questions = [m.Asked(task=TASK, qid=f"q{n}", kind="tool", tool="shell", title="run") for n in range(2)]
    session = FakeSession([*questions, good_end()])
    result = await run(session, tmp_path)
    assert result.code == 1
    assert session.answers == [("q0", "deny"), ("q1", "deny")]
    assert result.err.getvalue().count("--approve") == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_a_signal_is_a_stop(tmp_path: Path, number: signal.Signals, code: int) -> None:
    session = FakeSession([m.TaskStateChanged(task=TASK, state="running")], ends=stopped())
    session.during_submit = lambda: os.kill(os.getpid(), number)
    result = await run(session, tmp_path)
    assert (result.code, session.cancels) == (code, ["graceful"])
    [pressed] = [record for record in read_trace(tmp_path, TASK) if record.ev == Ev.PRESSED]
    assert pressed.data["key"] == number.name


async def test_a_second_signal_forces(tmp_path: Path) -> None:
    session = FakeSession([], ends=stopped(message="only force"))

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)

    session.during_submit = twice
    result = await run(session, tmp_path)
    assert (result.code, session.cancels) == (130, ["graceful", "force"])


async def test_a_signal_while_the_agent_starts_ends_at_once(tmp_path: Path) -> None:
    session = FakeSession([])

    async def never() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    session.connect = never
    async with asyncio.timeout(5):
        result = await run(session, tmp_path)
    assert (result.code, session.cancels, session.submitted) == (143, [], {})


async def test_not_verified_is_74_and_the_residue_is_listed(tmp_path: Path) -> None:
    end = m.TaskEnded(
        task=TASK, state="cancel_failed", verified=False, stop_reason="user", exit_code=74,
        residue=["pid 4711 sudo"],
    )  # fmt: skip
    session = FakeSession([], ends=end)
    session.during_submit = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = await run(session, tmp_path)
    assert result.code == 74
    assert "not verified" in result.err.getvalue()
    assert "pid 4711 sudo" in result.err.getvalue()


async def test_stopped_before_it_reached_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peri_tui.client.headless.NEVER_STARTED_S", 0.01)
    session = FakeSession([])
    session.noop = "tombstone"
    session.during_submit = lambda: os.kill(os.getpid(), signal.SIGTERM)
    result = await run(session, tmp_path)
    assert result.code == 143
    assert "before it started" in result.err.getvalue()


@pytest.mark.parametrize("output_format", ["text", "stream-json"])
async def test_a_reader_that_left_is_a_stop(tmp_path: Path, output_format: str) -> None:
    read, write = os.pipe()
    os.close(read)
    stdout = os.fdopen(write, "w")
    first = m.TaskStateChanged(task=TASK, state="queued")
    session = FakeSession(
        [first] if output_format == "stream-json" else [good_end()], ends=stopped(answer="late")
    )
    result = await run(session, tmp_path, output_format, stdout=stdout)
    stdout.close()
    assert result.code == (130 if output_format == "stream-json" else 0)
    assert session.cancels == (["graceful"] if output_format == "stream-json" else [])


async def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii")
    await run(FakeSession([m.TaskEnded(task=TASK, state="completed", answer="→")]), tmp_path, stdout=stdout)
    assert raw.getvalue() == b"\\u2192\n"


async def test_what_a_model_wrote_reaches_no_terminal_raw(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stdout = Terminal()
    tool = m.ToolStarted(task=TASK, call="c", name="shell", summary="\x1b]52;c;aaa\x07ls")
    session = FakeSession([tool, m.TaskEnded(task=TASK, state="completed", answer="\x1b[2Jhi")])
    result = await run(session, tmp_path, stdout=stdout)
    assert "\x1b" not in stdout.getvalue() + result.err.getvalue()


async def test_a_refused_submission_is_raised(tmp_path: Path) -> None:
    session = FakeSession([])

    def refuse() -> None:
        raise InputError("the prompt is empty")

    session.during_submit = refuse
    with pytest.raises(InputError):
        await run(session, tmp_path)
    assert session.closed


async def test_a_lost_agent_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    session = FakeSession([])
    session.during_submit = lambda: asyncio.get_running_loop().call_soon(
        session.on_link, LinkNews("failed", "the agent died 3 times within a minute")
    )
    with pytest.raises(AgentUnreachable, match="died 3 times"):
        await run(session, tmp_path)
