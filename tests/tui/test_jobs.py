"""Ctrl+T lists background jobs and acts on them; leaving with services running lists them and asks. F057, F078."""

from __future__ import annotations

import pytest

from peri_tui.core import messages as m
from peri_tui.errors import ProcessError
from peri_tui.tui.screens.jobs import QuitScreen
from peri_tui.tui.screens.tasks import TasksScreen
from tests.tui.stage import Stage, stage

pytestmark = pytest.mark.tui

TASK = "01J00000000000000000000000"


def job(name: str = "j1", **facts: object) -> m.JobInfo:
    base = {"job": name, "task": TASK, "state": "running", "pid": 4711, "command": "npm run dev"}
    return m.JobInfo(**base | facts)


async def open_list(scene: Stage) -> None:
    await scene.pilot.press("ctrl+t")
    await scene.until(lambda: isinstance(scene.app.screen, TasksScreen))
    await scene.until(lambda: "Background jobs" in scene.screen())


async def choose(scene: Stage, name: str) -> None:
    rows = scene.app.screen.query_one("#task-options")
    rows.highlighted = rows.get_option_index(f"job-{name}")  # type: ignore[attr-defined]
    await scene.pilot.pause()


async def test_the_list_shows_jobs_with_what_they_take_and_keys_act_on_them() -> None:
    async with stage() as scene:
        await scene.run("start the server")
        scene.session.job_list = [job(cpu=3.5, rss=200 << 20), job("j2", command="tail \x1b[2J[b]")]
        await open_list(scene)
        assert "cpu 3.5 s  200 MiB" in scene.screen()
        assert "npm run dev" in scene.screen()
        assert "\x1b" not in scene.screen()
        assert "[b]" in scene.screen()
        assert "s stop the job" in scene.screen()
        await choose(scene, "j1")
        await scene.pilot.press("p")
        await scene.until(lambda: "service" in scene.screen().replace("as a service", ""))
        await choose(scene, "j2")
        await scene.pilot.press("s")
        await scene.until(lambda: "ended" in scene.screen())
        assert scene.session.job_acts == [(TASK, "j1", "promote"), (TASK, "j2", "stop")]
        await scene.pilot.press("s", "p", "enter")
        assert len(scene.session.job_acts) == 2
        assert isinstance(scene.app.screen, TasksScreen)
        assert scene.session.cancels == []


async def test_a_refusal_is_told() -> None:
    async with stage() as scene:
        scene.session.job_list = [job()]
        await open_list(scene)
        scene.session.refuse = ProcessError("job j1 is over [/]")
        await choose(scene, "j1")
        await scene.pilot.press("p")
        await scene.until(lambda: "j1: job j1 is over [/]" in scene.screen())


async def test_the_list_follows_while_it_is_open_and_keeps_the_cursor() -> None:
    async with stage() as scene:
        await scene.run("one")
        scene.session.job_list = [job()]
        await open_list(scene)
        await choose(scene, "j1")
        scene.session.job_list = [job(rss=7 << 20), job("j2", command="second")]
        scene.app.screen._refresh_jobs()  # type: ignore[attr-defined]
        await scene.until(lambda: "second" in scene.screen() and "7 MiB" in scene.screen())
        rows = scene.app.screen.query_one("#task-options")
        assert rows.highlighted_option.id == "job-j1"  # type: ignore[attr-defined]


async def test_a_letter_on_a_task_acts_on_no_job() -> None:
    async with stage() as scene:
        await scene.run("one")
        scene.session.job_list = [job()]
        await open_list(scene)
        await scene.pilot.press("s", "p")
        assert scene.session.job_acts == []


async def test_events_of_jobs_are_kept_with_their_task() -> None:
    async with stage() as scene:
        await scene.run("one")
        for state in ("running", "ended"):
            scene.say(m.JobChanged, job="j1", state=state, pid=4711, command="npm run dev")
        await scene.until(lambda: [one.state for one in scene.view.tasks[scene.task].jobs] == ["ended"])


# --- leaving --------------------------------------------------------------------------------------------------------


async def leaving(scene: Stage) -> QuitScreen:
    await scene.pilot.press("ctrl+q")
    await scene.until(lambda: isinstance(scene.app.screen, QuitScreen))
    await scene.until(lambda: scene.app.screen.is_shown)  # type: ignore[attr-defined]
    assert isinstance(scene.app.screen, QuitScreen)
    return scene.app.screen


async def test_quitting_with_a_service_lists_it_and_the_safe_answer_stays() -> None:
    async with stage() as scene:
        scene.session.job_list = [job(service=True), job("j2"), job("j3", service=True, state="ended")]
        for key in ("n", "enter", "escape"):
            await leaving(scene)
            assert "A service runs and would end with Peri:" in scene.screen()
            assert "j1  pid 4711  npm run dev" in scene.screen()
            assert "j2" not in scene.screen()
            scene.clock.pass_ms(500)
            await scene.pilot.press(key)
            await scene.until(lambda: not isinstance(scene.app.screen, QuitScreen))
            assert not scene.session.closed
        assert scene.session.job_acts == []


@pytest.mark.parametrize("key", ["y", "ctrl+q"])
async def test_yes_or_a_second_ctrl_q_ends_the_services_and_leaves(key: str) -> None:
    async with stage() as scene:
        scene.session.job_list = [job(service=True), job("j2", service=True)]
        await leaving(scene)
        assert "2 services run and would end with Peri:" in scene.screen()
        scene.clock.pass_ms(500)
        await scene.pilot.press(key)
        await scene.until(lambda: scene.session.closed)
        assert scene.session.job_acts == [(TASK, "j1", "stop"), (TASK, "j2", "stop")]


async def test_a_signal_asks_nobody_and_ends_the_services() -> None:
    async with stage() as scene:
        scene.session.job_list = [job(service=True)]
        scene.app.quit_unasked()
        await scene.until(lambda: scene.session.closed)
        assert scene.session.job_acts == [(TASK, "j1", "stop")]


async def test_after_the_stop_of_a_task_the_service_is_asked_about() -> None:
    async with stage() as scene:
        await scene.run("one")
        scene.session.job_list = [job(service=True)]
        await scene.pilot.press("ctrl+q")
        await scene.until(lambda: scene.session.cancels)
        scene.end(services=["j1: pid 4711 npm run dev"], killed=["4800 sleep 1 SIGINT"])
        await scene.until(lambda: isinstance(scene.app.screen, QuitScreen))
        await scene.pilot.press("escape")
        await scene.until(lambda: "service j1: pid 4711 npm run dev" in scene.screen())
        assert not scene.session.closed
