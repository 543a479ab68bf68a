"""What asks, what an approval is bound to, and what no mode allows by itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.permissions import (
    Decision,
    Permissions,
    Preview,
    SessionRules,
    command_files,
    dangerous_command,
    dangerous_path,
)
from peri_tui.agent.questions import Reply
from peri_tui.core.messages import Asked, Resolved
from peri_tui.core.states import TaskState

pytestmark = pytest.mark.unit

ENV = {"PATH": "/usr/bin:/bin"}


class Desk:
    """Answers questions and keeps what was seen."""

    def __init__(self, *answers: str | Reply) -> None:
        self.answers = list(answers)
        self.events: list[Any] = []
        self.log: list[str] = []
        self.registered = False

    async def ask(self, asked: Asked) -> Reply:
        self.registered = True
        answer = self.answers.pop(0)
        if answer == "wait":
            await asyncio.Event().wait()
        return answer if isinstance(answer, Reply) else Reply(answer)

    def emit(self, event: Any) -> bool:
        if isinstance(event, Asked):
            assert self.registered, "a quick answer would find no question"
        self.events.append(event)
        self.log.append(type(event).__name__)
        return True

    async def set_state(self, state: TaskState) -> None:
        self.log.append(state.value)


def permissions(workspace: Path, desk: Desk, **how: Any) -> Permissions:
    settings: dict[str, Any] = {"mode": "ask", "interactive": True} | how
    return Permissions(
        "T",
        workspace=workspace,
        ask=desk.ask,
        emit=desk.emit,
        set_state=desk.set_state,
        environ=ENV,
        **settings,
    )


def command(text: str) -> Preview:
    return Preview("Run a command?", text, command=text)


async def decide(judge: Permissions, preview: Preview) -> Decision:
    why = judge.asks(preview)
    assert why is not None
    rule = judge.rule("shell", preview.command, preview)
    return await judge.decide("shell", preview, why=why, rule=rule)


# --- the question ---------------------------------------------------------------------------------------------------


async def test_the_state_goes_to_waiting_and_back(tmp_path: Path) -> None:
    desk = Desk("allow")
    assert (await decide(permissions(tmp_path, desk), command("ls"))).allowed
    assert desk.log == ["waiting", "Asked", "Resolved", "running"]
    assert desk.events[0].detail == "ls"


async def test_a_denial_carries_the_users_words(tmp_path: Path) -> None:
    decision = await decide(permissions(tmp_path, Desk(Reply("deny", "use make"))), command("ls"))
    assert not decision.allowed
    assert "use make" in decision.text


async def test_a_stop_during_the_question_closes_it_as_cancelled(tmp_path: Path) -> None:
    desk = Desk("wait")
    asking = asyncio.create_task(decide(permissions(tmp_path, desk), command("ls")))
    while "Asked" not in desk.log:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert desk.log == ["waiting", "Asked", "Resolved"]
    assert desk.events[-1].outcome == "cancelled"


async def test_a_question_that_the_stop_answered_allows_nothing(tmp_path: Path) -> None:
    desk = Desk("cancelled")
    assert not (await decide(permissions(tmp_path, desk), command("ls"))).allowed
    assert desk.log == ["waiting", "Asked", "Resolved"]  # never back to running


async def test_no_answer_in_time_is_no_consent(tmp_path: Path) -> None:
    desk = Desk("wait")
    decision = await decide(permissions(tmp_path, desk, answer_within=0.01), command("ls"))
    assert not decision.allowed
    assert "no consent" in decision.text
    assert [event.outcome for event in desk.events if isinstance(event, Resolved)] == ["deny"]


async def test_headless_denies_and_names_the_option(tmp_path: Path) -> None:
    desk = Desk()
    decision = await decide(permissions(tmp_path, desk, interactive=False), command("ls"))
    assert not decision.allowed
    assert decision.unattended
    assert "--approve" in decision.text
    assert desk.log == []


async def test_one_approval_is_for_one_call(tmp_path: Path) -> None:
    judge = permissions(tmp_path, Desk("allow", "deny"))
    assert (await decide(judge, command("ls"))).allowed
    assert not (await decide(judge, command("ls"))).allowed


async def test_this_exact_command_this_session(tmp_path: Path) -> None:
    rules = SessionRules()
    assert (
        await decide(permissions(tmp_path, Desk("allow_session"), rules=rules), command("git status"))
    ).allowed
    silent = Desk()
    assert (await decide(permissions(tmp_path, silent, rules=rules), command("git status"))).allowed
    assert silent.log == []
    assert not (
        await decide(permissions(tmp_path, Desk("deny"), rules=rules), command("git status -s"))
    ).allowed
    other = tmp_path / "other"
    other.mkdir()
    assert not (await decide(permissions(other, Desk("deny"), rules=rules), command("git status"))).allowed


@pytest.mark.parametrize(
    "text",
    [
        "git status;id",
        "git status && id",
        "git status\nrm -rf x",
        "git\u00a0status",
        '"git" status',
        "GIT_PAGER=id git status",
    ],
)
async def test_a_rule_covers_no_other_text(tmp_path: Path, text: str) -> None:
    rules = SessionRules()
    await decide(permissions(tmp_path, Desk("allow_session"), rules=rules), command("git status"))
    assert not (await decide(permissions(tmp_path, Desk("deny"), rules=rules), command(text))).allowed


async def test_a_rule_ends_when_the_program_changes(tmp_path: Path) -> None:
    script = tmp_path / "build.sh"
    script.write_text("true")
    rules = SessionRules()
    await decide(permissions(tmp_path, Desk("allow_session"), rules=rules), command("./build.sh"))
    script.write_text("rm -rf ~")
    assert not (await decide(permissions(tmp_path, Desk("deny"), rules=rules), command("./build.sh"))).allowed


async def test_an_edit_makes_no_rule(tmp_path: Path) -> None:
    judge = permissions(tmp_path, Desk("allow_session", "deny"))
    preview = Preview("Change a file?", "a.py", targets={"a.py": "hash"})
    assert (await decide(judge, preview)).allowed
    assert not (await decide(judge, preview)).allowed


# --- the binding (T43) ----------------------------------------------------------------------------------------------


def _change_bytes(folder: Path) -> None:
    (folder / "build.sh").write_text("echo evil")


def _swap_below(folder: Path) -> None:
    (folder / "sub" / "run").write_text("evil")


def _swap_folder(folder: Path) -> None:
    (folder / "sub").rename(folder / "old")
    (folder / "sub").mkdir()


def _swap_program(folder: Path) -> None:
    (folder / "bin" / "tool").write_text("evil")


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("./build.sh", _change_bytes),
        ("sh build.sh --all", _change_bytes),
        ("A=1 sh build.sh", _change_bytes),
        ("cd sub && ./run", _swap_below),
        ("cd sub && make", _swap_folder),
        ("tool x", _swap_program),
    ],
)
def test_what_a_command_names_is_bound(tmp_path: Path, text: str, change: Callable[[Path], None]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("build.sh", "sub/run", "bin/tool"):
        (tmp_path / name).write_text("echo good")
        (tmp_path / name).chmod(0o755)
    desk = Desk()
    judge = Permissions(
        "T", mode="ask", interactive=True, workspace=tmp_path, ask=desk.ask, emit=desk.emit,
        set_state=desk.set_state, environ={"PATH": f"{tmp_path}/bin:/usr/bin"},
    )  # fmt: skip
    before = judge.binding("shell", text, command(text))
    assert judge.binding("shell", text, command(text)) == before
    change(tmp_path)
    assert judge.binding("shell", text, command(text)) != before


def test_tool_arguments_and_file_are_bound(tmp_path: Path) -> None:
    judge = permissions(tmp_path, Desk())
    preview = Preview("Change a file?", "a", targets={"a": "1"})
    seen = {
        judge.binding("edit_file", "{}", preview),
        judge.binding("write_file", "{}", preview),
        judge.binding("edit_file", '{"a":1}', preview),
        judge.binding("edit_file", "{}", Preview("Change a file?", "a", targets={"a": "2"})),
    }
    assert len(seen) == 4


def test_odd_commands_bind_without_a_crash(tmp_path: Path) -> None:
    for text in ("", "   ", "'", "\0", "a" * 10_000, "$(", "\ud800", "x " * 5000):
        command_files(text, tmp_path, ENV)


# --- what always asks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [".git/hooks/pre-commit", ".GIT/config", "sub/.git/config", ".git", ".peri/config.toml", ".bashrc", "home/.zshrc",
     ".ssh/authorized_keys", ".vscode/tasks.json", ".envrc", "private/state/x"],
)  # fmt: skip
def test_dangerous_paths_ask_in_every_mode(tmp_path: Path, path: str) -> None:
    judge = permissions(tmp_path, Desk(), mode="all", private=[tmp_path / "private"])
    assert judge.asks(Preview("Make a file?", path, targets={path: ""}))


@pytest.mark.parametrize(
    "path", ["src/git/config.py", ".github/workflows/x.yml", ".gitignore", "bashrc.md", "a.py"]
)
def test_ordinary_paths_do_not(tmp_path: Path, path: str) -> None:
    assert dangerous_path(path, tmp_path) == ""
    assert (
        permissions(tmp_path, Desk(), mode="all").asks(Preview("Make a file?", path, targets={path: ""}))
        is None
    )


def test_a_link_into_a_private_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "peri").mkdir()
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "alias").symlink_to(tmp_path / "peri")
    assert dangerous_path("alias/state.db", tmp_path / "ws", [tmp_path / "peri"])


def test_commands_that_name_such_paths_ask_too(tmp_path: Path) -> None:
    for text in (
        "echo x > .git/hooks/pre-commit",
        "cat ~/.bashrc",
        "git -c core.hooksPath=x status",
        f"ls {tmp_path}/p",
    ):
        assert dangerous_command(text, [tmp_path / "p"]), text
    for text in ("git status", "cat config/.gitignore", "ls src/profile", "pytest -q"):
        assert dangerous_command(text, [tmp_path / "p"]) == "", text


async def test_danger_headless_is_denied_with_its_reason_also_with_all(tmp_path: Path) -> None:
    judge = permissions(tmp_path, Desk(), mode="all", interactive=False)
    decision = await decide(judge, Preview("Make a file?", ".git/config", targets={".git/config": ""}))
    assert not decision.allowed
    assert "git's own folder" in decision.text


async def test_no_rule_covers_danger(tmp_path: Path) -> None:
    rules = SessionRules()
    judge = permissions(tmp_path, Desk("allow_session", "deny"), rules=rules, mode="all")
    preview = command("cat ~/.bashrc")
    assert (await decide(judge, preview)).allowed
    assert not (await decide(judge, preview)).allowed


def test_the_programs_path_is_the_childs_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ls").write_text("evil")
    (tmp_path / "ls").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_files("ls", tmp_path, ENV)[0][0] != str(tmp_path / "ls")
    assert os.environ["PATH"] == str(tmp_path)
