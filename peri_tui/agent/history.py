"""The conversation with the model; valid for the next request after a stop at any point.

Pure: no await, no clock, no file. Messages are dicts in the form of OpenAI's chat completions (``role``, ``content``,
``tool_calls``, ``tool_call_id``). The system message is not part of a history; a request puts it in front.

What a stop leaves behind is repaired by rule (sources: the error texts of strict servers, and the reports of agents
whose sessions answered 400 for ever after an interrupt):

* text that was received is kept, and a note from the user's side says that it was cut;
* a tool call whose arguments did not arrive completely never gets here; each complete one has exactly one result,
  directly after its message: the real one, or one that says that the stop came, and whether the tool had started;
* there is no empty message, no two messages of one side in a row, and every id is used once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from peri_tui.core.messages import scrub
from peri_tui.core.states import StopReason

ChatMessage = dict[str, Any]

MAX_RESULT: Final = 50_000
MAX_CALLS: Final = 50
_MAX_NAME: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_NOT_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_STARTED: Final = "Stopped by the user: the tool had started, so part of its effect may have happened."
_NOT_STARTED: Final = "Stopped by the user: the tool had not started."
_LOST: Final = "No result was recorded for this call; it may or may not have run."

_CUT: Final[dict[str, str]] = {
    StopReason.USER: "The user stopped this task before it was finished.",
    StopReason.LIMIT_TURNS: "This task was ended by its limit of turns.",
    StopReason.LIMIT_TOKENS: "This task was ended by its limit of tokens.",
    StopReason.LIMIT_SECONDS: "This task was ended by its limit of time.",
    StopReason.MODEL_ERROR: "This task was ended by an error of the model's server.",
}


def bound(text: str, limit: int = MAX_RESULT) -> str:
    """Return ``text`` if it has at most ``limit`` characters, else its head and tail with the count left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[-tail:]}"


def is_json_object(text: str) -> bool:
    """Tell whether ``text`` is a complete JSON object, as servers want it in ``arguments``."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: str
    started: bool = False
    result: str | None = None


@dataclass(slots=True)
class _Turn:
    text: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    ended: bool = False


class History:
    """One session's conversation, grown event by event; ``close`` gives what may be stored and sent at any moment.

    Args:
        messages: what an earlier ``close`` returned; a damaged list is repaired, never refused.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]] = ()) -> None:
        self._messages = repair(messages)
        self._turn: _Turn | None = None
        self._ids = {call["id"] for message in self._messages for call in message.get("tool_calls", ())}
        self._made = 0

    def add_user(self, text: str) -> None:
        """Add what the user says; it joins a note that already stands on the user's side."""
        self._commit()
        _join_user(self._messages, scrub(text))

    def begin_answer(self) -> None:
        """The model begins a message."""
        self._commit()
        self._turn = _Turn()

    def drop_answer(self) -> None:
        """Forget the message in progress: the request is repeated, and nothing of it was shown or run."""
        self._turn = None

    def add_text(self, text: str) -> None:
        """Add a piece of the model's text."""
        self._open().text.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> str | None:
        """Add a complete tool call; return the id that its result must name, or None past ``MAX_CALLS``.

        An empty or repeated id is replaced, a name or arguments that a server would refuse are made harmless:
        the result tells the model what it sent.
        """
        turn = self._open()
        if len(turn.calls) >= MAX_CALLS:
            return None
        safe = arguments if is_json_object(arguments) else "{}"
        call = _Call(self._unique(call_id), _safe_name(name), safe)
        turn.calls.append(call)
        return call.id

    def end_answer(self) -> None:
        """The model's message is complete."""
        self._open().ended = True

    def start_call(self, call_id: str) -> None:
        """The tool begins to run."""
        self._find(call_id).started = True

    def end_call(self, call_id: str, result: str) -> None:
        """Set the result of a call; the first one is kept."""
        call = self._find(call_id)
        if call.result is None:
            call.result = bound(scrub(result)) or "(no output)"

    @property
    def text(self) -> str:
        """The text of the message in progress, or of the last one."""
        if self._turn is not None:
            return "".join(self._turn.text)
        last = next((m for m in reversed(self._messages) if m["role"] == "assistant"), {})
        return str(last.get("content") or "")

    def request(self, system: str) -> list[ChatMessage]:
        """Return the messages of the next request. Call it when every call has its result."""
        self._commit()
        return [{"role": "system", "content": scrub(system)}, *_copy(self._messages)]

    def close(self, cause: StopReason | None = None, *, files: str = "") -> list[ChatMessage]:
        """Return the whole conversation, valid for the next request. Changes nothing; may be called at any time.

        Args:
            cause: why the task ended early; None where it completed (then no note is made).
            files: what became of the task's changes, such as "2 files restored"; the model would otherwise
                believe in edits that a stop took back.
        """
        messages = repair([*self._messages, *self._finished(cause)])
        if cause is not None:
            note = _CUT.get(cause, f"This task was ended early ({cause}).")
            note += f" What became of its changes: {files}." if files else ""
            _join_user(messages, f"[{scrub(note)}]")
        return messages

    def _open(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _commit(self) -> None:
        if self._turn is not None:
            self._messages = repair([*self._messages, *self._finished(None)])
            self._turn = None

    def _finished(self, cause: StopReason | None) -> list[ChatMessage]:
        if self._turn is None:
            return []
        message: ChatMessage = {"role": "assistant", "content": scrub("".join(self._turn.text))}
        if self._turn.calls:
            message["tool_calls"] = [
                _call_dict(call.id, call.name, call.arguments) for call in self._turn.calls
            ]
        return [message, *(_result_of(call, cause) for call in self._turn.calls)]

    def _find(self, call_id: str) -> _Call:
        return next(call for call in self._open().calls if call.id == call_id)

    def _unique(self, call_id: str) -> str:
        wanted = _NOT_NAME.sub("_", call_id)[:_MAX_NAME]
        while not wanted or wanted in self._ids:
            self._made += 1
            wanted = f"call_{self._made}"
        self._ids.add(wanted)
        return wanted


def repair(messages: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return a valid conversation with everything of ``messages`` that can be kept.

    Results without a call, empty messages and unknown roles go; a call without a result gets one that says so.
    """
    source = [dict(message) for message in messages]
    repaired: list[ChatMessage] = []
    used: set[str] = set()
    for position, message in enumerate(source):
        role, content = message.get("role"), message.get("content")
        text = content if isinstance(content, str) else ""
        if role == "user" and text.strip():
            _join_user(repaired, text)
        elif role == "assistant":
            calls = _sound_calls(message.get("tool_calls"), used)
            if text.strip() or calls:
                _join_assistant(repaired, text if text.strip() else "", calls)
                repaired += [
                    _tool_dict(call["id"], _recorded(source[position:], call["id"])) for call in calls
                ]
    return repaired


def validate(messages: Sequence[Mapping[str, Any]], *, for_request: bool = False) -> list[str]:
    """Return what a strict server would refuse, one line each; empty means valid.

    Args:
        messages: a conversation, with or without a system message in front.
        for_request: also demand that the last word is the user's or a tool's.
    """
    problems: list[str] = []
    body = list(messages[1:]) if messages and messages[0].get("role") == "system" else list(messages)
    if body and body[0].get("role") != "user":
        problems.append(f"message 0 is of {body[0].get('role')}, not of the user")
    if for_request and (not body or body[-1].get("role") not in ("user", "tool")):
        problems.append("the last message is not the user's or a tool's")
    used: set[str] = set()
    open_ids: list[str] = []
    before = ""
    for number, message in enumerate(body):
        role = str(message.get("role"))
        problems += [f"message {number}: {text}" for text in _check(message, role, before, open_ids, used)]
        before = role
    if open_ids:
        problems.append(f"no result for the calls {open_ids}")
    return problems


def _check(
    message: Mapping[str, Any], role: str, before: str, open_ids: list[str], used: set[str]
) -> list[str]:
    content = message.get("content")
    problems = []
    if role == "tool":
        if message.get("tool_call_id") not in open_ids:
            return [f"a result for {message.get('tool_call_id')!r}, which is not open"]
        open_ids.remove(message["tool_call_id"])
        return [] if isinstance(content, str) and content else ["a result without text"]
    if open_ids:
        problems.append(f"{role} speaks before the results of {open_ids}")
        open_ids.clear()
    if role not in ("user", "assistant"):
        return [*problems, f"unknown role {role!r}"]
    if role == before:
        problems.append(f"{role} speaks twice in a row")
    if role == "user" or "tool_calls" not in message:
        return (
            problems
            if isinstance(content, str) and content.strip()
            else [*problems, f"an empty message of {role}"]
        )
    return problems + _check_calls(message["tool_calls"], open_ids, used)


def _check_calls(calls: Any, open_ids: list[str], used: set[str]) -> list[str]:
    if not isinstance(calls, list) or not calls:
        return ["tool_calls is no list of calls"]
    problems = []
    for call in calls:
        if not _is_sound(call):
            problems.append(f"an ill-formed call {call!r:.80}")
        elif call["id"] in used:
            problems.append(f"the call id {call['id']!r} was used before")
        else:
            used.add(call["id"])
            open_ids.append(call["id"])
    return problems


def _is_sound(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) and call.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str) or not call["id"]:
        return False
    name, arguments = function.get("name"), function.get("arguments")
    named = isinstance(name, str) and _NAME.match(name) is not None
    return named and isinstance(arguments, str) and is_json_object(arguments)


def _sound_calls(calls: Any, used: set[str]) -> list[dict[str, Any]]:
    sound = []
    for call in calls if isinstance(calls, list) else []:
        if _is_sound(call) and call["id"] not in used:
            used.add(call["id"])
            sound.append(_call_dict(call["id"], call["function"]["name"], call["function"]["arguments"]))
    return sound


def _recorded(following: Sequence[Mapping[str, Any]], call_id: str) -> str:
    for message in following:
        if message.get("role") == "tool" and message.get("tool_call_id") == call_id:
            return str(message.get("content") or "(no output)")
    return _LOST


def _result_of(call: _Call, cause: StopReason | None) -> ChatMessage:
    if call.result is not None:
        return _tool_dict(call.id, call.result)
    text = _STARTED if call.started else _NOT_STARTED
    if cause is not None and cause is not StopReason.USER:
        text = text.replace("Stopped by the user", "The task was ended early")
    return _tool_dict(call.id, text)


def _call_dict(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_dict(call_id: str, text: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _safe_name(name: str) -> str:
    return _NOT_NAME.sub("_", name)[:_MAX_NAME] or "unnamed"


def _join_user(messages: list[ChatMessage], text: str) -> None:
    if not text:
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _join_assistant(messages: list[ChatMessage], text: str, calls: list[dict[str, Any]]) -> None:
    if not messages:
        # A conversation that begins with the model's word is refused by strict servers.
        messages.append({"role": "user", "content": "(The beginning of this conversation was lost.)"})
    if messages[-1]["role"] == "assistant":
        text = f"{messages.pop()['content']}\n\n{text}".strip("\n")
    message: ChatMessage = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = calls
    messages.append(message)


def _copy(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    return [dict(message) for message in messages]
