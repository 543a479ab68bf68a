"""Layer 1: the press, the button, the lamps, the card; *Stopped* only with proof."""

from __future__ import annotations

import pytest

from peri_tui.client.stop_lane import PressReport
from peri_tui.core import faults
from peri_tui.core import messages as m
from peri_tui.core.stop_plan import Press
from peri_tui.errors import AgentUnreachable
from peri_tui.tui.widgets.stop_button import StopButton
from peri_tui.tui.widgets.stop_card import StopCard
from tests.doubles.fake_session import FakeLane, FakeSession
from tests.tui.stage import Stage, evidence, stage

pytestmark = pytest.mark.tui

FILES = m.Files(restored=["a.py"])


def button(scene: Stage) -> StopButton:
    return scene.app.screen.query_one(StopButton)


async def stop(scene: Stage) -> None:
    await scene.run()
    await scene.pilot.press("escape")
    await scene.until(lambda: scene.view.task.lamps[1].state == "ok")


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_stop_key_is_shown_at_once_and_sent_once(key: str) -> None:
    async with stage() as scene:
        await scene.run()
        await scene.pilot.press(key)
        await scene.until(lambda: scene.session.cancels)
        assert scene.view.task.is_stopping
        assert "◐ Stopping" in scene.screen()
        assert [(task, mode) for task, mode, _ in scene.session.cancels] == [(scene.task, "graceful")]


async def test_the_button_is_dead_while_nothing_runs() -> None:
    async with stage() as scene:
        assert button(scene).disabled
        await scene.pilot.click(StopButton)
        assert scene.session.cancels == []
        await scene.run()
        assert not button(scene).disabled
        scene.end("completed", answer="done")
        await scene.until(lambda: button(scene).disabled)


async def test_a_click_on_the_button_stops() -> None:
    async with stage() as scene:
        await scene.run()
        await scene.pilot.click(StopButton)
        await scene.until(lambda: scene.session.cancels)
        assert "Force" in str(button(scene).label)
        scene.clock.pass_ms(100)
        await scene.pilot.click(StopButton)
        await scene.pilot.pause()
        assert len(scene.session.cancels) == 1
        scene.clock.pass_ms(600)
        await scene.pilot.click(StopButton)
        await scene.until(lambda: len(scene.session.cancels) == 2)
        assert scene.session.cancels[1][1] == "force"


async def test_a_deliberate_second_press_forces_and_a_held_key_does_not() -> None:
    async with stage() as scene:
        await stop(scene)
        for _ in range(20):
            scene.clock.pass_ms(30)
            await scene.pilot.press("escape")
        assert len(scene.session.cancels) == 1
        scene.clock.pass_ms(600)
        await scene.pilot.press("escape")
        await scene.until(lambda: len(scene.session.cancels) == 2)
        assert scene.session.cancels[1][1] == "force"
        assert "Forcing" in scene.screen()


async def test_a_prompt_that_is_not_yet_confirmed_can_be_stopped() -> None:
    async with stage() as scene:
        await scene.prompt()
        assert "Sending" in scene.screen()
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)


async def test_press_and_paint_are_recorded_for_layer_one() -> None:
    async with stage() as scene:
        await stop(scene)
        await scene.until(lambda: len(scene.traced) == 2)
        (task, layer, ev, facts), painted = scene.traced
        assert (task, layer, ev, facts["mono"]) == (scene.task, 1, "pressed", scene.clock())
        assert painted[:3] == (scene.task, 1, "painted")
        assert "ok" not in painted[3]


async def test_stopped_only_after_task_end_with_proof() -> None:
    async with stage() as scene:
        await stop(scene)
        for layer, ev in ((3, "cas"), (4, "model_quiet"), (5, "rollback_done"), (5, "resources_clean")):
            scene.lamp(layer, ev, 5)
        await scene.settled()
        assert [lamp.state for lamp in scene.view.task.lamps] == ["ok"] * 5
        assert "Stopped" not in scene.screen()
        scene.end(stop_seconds=0.31, files=FILES)
        await scene.settled()
        assert "Stopped in 0.31 s · verified" in scene.screen()
        assert "1 file restored. The workspace is as it was." in scene.screen()
        assert scene.session.ends == [scene.task]


@pytest.mark.parametrize("layer", ["scheduler", "model", "rollback"])
async def test_a_layer_without_evidence_is_named_and_nothing_is_called_stopped(layer: str) -> None:
    async with stage() as scene:
        await stop(scene)
        scene.end(
            "cancel_failed",
            verified=False,
            evidence=evidence(**{layer: "no proof came"}),
            residue=["pid 4711"],
        )
        await scene.settled()
        assert f"Not verified · {layer.capitalize()}: no proof came" in scene.screen()
        assert "left  pid 4711" in scene.screen()
        assert "Stopped" not in scene.screen()
        assert "as it was" not in scene.screen()


async def test_verified_by_word_alone_is_not_verified() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.text("x")
        scene.end(verified=True, evidence=evidence()[:2])
        await scene.settled()
        assert "Not verified · Rollback: no evidence came" in scene.screen()


async def test_a_failed_layer_in_spite_of_verified_is_not_verified() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.end(verified=True, evidence=evidence(model="a connection is open"))
        await scene.settled()
        assert "Not verified · Model: a connection is open" in scene.screen()


async def test_files_changed_by_commands_forbid_the_words_as_it_was() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.end(files=m.Files(restored=["a.py"], not_restored=["build/out.js"]))
        await scene.settled()
        assert "1 file not restored, changed by commands: build/out.js" in scene.screen()
        assert "as it was" not in scene.screen()


async def test_a_file_seen_changed_by_a_command_forbids_them_too() -> None:
    async with stage() as scene:
        await scene.run()
        scene.say(m.FileChanged, path="x", kind="added", by="shell")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end(files=FILES)
        await scene.settled()
        assert "Stopped" in scene.screen()
        assert "as it was" not in scene.screen()


async def test_a_loop_that_was_blocked_is_a_failure_of_layer_one() -> None:
    blocked = []
    async with stage(block=blocked.append) as scene:
        scene.app.desk._block = lambda seconds: (blocked.append(seconds), scene.clock.pass_ms(seconds * 1000))
        await scene.run()
        faults.install(["ui.block_loop"])
        try:
            pressed = scene.clock()
            scene.app.desk.on_press(PressReport(Press.STOP, scene.task, "escape", pressed, "r", sent=True))
        finally:
            faults.install([])
        assert blocked == [3.0]
        await scene.until(lambda: scene.view.task.lamps[0].state == "failed")
        assert scene.traced[-1][2:] == (
            "painted",
            {"mono": scene.clock(), "ok": False, "said": "the screen was blocked"},
        )
        scene.end(files=FILES)
        await scene.settled()
        assert "Not verified · UI: the screen was blocked: shown after 3.0 s" in scene.screen()
        assert "Stopped" not in scene.screen()


async def test_an_end_before_the_press_was_painted_waits_for_the_frame() -> None:
    async with stage() as scene:
        await scene.run()
        scene.app.desk.stop()
        scene.end(files=FILES)
        assert not scene.view.task.settled
        await scene.settled()
        await scene.until(lambda: "Stopped" in scene.screen())
        assert scene.view.task.verified


async def test_an_agent_that_nobody_reaches_is_a_failure_of_layer_two() -> None:
    async with stage() as scene:
        await scene.run()

        async def cancel(*_args: object, **_options: object) -> None:
            raise AgentUnreachable("no route answered within 60 s")

        scene.session.cancel = cancel
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.view.task.lamps[1].state == "failed")
        assert "waits for Client: no route answered" in scene.screen()
        assert "Stopped" not in scene.screen()


async def test_a_silent_agent_is_shown_as_silent() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.clock.pass_ms(11_000)
        scene.app.desk.tick()
        await scene.pilot.pause()
        assert [lamp.state for lamp in scene.view.task.lamps] == ["ok", "ok", "failed", "failed", "failed"]
        scene.lamp(3, "cas", 12_000)
        await scene.settled()
        assert scene.view.task.lamps[2].state == "ok"


async def test_text_after_the_cut_is_never_shown() -> None:
    session = FakeSession()
    async with stage(session=session) as scene:
        await scene.run()
        scene.text("before. ")
        session.cut_seq = scene.seqs[scene.task]
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.view.task.cut_seq)
        scene.text("AFTER")
        scene.end(files=FILES)
        await scene.settled()
        assert "before." in scene.lines()
        assert "AFTER" not in scene.lines()


async def test_a_stop_closes_the_question_and_answers_nothing() -> None:
    async with stage() as scene:
        await scene.run()
        scene.say(m.Asked, qid="q", kind="tool", tool="shell", title="Run?", detail="ls")
        await scene.until(lambda: len(scene.app.screen_stack) == 2)
        assert not button(scene).disabled
        await scene.pilot.press("escape")
        await scene.until(lambda: len(scene.app.screen_stack) == 1)
        assert scene.session.cancels
        assert scene.session.answers == []
        assert "Stopping" in scene.screen()
        await scene.until(lambda: scene.view.task.lamps[0].state == "ok")


async def test_the_button_of_a_dialog_stops_too() -> None:
    async with stage((80, 24)) as scene:
        await scene.run()
        await scene.pilot.press("f1")
        await scene.pilot.click(StopButton)
        await scene.until(lambda: scene.session.cancels)
        assert "Stopping" in scene.screen()


async def test_the_lane_sends_and_the_screen_only_shows() -> None:
    lane = FakeLane()
    async with stage(lane=lane) as scene:
        assert set(lane.aims) == {("none", "")}
        await scene.run()
        assert lane.aims[-1] == ("task", scene.task)
        scene.app.lane_pressed(PressReport(Press.STOP, scene.task, "escape", scene.clock(), "r", sent=True))
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.view.task.is_stopping)
        answer = await FakeSession().cancel(scene.task)
        scene.app.lane_acked("r", answer)
        await scene.until(lambda: scene.view.task.lamps[1].state == "ok")
        scene.end(files=FILES)
        await scene.settled()
        assert scene.session.cancels == []
        assert [record[2] for record in scene.traced] == ["painted"]
        assert lane.aims[-1] == ("none", "")
        assert lane.ended == [scene.task]


async def test_a_cancel_of_the_lane_that_is_not_answered_is_escalated_by_the_session() -> None:
    async with stage(lane=FakeLane()) as scene:
        await scene.run()
        pressed = scene.clock()
        scene.app.lane_pressed(PressReport(Press.STOP, scene.task, "escape", pressed, "r", sent=False))
        await scene.until(lambda: scene.view.task.is_stopping)
        for _ in range(100):
            if scene.session.cancels:
                break
            await scene.pilot.pause(0.02)
        assert scene.session.cancels == [(scene.task, "graceful", pressed)]


async def test_letters_act_only_on_the_focused_card() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.end("cancel_failed", verified=False, evidence=evidence(rollback="1 process left"))
        await scene.settled()
        await scene.pilot.press("f")
        assert scene.app.prompt.text == "f"
        assert len(scene.session.cancels) == 1
        await scene.pilot.press("ctrl+up")
        assert isinstance(scene.app.focused, StopCard)
        await scene.pilot.press("f")
        await scene.until(lambda: len(scene.session.cancels) == 2)
        assert scene.session.cancels[1][1] == "force"
        scene.say(m.TaskStateChanged, state="cancelling", prev="cancel_failed")
        await scene.settled()
        assert not scene.app.main.query_one(StopCard).display
        scene.end(files=FILES)
        await scene.settled()
        assert "Stopped" in scene.screen()


async def test_the_card_goes_with_enter_and_with_the_next_prompt() -> None:
    async with stage() as scene:
        await stop(scene)
        scene.text("some work")
        scene.end(files=FILES)
        await scene.settled()
        await scene.pilot.press("ctrl+up", "enter")
        assert not scene.app.main.query_one(StopCard).display
        assert scene.app.focused is scene.app.prompt


async def test_no_dead_or_doubled_handler_after_a_remount() -> None:
    async with stage() as scene:
        await scene.run()
        scene.text("hello")
        scene.app.prompt.replace_text("my draft")
        await scene.pilot.pause()
        for _ in range(3):
            await scene.app.main.recompose()
            await scene.settled()
        assert "hello" in scene.lines()
        assert scene.app.prompt.text == "my draft"
        assert len(scene.app.main.query(StopButton)) == 1
        await scene.pilot.click(StopButton)
        await scene.until(lambda: scene.session.cancels)
        await scene.pilot.pause()
        assert len(scene.session.cancels) == 1
        assert "Stopping" in scene.screen()


async def test_an_end_by_a_limit_keeps_its_reason() -> None:
    async with stage() as scene:
        await scene.run()
        scene.say(m.TaskStateChanged, state="cancelling", prev="running", cause="limit_turns")
        scene.end(stop_reason="limit_turns", stop_seconds=0.2, files=m.Files(kept=["a.py"]))
        await scene.settled()
        assert "Stopped in 0.20 s · verified · the limit of turns was reached" in scene.screen()
        assert "1 file kept as the task left them: a.py" in scene.screen()


async def test_no_notice_covers_the_button() -> None:
    async with stage((80, 24)) as scene:
        await scene.run()
        for n in range(6):
            scene.app.say(f"a notice {n} of many words that fill the corner of the screen")
        await scene.until(lambda: "a notice 5" in scene.screen())
        await scene.pilot.click(StopButton)
        await scene.until(lambda: scene.session.cancels)


async def test_the_card_moves_no_line_sideways() -> None:
    async with stage((80, 24)) as scene:
        await scene.run()
        scene.text("word " * 200 + "\n\n")
        await scene.settled()
        before = scene.lines().split("\n")
        await scene.pilot.press("escape")
        await scene.until(lambda: scene.session.cancels)
        scene.end(files=FILES)
        await scene.settled()
        assert scene.lines().split("\n")[: len(before)] == before
