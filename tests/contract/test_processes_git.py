"""git and its lock: time to end by itself, and what is done about the lock when it had to be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peri_tui.agent.processes.git_lock import drop_stale_lock
from peri_tui.agent.processes.spawn import Ladder, Processes, child_env
from tests.contract.process_kit import make_marker, registry, until

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]


@pytest.fixture
def marker() -> str:
    return make_marker()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose next commit hangs in a hook, with the lock held."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("a")
    git(tmp_path, "add", "a.txt")
    hook = tmp_path / ".git" / "hooks" / "pre-commit"
    hook.write_text(f"#!/bin/sh\necho {tmp_path.name} > hanging\nexec sleep 1000\n")
    hook.chmod(0o755)
    return tmp_path


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)


async def commit(processes: Processes, repository: Path, task: str = "T", word: str = "git") -> Path:
    """Start a commit of all (which takes the lock) and wait until its hook hangs; return the lock."""
    line = f"{word} -c user.name=t -c user.email=t@example.org commit -am x"
    (repository / "a.txt").write_text(str(time.time()))
    await processes.spawn(
        task,
        ["sh", "-c", line],
        cwd=str(repository),
        env=child_env(os.environ, task) | {"HOME": "/nonexistent"},
    )
    await until((repository / "hanging").exists)
    lock = repository / ".git" / "index.lock"
    await until(lock.exists)
    return lock


async def test_an_interrupted_git_takes_its_lock_away_by_itself(repository: Path, marker: str) -> None:
    async with registry(marker) as processes:
        lock = await commit(processes, repository)
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert not lock.exists()
        assert evidence.notes == ()
    assert git(repository, "status", "--short").returncode == 0


async def test_a_killed_git_leaves_no_lock_either(repository: Path, marker: str) -> None:
    async with registry(marker) as processes:
        lock = await commit(processes, repository)
        processes.force("T")
        evidence = await processes.stop("T")
        assert evidence.outcome == "empty"
        assert evidence.notes == (f"{lock}: removed, the killed git had left it",)
        assert not lock.exists()
    git(repository, "status", "--short")


async def test_git_inside_of_another_program_counts_too(repository: Path, marker: str) -> None:
    async with registry(marker) as processes:
        lock = await commit(processes, repository, word="env X=1 git")
        processes.force("T")
        assert len((await processes.stop("T")).notes) == 1
        assert not lock.exists()


async def test_git_gets_its_own_time(repository: Path, marker: str) -> None:
    patient = Ladder(0.9, 0.0, 5.0)
    async with registry(marker, git_ladder=patient) as processes:
        await commit(processes, repository)
        (command,) = processes._live("T")
        assert command.ladder is patient
        other = await processes.spawn("T", ["sleep", "1000"], cwd="/", env={"PATH": os.environ["PATH"]})
        assert other.ladder is not patient


async def test_a_lock_from_before_the_command_stays(repository: Path, marker: str) -> None:
    lock = repository / ".git" / "index.lock"
    async with registry(marker) as processes:
        command = await processes.spawn(
            "T", ["sh", "-c", "git --version >/dev/null; sleep 1000"], cwd=str(repository),
            env=child_env(os.environ, "T"),
        )  # fmt: skip
        lock.write_text("somebody's")
        os.utime(lock, (time.time() - 60,) * 2)
        command._git = True
        processes.force("T")
        evidence = await processes.stop("T")
        assert evidence.notes == (f"{lock}: a lock that is not this command's, left alone",)
        assert lock.exists()


@pytest.fixture
def living_git(repository: Path) -> Iterator[None]:
    tool = repository.parent / "git-sleeper"
    tool.symlink_to("/bin/sleep")
    with subprocess.Popen([tool, "1000"], cwd=repository) as process:
        yield
        process.kill()
    tool.unlink()


def test_a_lock_beside_a_living_git_stays(repository: Path, living_git: None) -> None:
    lock = repository / ".git" / "index.lock"
    lock.write_text("")
    now = time.time()
    assert (
        drop_stale_lock(str(repository), now - 5, now + 5) == f"{lock}: left alone, another git works there"
    )
    assert lock.exists()


def test_no_repository_or_no_lock_is_nothing(tmp_path: Path, repository: Path) -> None:
    assert drop_stale_lock("/nonexistent/folder", 0, 1) == ""
    assert drop_stale_lock(str(repository / "sub"), 0, 1) == ""


def test_a_link_in_place_of_the_lock_stays(repository: Path) -> None:
    lock = repository / ".git" / "index.lock"
    lock.symlink_to(repository / "a.txt")
    now = time.time()
    assert "left alone" in drop_stale_lock(str(repository), now - 5, now + 5)
    assert lock.is_symlink()


def test_a_linked_working_tree_has_its_lock_elsewhere(repository: Path) -> None:
    (repository / ".git" / "hooks" / "pre-commit").unlink()
    git(repository, "commit", "-qm", "first")
    git(repository, "worktree", "add", "-q", "tree")
    lock = repository / ".git" / "worktrees" / "tree" / "index.lock"
    lock.write_text("")
    now = time.time()
    assert "removed" in drop_stale_lock(str(repository / "tree"), now - 5, now + 5)
    assert not lock.exists()
