"""The rules of the offline model: from a conversation to what is said and called next. Pure.

Like any model it sees nothing but the messages: the last user message is the command, and the calls and results
since then tell how far it is. It never claims what no result has shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from peri_tui.agent.models.patch import FilePatch, parse_patch
from peri_tui.agent.models.rehearsal import FAILED, rehearse

Args = dict[str, object]

_FILES_A_TURN: Final = 8
_SHOWN_LINES: Final = 40
# What the conversation notes for a model after a stop; the command is what stands after it.
_NOTE: Final = re.compile(r"^\[(?:The user stopped this task|This task was ended)[^\n]*\]$", re.MULTILINE)
_HIT: Final = re.compile(r"^(?P<path>.+?):(?P<line>\d+): (?P<text>.*)$")
_QUOTED: Final = r'"[^"\n]*"|\'[^\'\n]*\'|`[^`\n]*`'
_IN: Final = r"(?:\s+in\s+(?P<glob>\S+))?"
_HAS_GLOB: Final = re.compile(r"[*?./\\]")

WHO: Final = (
    "I am Peri's offline model: a small set of rules, not a language model. I work through the same agent, tools, "
    "approvals and rollback as a real one."
)
WHAT: Final = """What I can do here:

- find TEXT
- replace OLD with NEW [in GLOB]
- rename NAME to NAME
- run COMMAND
- apply, followed by a unified diff
- rehearse: a long task that reads, edits and runs commands, made to be stopped
- help
"""
HOW: Final = """To use a real model, set PERI_API_KEY (or OPENAI_API_KEY) and PERI_MODEL, or start Peri with \
--base-url and --model for any server that speaks the OpenAI wire, for example a local one:

    peri --base-url http://127.0.0.1:8080/v1 --model NAME
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says and the tools that it calls, in order. No calls: the task is done."""

    text: str
    calls: list[tuple[str, Args]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """A call that was answered."""

    name: str
    args: dict[str, Any]
    result: str

    @property
    def ok(self) -> bool:
        """False where the tool could not, or was not allowed to."""
        if self.name == "shell" and self.result.endswith("]"):
            return True  # it ran; what it printed may begin with any word
        return bool(self.result) and not self.result.startswith(FAILED)


def reply_to(messages: Sequence[dict[str, Any]], *, hurried: bool = False) -> Reply:
    """Return the next turn.

    Args:
        messages: the conversation in the form of OpenAI's chat completions.
        hurried: nobody watches: a rehearsal does not wait in its commands.
    """
    position = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    prompt = _command(str(messages[position].get("content") or "")) if position >= 0 else ""
    done = _done(messages[position + 1 :])
    if re.match(r"rehearse\b", prompt, re.IGNORECASE):
        turns = sum(message.get("role") == "assistant" for message in messages[position + 1 :])
        text, calls = rehearse(turns, [(d.name, d.args, d.result) for d in done], hurried=hurried)
        return Reply(text, calls)
    for pattern, rule in _RULES:
        if match := pattern.fullmatch(prompt):
            return rule(match, done)
    patches = parse_patch(prompt)
    if patches:
        return _apply(patches, done)
    return _other(prompt)


def _command(text: str) -> str:
    parts = [part.strip() for part in _NOTE.split(text)]
    return next((part for part in reversed(parts) if part), "")


def _done(messages: Sequence[dict[str, Any]]) -> list[Done]:
    results = {
        m.get("tool_call_id"): str(m.get("content") or "") for m in messages if m.get("role") == "tool"
    }
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            try:
                args = json.loads(function.get("arguments") or "{}")
            except ValueError:
                args = {}
            found.append(Done(str(function.get("name")), args, results.get(call.get("id"), "")))
    return found


def _unquote(text: str) -> str:
    return text[1:-1] if re.fullmatch(_QUOTED, text) else text


def _glob(match: re.Match[str]) -> tuple[str, str]:
    """Return (glob, what belongs to the text instead): ``in x`` is a glob only if it looks like one."""
    glob = match["glob"] or ""
    return (glob, "") if not glob or _HAS_GLOB.search(glob) else ("", f" in {glob}")


# --- find ------------------------------------------------------------------------------------------------------------


def _find(match: re.Match[str], done: list[Done]) -> Reply:
    glob, more = _glob(match)
    text = _unquote(match["text"] + more)
    if not done:
        where = f" in {glob}" if glob else ""
        return Reply(f"I look for “{text}”{where}.\n", [("search", _search(text, glob))])
    return Reply(_report_hits(text, done[-1]))


def _search(text: str, glob: str) -> Args:
    pattern: Args = {"pattern": text.split("\n")[0]}
    return pattern | ({"glob": glob} if glob else {})


def _report_hits(text: str, search: Done) -> str:
    if not search.ok:
        return f"The search did not work. {search.result}\n"
    hits = _hits(search.result)
    if not hits:
        return f"“{text}” does not occur in the files that I may see.\n"
    files = list(dict.fromkeys(path for path, _ in hits))
    lines = search.result.splitlines()
    shown = "\n".join(f"    {line}" for line in lines[:_SHOWN_LINES])
    rest = f"\n    … and {len(lines) - _SHOWN_LINES} more lines" if len(lines) > _SHOWN_LINES else ""
    return f"{_count(len(hits), 'line')} in {_count(len(files), 'file')}:\n\n{shown}{rest}\n"


def _hits(result: str) -> list[tuple[str, str]]:
    found = (_HIT.match(line) for line in result.splitlines())
    return [(match["path"], match["text"]) for match in found if match]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")


# --- replace and rename ----------------------------------------------------------------------------------------------


def _replace(match: re.Match[str], done: list[Done]) -> Reply:
    glob, more = _glob(match)
    old, new = _unquote(match["old"]), _unquote(match["new"] + more)
    if old == new:
        return Reply("Both texts are the same, so there is nothing to do.\n")
    if not done:
        where = f" in {glob}" if glob else ""
        return Reply(f"I look for every “{old}”{where} first.\n", [("search", _search(old, glob))])
    if not done[0].ok:
        return Reply(f"The search did not work. {done[0].result}\n")
    paths = list(dict.fromkeys(path for path, _ in _hits(done[0].result)))
    if not paths:
        return Reply(f"“{old}” does not occur in the files that I may see, so nothing was changed.\n")
    left = _left(paths, done)
    if not left:
        return Reply(_summary(f"“{old}” is now “{new}”", done))
    calls: list[tuple[str, Args]] = []
    for path in left[:_FILES_A_TURN]:
        calls.append(("read_file", {"path": path}))
        calls.append(("edit_file", {"path": path, "old": old, "new": new, "all": True}))
    return Reply(_progress(paths, left), calls)


def _left(paths: list[str], done: list[Done]) -> list[str]:
    tried = {str(d.args.get("path")) for d in done if d.name in ("edit_file", "write_file")}
    # A file that could not even be read will not be edited either.
    tried |= {str(d.args.get("path")) for d in done if d.name == "read_file" and not d.ok}
    return [path for path in paths if path not in tried]


def _progress(paths: list[str], left: list[str]) -> str:
    if len(left) == len(paths):
        return f"It occurs in {_count(len(paths), 'file')}. I read each one and change it.\n"
    return f"{len(paths) - len(left)} of {len(paths)} files are through. I go on.\n"


def _summary(what: str, done: list[Done]) -> str:
    edits = [d for d in done if d.name in ("edit_file", "write_file")]
    good = list(dict.fromkeys(str(d.args.get("path")) for d in edits if d.ok))
    bad = [d for d in done if not d.ok]
    lines = [f"{what} in {_count(len(good), 'file')}:" if good else "Nothing was changed."]
    lines += [f"    {path}" for path in good]
    if bad:
        told = [f"    {d.args.get('path', d.name)}: {d.result.splitlines()[0]}" for d in bad]
        lines += ["", "Not done:", *dict.fromkeys(told)]
    if any("[only the first" in d.result for d in done if d.name == "search"):
        lines += ["", "The search shows its first hits only; ask again for the rest."]
    return "\n".join(lines) + "\n"


def _rename(match: re.Match[str], done: list[Done]) -> Reply:
    old, new = _unquote(match["old"]), _unquote(match["new"])
    word = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    if old == new:
        return Reply("Both names are the same, so there is nothing to do.\n")
    if not done:
        return Reply(f"I look for the name {old} first.\n", [("search", {"pattern": old})])
    if not done[0].ok:
        return Reply(f"The search did not work. {done[0].result}\n")
    paths = list(dict.fromkeys(path for path, text in _hits(done[0].result) if word.search(text)))
    if not paths:
        return Reply(f"The name {old} does not occur in the files that I may see, so nothing was changed.\n")
    read = [d for d in done if d.name == "read_file" and d.ok]
    waiting = [d for d in read if str(d.args["path"]) in _left(paths, done)]
    if waiting:
        calls = [call for d in waiting for call in _rename_in(d, word, old, new)]
        return Reply(f"I change {_count(len(waiting), 'file')}, whole words only.\n", calls[:48])
    left = _left(paths, done)
    if not left:
        return Reply(_summary(f"{old} is now {new}", done))
    return Reply(_progress(paths, left), [("read_file", {"path": path}) for path in left[:_FILES_A_TURN]])


def _rename_in(read: Done, word: re.Pattern[str], old: str, new: str) -> list[tuple[str, Args]]:
    """Return the edits of one file; where every occurrence is a whole word, one edit does it."""
    path, text = str(read.args["path"]), read_part(read.result)
    if text.count(old) == len(word.findall(text)):
        return [("edit_file", {"path": path, "old": old, "new": new, "all": True})]
    calls: list[tuple[str, Args]] = []
    for number, line in enumerate(text.split("\n")):
        if word.search(line):
            span = unique_span(text, number)
            changed = word.sub(lambda _: new, span)
            calls.append(("edit_file", {"path": path, "old": span, "new": changed}))
            # The next span is looked for in the file as this edit leaves it.
            text = text.replace(span, changed, 1)
    return calls or [("edit_file", {"path": path, "old": old, "new": new, "all": True})]


def read_part(result: str) -> str:
    """Return the text of a read_file result, without its header line."""
    head, _, text = result.partition("\n")
    return text if head.startswith("[") else result


def unique_span(text: str, number: int) -> str:
    """Return line ``number`` with as many lines around it as make the span unique in ``text``."""
    lines = text.split("\n")
    first = last = number
    while True:
        span = "\n".join(lines[first : last + 1])
        if text.count(span) == 1 or (first == 0 and last == len(lines) - 1):
            return span
        first, last = max(0, first - 1), min(len(lines) - 1, last + 1)


# --- run, apply, the rest --------------------------------------------------------------------------------------------


def _run(match: re.Match[str], done: list[Done]) -> Reply:
    command = match["command"].strip()
    if len(command) > 1 and command[0] == command[-1] == "`":
        command = command[1:-1]
    if not done:
        return Reply("I run it.\n", [("shell", {"command": command})])
    result = done[-1]
    if not result.ok:
        return Reply(f"The command did not run. {result.result}\n")
    lines = result.result.splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-_SHOWN_LINES:])
    return Reply(f"The command has ended. This is what it gave:\n\n{tail}\n")


def _apply(patches: list[FilePatch], done: list[Done]) -> Reply:
    calls = [call for patch in patches for call in patch.calls()]
    bad = [f"    {patch.path}: {patch.refused}" for patch in patches if patch.refused]
    begun = len(done)
    if begun < len(calls):
        text = (
            f"The diff is about {_count(len(patches), 'file')}. I apply it.\n" if not begun else "I go on.\n"
        )
        return Reply(text, calls[begun : begun + 40])
    text = _summary("The diff is applied", done)
    return Reply(text + ("\nLeft out:\n" + "\n".join(bad) + "\n" if bad else ""))


def _help(match: re.Match[str], done: list[Done]) -> Reply:
    return Reply(f"{WHO}\n\n{WHAT}\n{HOW}")


def _other(prompt: str) -> Reply:
    if not prompt:
        return Reply(f"There is nothing to do. {WHO}\n\n{WHAT}")
    return Reply(f"I cannot do that: {WHO[0].lower() if WHO[0] != 'I' else 'I'}{WHO[1:]}\n\n{WHAT}\n{HOW}")


Rule = Callable[[re.Match[str], list[Done]], Reply]
_RULES: Final[list[tuple[re.Pattern[str], Rule]]] = [
    (re.compile(rf"(?:find|search for|grep)\s+(?P<text>{_QUOTED}|.+?){_IN}", re.IGNORECASE), _find),
    (
        re.compile(
            rf"replace\s+(?P<old>{_QUOTED}|.+?)\s+(?:with|by)\s+(?P<new>{_QUOTED}|.+?){_IN}", re.IGNORECASE
        ),
        _replace,
    ),
    (re.compile(rf"rename\s+(?P<old>{_QUOTED}|\S+)\s+to\s+(?P<new>{_QUOTED}|\S+)", re.IGNORECASE), _rename),
    (re.compile(r"run\s+(?P<command>.+)", re.IGNORECASE | re.DOTALL), _run),
    (re.compile(r"(?:help|\?|what can you do\??)", re.IGNORECASE), _help),
]
