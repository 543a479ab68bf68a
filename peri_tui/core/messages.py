"""The messages of ``peri.v1``: JSON text frames, one message a frame, told apart by ``t``.

Requests are imperatives, events are past-tense facts. A request carries ``id`` and is answered by a message whose
``re`` is that id. An event of a task carries ``task`` and ``seq``: dense from 1, given when the event became durable.
Unknown fields are ignored (forward compatible); an unknown ``t`` is answered with a named error by a server and
ignored and counted by a client.

Text is scrubbed of lone surrogates where it enters (``scrub``): one of them in a frame would close the very
connection that carries a stop.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec

T = TypeVar("T")

# A peer's number must fit the stores: JSON has no bounds, SQLite does.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

PROTOCOL: Final = 1
SUBPROTOCOL: Final = "peri.v1"
CONTROL_PATH: Final = "/v1/control"
STREAM_PATH: Final = "/v1/stream"
MAX_CONTROL: Final = 64 * 1024
MAX_STREAM: Final = 4 * 1024 * 1024
CREDIT_WINDOW: Final = 64


class Message(msgspec.Struct, tag_field="t", kw_only=True, omit_defaults=True):
    """Base of every message."""


# --- requests: client to agent, on the control socket --------------------------------------------------------------


class Hello(Message, tag="hello", kw_only=True):
    """Opens a control or a stream connection.

    ``resume`` maps a task to the last sequence number that this client applied; on the stream socket the agent
    replays from there. ``session`` asks for a conversation ("last" = the newest of the workspace, "" = a new one).
    """

    id: str
    proto: list[Int64]
    client: str
    workspace: str = ""
    session: str = ""
    resume: dict[str, Int64] = {}


class Budget(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Limits of a task; 0 means none."""

    turns: Int64 = 0
    tokens: Int64 = 0
    seconds: float = 0


class ModelChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Which model serves a task. The key never travels: the agent reads it from its own environment."""

    provider: str = "offline"
    base_url: str = ""
    model: str = ""


class Submit(Message, tag="submit", kw_only=True):
    """Asks for a task. The client makes the task id, so that Stop works before this was answered."""

    id: str
    task: str
    session: str
    workspace: str
    prompt: str
    approve: str = "ask"
    on_stop: str = "restore"
    interactive: bool = True
    model: ModelChoice = msgspec.field(default_factory=ModelChoice)
    budget: Budget = msgspec.field(default_factory=Budget)


class Cancel(Message, tag="cancel", kw_only=True):
    """Asks for the end of a task; any number of these have one effect.

    ``mode`` is graceful or force; ``reason`` a ``StopReason``; ``t_ui`` the monotonic nanoseconds of the key press.
    """

    id: str
    task: str
    epoch: Int64 = 0
    reason: str = "user"
    mode: str = "graceful"
    t_ui: Int64 = 0
    attempt: Int64 = 1


class Answer(Message, tag="answer", kw_only=True):
    """Answers a question. ``outcome``: allow, allow_session, deny. ``text`` goes to the model with a denial."""

    id: str
    task: str
    qid: str
    outcome: str
    text: str = ""


class Trust(Message, tag="trust", kw_only=True):
    """The user's answer whether the workspace's own instructions may be read."""

    id: str
    workspace: str
    trusted: bool


class Job(Message, tag="job", kw_only=True):
    """Asks for something about background jobs. ``action``: promote (to a service), stop, list (``task``, ``job`` empty)."""

    id: str
    action: str
    task: str = ""
    job: str = ""


class EndAck(Message, tag="end.ack", kw_only=True):
    """Says that ``task.end`` was applied; the agent re-sends it until then."""

    task: str


class Credit(Message, tag="credit", kw_only=True):
    """Grants ``n`` more stream frames; sent on the stream socket, where it never waits behind data."""

    n: Int64


class Heartbeat(Message, tag="hb", kw_only=True):
    """Both ways on control, once a second."""

    mono: Int64 = 0


# --- answers: agent to client, on the control socket ----------------------------------------------------------------


class TaskSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line about a task."""

    task: str
    state: str
    prompt: str = ""
    workspace: str = ""
    session: str = ""
    stop_reason: str = ""
    owner: str = ""
    created: float = 0
    ended: float = 0
    last_seq: Int64 = 0


class Welcome(Message, tag="welcome", kw_only=True):
    """Answers ``hello``. ``tasks`` are those of the session, oldest first; ``ask_trust`` names what there is to trust."""

    re: str
    instance: str
    pid: Int64
    proto: Int64
    session: str
    may_write: bool
    heartbeat_ms: Int64 = 1000
    tasks: list[TaskSummary] = []
    ask_trust: list[str] = []
    notes: list[str] = []


class SubmitOk(Message, tag="submit.ok", kw_only=True):
    """The task is durably queued (or already known under the same content)."""

    re: str
    task: str
    state: str
    epoch: Int64


class CancelAccepted(Message, tag="cancel.accepted", kw_only=True):
    """The task is durably *cancelling*; sent only after the commit.

    ``durable`` is false where the store could not be written: the local run is stopped all the same.
    ``routed`` names the living agent that owns the task, when it is not this one.
    """

    re: str
    task: str
    state: str
    cancel_id: str
    first: bool
    reason: str
    mode: str
    cut_seq: Int64
    deadline_ms: Int64
    durable: bool = True
    routed: str = ""


class CancelNoop(Message, tag="cancel.noop", kw_only=True):
    """Nothing to stop: the task is final, or unknown (``state`` = "tombstone": a later submit will not start)."""

    re: str
    task: str
    state: str
    stop_reason: str = ""


class Ok(Message, tag="ok", kw_only=True):
    """A request without an answer of its own was done."""

    re: str


class JobInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One background job; see ``JobChanged``. ``started`` is wall-clock seconds."""

    job: str
    task: str
    state: str
    pid: Int64
    command: str = ""
    cpu: float = 0
    rss: Int64 = 0
    processes: Int64 = 0
    service: bool = False
    how: str = ""
    started: float = 0


class JobList(Message, tag="jobs", kw_only=True):
    """Answers ``job`` with action list: the jobs of all of this agent's tasks, oldest first."""

    re: str
    jobs: list[JobInfo] = []


class Failure(Message, tag="error", kw_only=True):
    """A named error; the connection lives on."""

    code: str
    msg: str
    re: str = ""
    retry_after_ms: Int64 = 0


# --- events of a task: agent to client, on the stream socket --------------------------------------------------------


class Event(Message, kw_only=True):
    """Base of what has a sequence number. ``ts`` is wall-clock seconds, for display only."""

    task: str
    seq: Int64 = 0
    ts: float = 0


class TaskStateChanged(Event, tag="task.state", kw_only=True):
    """The task's state is now ``state`` (durably)."""

    state: str
    prev: str = ""
    epoch: Int64 = 0
    cause: str = ""
    prompt: str = ""
    cut_seq: Int64 = 0


class Delta(Event, tag="delta", kw_only=True):
    """A piece of a stream. ``ch``: text, thinking, tool_out, notice. ``part`` names the stream within the task.

    ``off`` is the character offset of ``text`` in its part; merged deltas cover ``seq`` to ``seq_to``.
    """

    ch: str
    part: str
    text: str
    off: Int64 = 0
    seq_to: Int64 = 0


class ToolStarted(Event, tag="tool.start", kw_only=True):
    """A tool began. ``summary`` is the one line that the screen shows; ``args`` the checked arguments as JSON."""

    call: str
    name: str
    summary: str = ""
    args: str = ""


class ToolEnded(Event, tag="tool.end", kw_only=True):
    """A tool ended. ``status``: ok, error, denied, cancelled. ``diff`` is a unified diff where a file was changed."""

    call: str
    name: str
    status: str
    summary: str = ""
    diff: str = ""
    seconds: float = 0


class FileChanged(Event, tag="file.change", kw_only=True):
    """A workspace file differs from what it was before the task. ``kind``: added, modified, deleted.

    ``by`` is edit (restorable) or shell (seen by stat comparison, not restorable yet).
    """

    path: str
    kind: str
    by: str = "edit"
    added: Int64 = 0
    removed: Int64 = 0


class UsageCounted(Event, tag="usage", kw_only=True):
    """Tokens of the task so far; ``exact`` is false where a cut stream left only an estimate."""

    tokens_in: Int64
    tokens_out: Int64
    exact: bool = True


class Progressed(Event, tag="progress", kw_only=True):
    """What the task does now; the numbers of the running-task bar. ``alive_ms``: since the last sign of life."""

    step: Int64
    doing: str
    detail: str = ""
    cpu: float = 0
    rss: Int64 = 0
    processes: Int64 = 0
    alive_ms: Int64 = 0


class JobChanged(Event, tag="job.change", kw_only=True):
    """A background job of the task changed.

    ``state``: running, exited (the command ended, others of its processes run), ended. ``how`` the command ended.
    ``service``: the user promoted it; it outlives the task. ``cpu`` in seconds, ``rss`` in bytes.
    """

    job: str
    state: str
    pid: Int64
    command: str = ""
    cpu: float = 0
    rss: Int64 = 0
    processes: Int64 = 0
    service: bool = False
    how: str = ""


class Asked(Event, tag="question", kw_only=True):
    """The task waits for the user. ``kind`` is tool; ``detail`` the whole command or path, ``diff`` the change."""

    qid: str
    kind: str
    tool: str
    title: str
    detail: str = ""
    diff: str = ""
    where: str = ""
    note: str = ""


class Resolved(Event, tag="question.end", kw_only=True):
    """The question is closed. ``outcome``: allow, allow_session, deny, cancelled."""

    qid: str
    outcome: str


class Traced(Event, tag="trace", kw_only=True):
    """One trace record of layers 3 to 5, as it happens."""

    layer: Int64
    ev: str
    cancel_id: str = ""
    mono: Int64 = 0
    data: dict[str, Any] = {}


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of a whole task."""

    tokens_in: Int64 = 0
    tokens_out: Int64 = 0
    exact: bool = True


class Files(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of the files. ``not_restored``: changed by commands, which this version does not undo."""

    restored: list[str] = []
    kept: list[str] = []
    conflicts: list[str] = []
    not_restored: list[str] = []


class LayerEvidence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one layer shows. ``ok`` false: not proven; ``missing`` says what did not come; ``ms`` since the key."""

    layer: Int64
    ok: bool
    ms: float = 0
    summary: str = ""
    missing: str = ""
    data: dict[str, Any] = {}


class TaskEnded(Event, tag="task.end", kw_only=True):
    """The last message of a task. Re-sent on each hello until acknowledged.

    ``killed`` lists processes that were ended, ``services`` those that run on because the user promoted them.
    """

    state: str
    stop_reason: str = ""
    verified: bool = True
    message: str = ""
    answer: str = ""
    seconds: float = 0
    stop_seconds: float = 0
    cancel_id: str = ""
    evidence: list[LayerEvidence] = []
    usage: Usage = msgspec.field(default_factory=Usage)
    files: Files = msgspec.field(default_factory=Files)
    residue: list[str] = []
    killed: list[str] = []
    services: list[str] = []
    exit_code: Int64 = 0


Request = Hello | Submit | Cancel | Answer | Trust | Job | EndAck | Credit | Heartbeat
Reply = Welcome | SubmitOk | CancelAccepted | CancelNoop | Ok | JobList | Failure | Heartbeat
TaskEvent = (
    TaskStateChanged
    | Delta
    | ToolStarted
    | ToolEnded
    | FileChanged
    | UsageCounted
    | Progressed
    | JobChanged
    | Asked
    | Resolved
    | Traced
    | TaskEnded
)

_encoder = msgspec.json.Encoder()
_from_client: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_from_agent: msgspec.json.Decoder[Reply | TaskEvent] = msgspec.json.Decoder(Reply | TaskEvent)
_event: msgspec.json.Decoder[TaskEvent] = msgspec.json.Decoder(TaskEvent)


class MalformedFrame(ValueError):
    """A frame is no message. ``unknown`` is true when only its type is unknown (a newer peer)."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


def scrub(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 frame can carry, with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode(message: Message) -> str:
    """Return the frame of a message.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate; ``scrub`` text where it enters.
    """
    return _encoder.encode(message).decode()


def decode_request(frame: str | bytes) -> Request:
    """Return the request in a frame from a client.

    Raises:
        MalformedFrame: no JSON, unknown type, missing or ill-typed field.
    """
    return _decode(_from_client, frame)


def decode_from_agent(frame: str | bytes) -> Reply | TaskEvent:
    """Return the reply or event in a frame from the agent.

    Raises:
        MalformedFrame: no JSON, unknown type, missing or ill-typed field.
    """
    return _decode(_from_agent, frame)


def decode_event(frame: str | bytes) -> TaskEvent:
    """Return the event in a stored or streamed frame.

    Raises:
        MalformedFrame: it is none.
    """
    return _decode(_event, frame)


def _decode(decoder: msgspec.json.Decoder[T], frame: str | bytes) -> T:
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:
        unknown = "Invalid value" in str(error) and "`$.t`" in str(error)
        raise MalformedFrame(str(error), unknown=unknown) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"not a JSON message: {error}") from None
