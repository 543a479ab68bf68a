"""The rehearsal: a long task that reads, edits and runs commands, made to be stopped. Pure.

It works on whatever the folder holds: it makes a folder of its own, adds one comment line to a few files, and runs
commands that change nothing but take their time, with child processes. It takes 40 to 60 seconds at human pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

Args = dict[str, object]
Calls = list[tuple[str, Args]]
Done = Sequence[tuple[str, dict[str, Any], str]]

_MARK: Final = "peri rehearsal: this line goes away when you stop the task"
_COMMENTS: Final = {
    ".py": "# {}", ".sh": "# {}", ".toml": "# {}", ".yaml": "# {}", ".yml": "# {}", ".rb": "# {}",
    ".js": "// {}", ".ts": "// {}", ".go": "// {}", ".rs": "// {}", ".c": "// {}", ".h": "// {}",
    ".cpp": "// {}", ".java": "// {}", ".css": "/* {} */", ".html": "<!-- {} -->", ".md": "<!-- {} -->",
    ".txt": "{}", ".rst": ".. {}",
}  # fmt: skip
_FILES: Final = 3
# How the result of a call begins that the agent did not carry out.
FAILED: Final = ("Error: ", "Denied", "Not run", "Stopped by the user")

_INTRO: Final = """This is a rehearsal: a long task that does real work on this folder, so that you can stop it at \
any moment and see what happens. I am the offline model, a set of rules, but everything below me is real: the agent \
process, the tools, the commands they start, the journal that remembers every byte before it is changed.

Press Esc whenever you like. Five layers then have to show that they stopped: the screen that took the key, the \
client that sent it, the scheduler that ended the task, the model that hung up, and the rollback that ends every \
process and puts the files back. The card at the end shows what each of them can prove, and what it cannot.

First I look at what is here.
"""
_READ: Final = """I read a few files. Nothing is changed by that, but what I have read is remembered: an edit is \
refused if the file is not the one that I saw. That matters when you work in the same folder while I do.
"""
_PLAN: Final = """Now the first change: a new folder with a plan in it. Before a file is written, the journal holds \
that it was not there. If you stop me now, the file goes away again, and the folder with it; its bytes are kept \
aside, so nothing is lost by a stop that you regret.

Then I will run a command that takes a while, change a file that was here before me, write some notes, run another \
command, and come back to the plan. You can stop me in each of these steps. A stop while I talk is the easy case, \
one while a command runs is the hard one, because a command may have children that do not listen.
"""
_CHECK: Final = """A command now. It counts slowly and has a child process of its own; both belong to this task, \
and a stop ends both. You can stop me while it counts: no process may be left.
"""
_EDIT: Final = """Now I change a file that was here before me: one comment line at its end. The old bytes are in \
the store before the new ones are in the folder.
"""
_MORE: Final = """Some notes, and the next file. There are now several changes on top of each other, new files and \
old ones. A stop takes them back in reverse order and looks at each result: a file that you have changed meanwhile \
is yours and stays as you left it, and the card says so.
"""
_BUILD: Final = """The next command takes longer. It stands for a build or a test run that nobody wants to wait \
for, and it has children that wait in the background.
"""
_AGAIN: Final = """Back to the plan: I tick off what is done. This file was made by me and is changed by me; when \
you stop me, it goes away as a whole.
"""
_LAST: Final = """One more command, the last one. After it the task ends by itself, and then the changes stay, \
because you let me finish. You could still take them back with peri undo.
"""


def rehearse(turn: int, done: Done, *, hurried: bool = False) -> tuple[str, Calls]:
    """Return (text, calls) of turn ``turn``, counted from 0.

    Args:
        turn: how many answers the model has given since the command.
        done: (name, arguments, result) of every call since the command.
        hurried: do not wait in the commands.
    """
    folder, files = _free_folder(done), _chosen(done)
    plan, pause = f"{folder}/plan.md", "0.02" if hurried else "1"
    steps: list[tuple[str, Calls]] = [
        (_INTRO, [("list_files", {})]),
        (_READ, [("read_file", {"path": path}) for path in files]),
        (
            _PLAN,
            [("write_file", {"path": plan, "content": "# Plan\n\n- [ ] check\n- [ ] change\n- [ ] build\n"})],
        ),
        (_CHECK, [("shell", {"command": _counting("check", 6, pause)})]),
        (_EDIT, _edits(done, files[:1])),
        (
            _MORE,
            [
                ("write_file", {"path": f"{folder}/notes.md", "content": _notes(files)}),
                *_edits(done, files[1:2]),
            ],
        ),
        (_BUILD, [("shell", {"command": _counting("build", 10, pause)})]),
        (
            _AGAIN,
            [
                ("edit_file", {"path": plan, "old": "- [ ] change", "new": "- [x] change"}),
                *_edits(done, files[2:3]),
            ],
        ),
        (_LAST, [("shell", {"command": _counting("verify", 8, pause)})]),
    ]
    # A turn without a call would end the task, so steps that have nothing to do here are left out.
    steps = [step for step in steps if step[1]]
    return steps[turn] if turn < len(steps) else (_farewell(done), [])


def _counting(word: str, count: int, pause: str) -> str:
    numbers = " ".join(str(number) for number in range(1, count + 1))
    # The background child lives as long as the count would; a stop must end it too.
    return (
        f'sleep {float(pause) * count:g} & for i in {numbers}; do echo "{word} $i of {count}"; '
        f"sleep {pause}; done; wait"
    )


def _listed(done: Done) -> list[str]:
    result = next((result for name, _, result in done if name == "list_files"), "")
    return [line for line in result.splitlines() if line and not line.startswith("[")]


def _free_folder(done: Done) -> str:
    tops = {path.partition("/")[0] for path in _listed(done)}
    name, number = "peri-rehearsal", 2
    while name in tops:
        name, number = f"peri-rehearsal-{number}", number + 1
    return name


def _chosen(done: Done) -> list[str]:
    """Return a few files that a comment line does no harm to, from different folders where there are some."""
    good = [
        p for p in _listed(done) if PurePosixPath(p).suffix in _COMMENTS and not p.startswith((".", "peri-"))
    ]
    first_of_each = list({str(PurePosixPath(path).parent): path for path in reversed(good)}.values())[::-1]
    return [*first_of_each, *(path for path in good if path not in first_of_each)][:_FILES]


def _edits(done: Done, paths: Sequence[str]) -> Calls:
    calls: Calls = []
    for path in paths:
        result = next((r for name, args, r in done if name == "read_file" and args.get("path") == path), "")
        head, _, text = result.partition("\n")
        old = _end_of(text) if head.startswith("[") and "go on with" not in head else ""
        if old:
            comment = _COMMENTS[PurePosixPath(path).suffix].format(_MARK)
            calls.append(("edit_file", {"path": path, "old": old, "new": f"{old}\n{comment}"}))
    return calls


def _end_of(text: str) -> str:
    """Return the last lines, as many as are unique in ``text``."""
    lines = text.split("\n")
    for first in range(len(lines) - 1, -1, -1):
        span = "\n".join(lines[first:])
        if span.strip() and text.count(span) == 1:
            return span
    return ""


def _notes(files: Sequence[str]) -> str:
    lines = [f"- {path} gets one comment line at its end" for path in files] or [
        "- no file was there to change"
    ]
    return "\n".join(
        ["# Notes of the rehearsal", "", *lines, "", "Stop the task, and this file goes away.", ""]
    )


def _farewell(done: Done) -> str:
    changed = [str(args.get("path")) for name, args, result in done if name in ("edit_file", "write_file")]
    failed = [
        f"    {args.get('path') or args.get('command') or name}: {result.splitlines()[0] if result else 'no result'}"
        for name, args, result in done
        if result.startswith(FAILED) or not result
    ]
    lines = ["The rehearsal is over, and nobody stopped it.", ""]
    lines += ["These files were to be changed or made:", ""] + [
        f"    {path}" for path in dict.fromkeys(changed)
    ]
    if failed:
        lines += ["", "These steps did not work:", "", *failed]
    lines += ["", "To put everything back: peri undo. To see a stop: say rehearse again, and press Esc.", ""]
    return "\n".join(lines)
