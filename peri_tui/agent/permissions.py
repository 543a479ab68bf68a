"""Approvals: what asks the user, what an approval is bound to, and what always asks.

An approval belongs to one act: the tool, its exact arguments, the folder, and what stands on disk at that moment (the
bytes of the file to be changed, the program and the files that a command names). It is used once, and compared again
directly before the act; when anything differs, the question is asked again. "This exact command, this session" keeps
a rule over command, folder and program, so that running the tests again does not ask, but a changed script does.

Modes: ``ask`` asks for edits, writes and commands; ``all`` asks for none of them but those that are dangerous. There
is no tool that can change any of this.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from peri_tui.agent.questions import Reply
from peri_tui.core.messages import Asked, Resolved, TaskEvent, scrub
from peri_tui.core.states import TaskState

ANSWER_WITHIN_S: Final = 120.0
MAX_ASKS: Final = 5
_MAX_WORDS: Final = 64
_HASH_BELOW: Final = 4 * 1024 * 1024
_WORD: Final = re.compile(r"[^\s;&|<>()\"'`$=]+")
_ASSIGNMENTS: Final = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_]*=\S*\s+)*")

HEADLESS: Final = (
    "Denied: nobody is here to approve it. The user can run Peri with --approve all to allow it."
)
HEADLESS_DANGER: Final = (
    "Denied: {why}, which always needs the user's own approval, and nobody is here to give it."
)
NO_ANSWER: Final = "Denied: no consent, the question was not answered in time."

_SHELL_FILES: Final = frozenset(
    [
        ".bashrc",
        ".bash_profile",
        ".bash_login",
        ".bash_logout",
        ".profile",
        ".zshrc",
        ".zshenv",
        ".zprofile",
        ".zlogin",
        ".kshrc",
        ".cshrc",
        ".tcshrc",
        ".inputrc",
        ".envrc",
        ".gitconfig",
        ".gitmodules",
        ".ssh",
        "authorized_keys",
    ]
)
_TASK_FILES: Final = (
    ".vscode/tasks.json",
    ".vscode/settings.json",
    ".vscode/launch.json",
    ".idea/workspace.xml",
)


@dataclass(frozen=True, slots=True)
class Preview:
    """What an act would do, as far as it can be known before.

    ``title`` and ``detail`` are shown whole; ``targets`` are workspace paths with the hash of what stands there now
    ("" for nothing); ``command`` is the text of a shell command; ``danger`` is why this always asks, or "".
    """

    title: str
    detail: str
    diff: str = ""
    where: str = ""
    note: str = ""
    targets: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    danger: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the act may happen. ``text`` goes to the model with a denial; ``unattended``: nobody was there."""

    allowed: bool
    text: str = ""
    unattended: bool = False


class SessionRules:
    """What the user allowed for the rest of the session; held in memory, gone with the agent."""

    def __init__(self) -> None:
        self._allowed: set[str] = set()

    def allow(self, rule: str) -> None:
        """Remember a rule made by ``Permissions``."""
        self._allowed.add(rule)

    def covers(self, rule: str) -> bool:
        """Tell whether exactly this was allowed."""
        return rule in self._allowed


class Permissions:
    """Decides one task's acts.

    Args:
        task: the task's id.
        mode: ask or all.
        interactive: somebody can answer.
        workspace: the folder of the task, absolute.
        ask: puts a question and waits for its end (``Reply``: allow, allow_session, deny, cancelled).
        emit: publishes an event.
        set_state: the task waits, or runs again.
        environ: the environment that commands get; its PATH finds programs.
        private: Peri's own folders.
        rules: the session's rules.
        answer_within: seconds after which no answer is a denial; 0 for never.
    """

    def __init__(
        self,
        task: str,
        *,
        mode: str,
        interactive: bool,
        workspace: Path,
        ask: Callable[[Asked], Awaitable[Reply]],
        emit: Callable[[TaskEvent], object],
        set_state: Callable[[TaskState], Awaitable[object]],
        environ: Mapping[str, str] = os.environ,
        private: Sequence[Path] = (),
        rules: SessionRules | None = None,
        answer_within: float = ANSWER_WITHIN_S,
    ) -> None:
        self._task = task
        self._mode = mode
        self._interactive = interactive
        self._workspace = workspace
        self._ask = ask
        self._emit = emit
        self._set_state = set_state
        self._environ = environ
        self._private = tuple(private)
        self._rules = rules or SessionRules()
        self._answer_within = answer_within
        self._asked = 0

    def danger(self, preview: Preview) -> str:
        """Return why this act always asks, or "" where it is an ordinary one."""
        if preview.danger:
            return preview.danger
        for path in preview.targets:
            why = dangerous_path(path, self._workspace, self._private)
            if why:
                return f"{path} is {why}"
        why = dangerous_command(preview.command, self._private) if preview.command else ""
        return f"the command names {why}" if why else ""

    def asks(self, preview: Preview) -> str | None:
        """Return None where the act may happen without a question, else why it asks ("" = the mode)."""
        danger = self.danger(preview)
        return danger if danger or self._mode != "all" else None

    def binding(self, tool: str, arguments: str, preview: Preview) -> str:
        """Return the digest of everything an approval belongs to. Reads the disk: call it in the thread."""
        files = command_files(preview.command, self._workspace, self._environ)
        return _digest(tool, arguments, self._folder(), sorted(preview.targets.items()), files)

    def rule(self, tool: str, arguments: str, preview: Preview) -> str:
        """Return the session rule for a command, or "" where none can be made. Reads the disk."""
        if not preview.command:
            return ""
        files = command_files(preview.command, self._workspace, self._environ)[:1]
        return _digest("rule", tool, arguments, self._folder(), files)

    async def decide(self, tool: str, preview: Preview, *, why: str, rule: str) -> Decision:
        """Ask the user, unless a rule of the session covers the act or nobody is there.

        Args:
            tool: the tool's name.
            preview: what it would do.
            why: what ``asks`` returned.
            rule: what ``rule`` returned.
        """
        if not why and rule and self._rules.covers(rule):
            return Decision(True)
        if not self._interactive:
            text = HEADLESS_DANGER.format(why=why) if why else HEADLESS
            return Decision(False, text, unattended=True)
        reply = await self._question(tool, preview, why)
        if reply.outcome == "allow_session" and rule and not why:
            self._rules.allow(rule)
        if reply.outcome in ("allow", "allow_session"):
            return Decision(True)
        return Decision(False, _denial(reply))

    async def _question(self, tool: str, preview: Preview, why: str) -> Reply:
        self._asked += 1
        asked = Asked(
            task=self._task,
            qid=f"q{self._asked}",
            kind="tool",
            tool=tool,
            title=preview.title,
            detail=scrub(preview.detail),
            diff=scrub(preview.diff),
            where=scrub(preview.where),
            note=scrub("; ".join(filter(None, (why, preview.note)))),
        )
        await self._set_state(TaskState.WAITING)
        reply = await self._wait(asked)
        # The stop may have closed it. Then its cancel reaches this body at its next await; nothing runs before.
        if reply.outcome != "cancelled":
            await self._set_state(TaskState.RUNNING)
        return reply

    async def _wait(self, asked: Asked) -> Reply:
        reply = Reply("cancelled")
        # The desk must hold the question before anybody can see it, or a quick answer finds nothing.
        answer = asyncio.ensure_future(self._ask(asked))
        await asyncio.sleep(0)
        self._emit(asked)
        try:
            async with asyncio.timeout(self._answer_within or None):
                reply = await answer
        except TimeoutError:
            reply = Reply("deny", NO_ANSWER)
        finally:
            answer.cancel()
            self._emit(Resolved(task=self._task, qid=asked.qid, outcome=reply.outcome))
        return reply

    def _folder(self) -> tuple[str, int, int]:
        info = os.stat(self._workspace)
        return str(self._workspace), info.st_dev, info.st_ino


def dangerous_path(path: str, workspace: Path, private: Sequence[Path] = ()) -> str:
    """Return what makes a path one that always asks, or "".

    Args:
        path: relative to the workspace; it need not exist.
        workspace: the folder of the task.
        private: Peri's own folders.
    """
    parts = [part.casefold() for part in path.split("/") if part not in ("", ".")]
    if ".git" in parts[:-1] or parts[-1:] == [".git"]:
        return "part of git's own folder, which can run programs"
    if ".peri" in parts:
        return "a setting of Peri for this project"
    if _SHELL_FILES.intersection(parts):
        return "a start-up file of a shell or of git"
    if any("/".join(parts).endswith(name) for name in _TASK_FILES):
        return "a task file of an editor"
    whole = Path(os.path.realpath(workspace / path))
    if any(whole.is_relative_to(os.path.realpath(folder)) for folder in private):
        return "in Peri's own folders"
    return ""


def dangerous_command(command: str, private: Sequence[Path] = ()) -> str:
    """Return what a command names that always asks, or "". A look at the words, not a shell parser: it can miss.

    It is there for the honest mistake; what a command really does is contained by approval, not by this.
    """
    lowered = command.casefold()
    for name in (".git/hooks", ".git/config", "core.hookspath", *sorted(_SHELL_FILES)):
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", lowered):
            return name
    return next((str(folder) for folder in private if str(folder) in command), "")


def command_files(
    command: str, workspace: Path, environ: Mapping[str, str]
) -> list[tuple[str, int, int, int, str]]:
    """Return what stands on disk behind the words of a command: path, device, inode, mtime, hash; program first.

    Any word that names a file or folder counts, also below a folder that another word names (``cd sub && ./run``).
    """
    words = _WORD.findall(_ASSIGNMENTS.sub("", command, count=1))[:_MAX_WORDS]
    if not words:
        return []
    program = words[0] if "/" in words[0] else shutil.which(words[0], path=environ.get("PATH")) or words[0]
    bases = [workspace, *(workspace / word for word in words if os.path.isdir(workspace / word))]
    found = [_identity(workspace / program)]
    found += [_identity(base / word) for base in bases for word in words]
    return [found[0], *sorted({item for item in found[1:] if item[1]})]


def _identity(path: Path) -> tuple[str, int, int, int, str]:
    try:
        info = os.stat(path)
        small = info.st_size < _HASH_BELOW and stat.S_ISREG(info.st_mode)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
    except (OSError, ValueError):
        return (str(path), 0, 0, 0, "")
    # A folder's mtime changes with every file made in it; its identity is enough.
    return (
        str(path),
        info.st_dev,
        info.st_ino,
        0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns,
        digest,
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _denial(reply: Reply) -> str:
    if reply.outcome == "cancelled":
        return "Stopped by the user before it was approved."
    if reply.text == NO_ANSWER:
        return NO_ANSWER
    said = f" The user says: {reply.text}" if reply.text else ""
    return f"Denied by the user; nothing was done. Do not try the same again without asking.{said}"
