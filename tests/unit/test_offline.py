"""The offline model's rules, driven as the agent drives a model: over a conversation, with a small folder of files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest

from peri_tui.agent.models.call import Finished, ModelEvent, ModelRequest, TextDelta, ToolCall, UsageReport
from peri_tui.agent.models.offline import OfflineModel
from peri_tui.agent.models.patch import parse_patch
from peri_tui.agent.models.rules import reply_to, unique_span
from peri_tui.errors import ModelError

pytestmark = pytest.mark.unit

TOOLS = {"read_file", "list_files", "search", "edit_file", "write_file", "shell"}


class FakeFolder:
    """The agent's tools over a dictionary; answers in the words of the real ones."""

    def __init__(self, files: dict[str, str], *, deny: str = "") -> None:
        self.files = dict(files)
        self.deny = deny
        self.ran: list[tuple[str, dict[str, Any]]] = []

    def run(self, name: str, args: dict[str, Any]) -> str:
        assert name in TOOLS
        self.ran.append((name, args))
        if name == self.deny:
            return "Denied by the user; nothing was done. Do not try the same again without asking."
        return str(getattr(self, name)(**args))

    def read_file(self, path: str, offset: int = 1, limit: int = 2000) -> str:
        if path not in self.files:
            return f"Error: {path}: no such file"
        lines = self.files[path].removesuffix("\n").split("\n")
        return f"[{path}: lines 1-{len(lines)} of {len(lines)}]\n" + "\n".join(lines)

    def list_files(self, path: str = "", glob: str = "") -> str:
        return "\n".join(sorted(self.files)) or "no files"

    def search(self, pattern: str, glob: str = "", regex: bool = False) -> str:
        hits = [
            f"{path}:{number}: {line}"
            for path, text in sorted(self.files.items())
            if not glob or path.endswith(glob.lstrip("*"))
            for number, line in enumerate(text.split("\n"), 1)
            if pattern in line
        ]
        return "\n".join(hits) or "no hits"

    def edit_file(self, path: str, old: str, new: str, all: bool = False) -> str:
        text = self.files[path]
        if old not in text or (text.count(old) > 1 and not all):
            return f"Error: {path}: the text occurs {text.count(old)} times"
        self.files[path] = text.replace(old, new)
        return f"{path}: changed (−1 +1)"

    def write_file(self, path: str, content: str) -> str:
        if path in self.files:
            return f"Error: {path}: exists already; read it first"
        self.files[path] = content
        return f"{path}: made (+1)"

    def shell(self, command: str, timeout: float = 120) -> str:
        return f"output of {command}\n[exit 0]"


def converse(folder: FakeFolder, prompt: str, history: list[dict[str, Any]] | None = None) -> str:
    """Run a prompt to its end and return the last answer."""
    messages = [*(history or []), {"role": "user", "content": prompt}]
    for _ in range(40):
        reply = reply_to(messages, hurried=True)
        assert reply.text.strip()
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if not reply.calls:
            return reply.text
        message["tool_calls"] = [
            {
                "id": f"c{len(messages)}_{i}",
                "type": "function",
                "function": {"name": n, "arguments": json.dumps(a)},
            }
            for i, (n, a) in enumerate(reply.calls)
        ]
        messages.append(message)
        for call, (name, args) in zip(message["tool_calls"], reply.calls, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": folder.run(name, args)})
    raise AssertionError("the model never came to an end")


FILES = {
    "a.py": "total = 1\nsubtotal = total\n",
    "b.py": "print(total)\n",
    "c.md": "The total.\n",
    "d.txt": "none\n",
}


def test_find() -> None:
    folder = FakeFolder(FILES)
    answer = converse(folder, "find total")
    assert answer.startswith("4 lines in 3 files:")
    assert "a.py:2: subtotal = total" in answer
    assert "does not occur" in converse(folder, "Find nothing at all")
    assert folder.ran[-1] == ("search", {"pattern": "nothing at all"})
    converse(folder, "find 'x y' in *.py")
    assert folder.ran[-1] == ("search", {"pattern": "x y", "glob": "*.py"})
    converse(folder, "find joy in life")
    assert folder.ran[-1] == ("search", {"pattern": "joy in life"})


def test_replace_in_all_files_and_in_a_glob() -> None:
    folder = FakeFolder(FILES)
    answer = converse(folder, 'replace "total" with "sum"')
    assert folder.files == {k: v.replace("total", "sum") for k, v in FILES.items()}
    assert "“total” is now “sum” in 3 files" in answer
    folder = FakeFolder(FILES)
    converse(folder, "replace total with sum in *.py")
    assert folder.files["c.md"] == FILES["c.md"]
    assert folder.files["b.py"] == "print(sum)\n"


def test_replace_goes_through_many_files_in_turns() -> None:
    folder = FakeFolder({f"f{i:02}.py": "old\n" for i in range(30)})
    assert "in 30 files" in converse(folder, "replace old with new")
    assert set(folder.files.values()) == {"new\n"}


def test_replace_says_what_it_could_not_do() -> None:
    folder = FakeFolder(FILES, deny="edit_file")
    answer = converse(folder, "replace total with sum")
    assert answer.startswith("Nothing was changed.")
    assert "a.py: Denied by the user" in answer
    assert "does not occur" in converse(folder, "replace zebra with horse")
    assert "the same" in converse(folder, "replace x with x")
    assert "did not work" in converse(FakeFolder(FILES, deny="search"), "replace a with b")


def test_rename_changes_whole_words_only() -> None:
    files = FILES | {"e.py": "total\ntotally\ntotal_x\n  total\ntotal\n"}
    folder = FakeFolder(files)
    answer = converse(folder, "rename total to amount")
    assert folder.files == {path: re.sub(r"\btotal\b", "amount", text) for path, text in files.items()}
    assert "total is now amount in 4 files" in answer
    assert "does not occur" in converse(FakeFolder({"a": "totally"}), "rename total to amount")


def test_run_shows_the_output_and_a_denial() -> None:
    folder = FakeFolder({})
    assert "output of make test" in converse(folder, "run make test")
    converse(folder, "run `ls -l`")
    assert folder.ran[-1] == ("shell", {"command": "ls -l"})
    assert "did not run. Denied" in converse(FakeFolder({}, deny="shell"), "run make")


DIFF = """apply
```diff
diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1,2 +1,3 @@
-total = 1
+total = 2
+other = 3
 subtotal = total
--- /dev/null
+++ b/new/file.txt
@@ -0,0 +1,2 @@
+one
+two
--- a/d.txt\t2026-01-01
+++ /dev/null
@@ -1 +0,0 @@
-none
```
"""


def test_apply_a_pasted_diff() -> None:
    folder = FakeFolder(FILES)
    answer = converse(folder, DIFF)
    assert folder.files["a.py"] == "total = 2\nother = 3\nsubtotal = total\n"
    assert folder.files["new/file.txt"] == "one\ntwo\n"
    assert ("shell", {"command": "rm -- d.txt"}) in folder.ran
    assert "The diff is applied in 2 files" in answer


def test_a_diff_that_cannot_be_applied_is_said() -> None:
    patches = parse_patch(
        "--- a/x\n+++ b/x\n@@ -1,5 +1,5 @@\n-a\n+b\n--- a/y\n+++ b/y\n@@ -1,0 +1,1 @@\n+b\n"
    )
    assert [patch.refused for patch in patches] == [
        "a hunk is not complete",
        "a hunk has no lines to be found by",
    ]
    assert "Left out:" in converse(FakeFolder({}), "apply\n--- a/x\n+++ b/x\n@@ -1,5 +1,5 @@\n-a\n+b\n")
    assert parse_patch("no diff here\n--- a\nnothing") == []


def test_the_rehearsal_makes_and_changes_files_and_runs_commands() -> None:
    folder = FakeFolder(FILES)
    answer = converse(folder, "rehearse")
    assert set(folder.files) - set(FILES) == {"peri-rehearsal/plan.md", "peri-rehearsal/notes.md"}
    changed = [path for path in FILES if folder.files[path] != FILES[path]]
    assert len(changed) == 3
    assert all(folder.files[path].startswith(FILES[path].rstrip("\n")) for path in changed)
    assert [name for name, _ in folder.ran].count("shell") == 3
    assert "peri undo" in answer
    assert "did not work" not in answer


def test_the_rehearsal_works_in_an_empty_folder_and_beside_an_old_one() -> None:
    assert "did not work" not in converse(empty := FakeFolder({}), "rehearse")
    assert len(empty.files) == 2
    converse(again := FakeFolder({"peri-rehearsal/plan.md": "mine\n"}), "rehearse")
    assert again.files["peri-rehearsal/plan.md"] == "mine\n"
    assert "peri-rehearsal-2/plan.md" in again.files
    assert "Denied" in converse(FakeFolder(FILES, deny="shell"), "rehearse")


def test_the_rehearsal_takes_its_time() -> None:
    """40 to 60 seconds at the default pace: what is written, and what the commands wait."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "rehearse"}]
    folder, written, waited = FakeFolder(FILES), 0, 0.0
    while True:
        reply = reply_to(messages)
        written += len(reply.text) + sum(len(json.dumps(args)) for _, args in reply.calls)
        if not reply.calls:
            break
        calls = []
        results = []
        for number, (name, args) in enumerate(reply.calls):
            call = f"c{len(messages)}_{number}"
            calls.append(
                {"id": call, "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
            )
            results.append({"role": "tool", "tool_call_id": call, "content": folder.run(name, args)})
            if name == "shell":
                waited += float(str(args["command"]).split()[1])
        messages += [{"role": "assistant", "content": reply.text, "tool_calls": calls}, *results]
    assert 40 <= written / 4 / 60 + waited <= 60


def test_help_and_the_honest_answer() -> None:
    for prompt in ("help", "?", "write me a compiler", ""):
        answer = converse(FakeFolder({}), prompt)
        assert "offline model" in answer
        assert "rehearse" in answer
    answer = converse(FakeFolder({}), "write me a compiler")
    assert answer.startswith("I cannot do that: I am Peri's offline model")
    assert "PERI_API_KEY" in answer
    assert "--base-url" in answer


def test_only_the_last_command_counts_also_after_a_stop() -> None:
    note = "[The user stopped this task before it was finished. Its changes were taken back.]"
    joined = f"rehearse\n\n{note}\n\nfind total"
    assert "4 lines" in converse(FakeFolder(FILES), joined)
    history = [{"role": "user", "content": "find x"}, {"role": "assistant", "content": "no"}]
    assert "4 lines" in converse(FakeFolder(FILES), f"{note}\n\nfind total", history)


def test_unique_span_grows_until_it_is_unique() -> None:
    assert unique_span("a\nb\na\nc", 0) == "a\nb"
    assert unique_span("x\nx\nx", 1) == "x\nx\nx"


# --- the model around the rules --------------------------------------------------------------------------------------


def ask(prompt: str) -> ModelRequest:
    return ModelRequest([{"role": "system", "content": "s"}, {"role": "user", "content": prompt}], [])


async def collect(model: OfflineModel, prompt: str, into: list[ModelEvent]) -> list[ModelEvent]:
    async with contextlib.aclosing(model.stream(ask(prompt))) as events:
        async for event in events:
            into.append(event)  # noqa: PERF401 - what came before a stop must be seen
    return into


async def test_a_turn_in_events() -> None:
    model = OfflineModel(rate=0)
    got = await collect(model, "find total", [])
    assert isinstance(got[0], TextDelta)
    assert got[-3:] == [
        ToolCall(0, "offline_1", "search", '{"pattern": "total"}'),
        UsageReport(2, 10),
        Finished("tool_calls"),
    ]
    assert model.usage().exact
    assert (await collect(model, "help", []))[-1] == Finished("stop")
    assert (model.open_sockets(), model.far_end(), model.phase) == ([], "none", "idle")
    await model.aclose()


async def test_the_pace_is_that_of_a_person_reading() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    got = await collect(OfflineModel(rate=50, sleep=sleep), "help", [])
    characters = sum(len(event.text) for event in got if isinstance(event, TextDelta))
    assert sum(slept) == pytest.approx((20 + -(-characters // 4)) / 50)


@pytest.mark.parametrize("presses", [1, 2, 3])
async def test_it_stops_at_once(presses: int) -> None:
    model, got = OfflineModel(rate=1000), []
    task = asyncio.create_task(collect(model, "rehearse", got))
    while not got:
        await asyncio.sleep(0)
    assert model.phase == "streaming"
    assert model.shut() == []
    seen = len(got)
    for _ in range(presses):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(got) == seen
    assert model.usage().exact is False
    with pytest.raises(ModelError, match="stopped"):
        await collect(model, "help", [])


async def test_shut_alone_ends_it() -> None:
    model, got = OfflineModel(rate=1000), []
    task = asyncio.create_task(collect(model, "rehearse", got))
    while not got:
        await asyncio.sleep(0)
    model.shut()
    with pytest.raises(ModelError, match="stopped"):
        await task
    assert [event for event in got if isinstance(event, ToolCall)] == []
