"""The states that are photographed: each brings a stage into one state, with a clock that stands still."""

from __future__ import annotations

from peri_tui.client.stop_lane import PressReport
from peri_tui.core import messages as m
from peri_tui.core.stop_plan import Press
from tests.tui.stage import Stage, evidence

DIFF = """--- a/src/cart.py
+++ b/src/cart.py
@@ -12,3 +12,3 @@ def total(items):
-    def price(item, qty):
-        return round(item.net * qty, 2)
+    from pricing import price
     return sum(price(item, 1) for item in items)
"""
INTRO = """I'll read the module first, then extract the rules into `pricing.py`.

"""
ANSWER = """The rounding differs: `cart.py` rounds **each item**, the new module rounds the sum.

- keep the old rule for single items
- add a test for three items of 0.335

```python
def price(item: Item, qty: int) -> Decimal:
    return (item.net * qty).quantize(CENT)
```

"""

JOBS = [
    m.JobInfo(
        job="j1",
        task="t",
        state="running",
        pid=4711,
        command="npm run dev",
        cpu=12.4,
        rss=312 << 20,
        processes=4,
        service=True,
    ),
    m.JobInfo(job="j2", task="t", state="ended", pid=4801, command="make docs", how="exit 2"),
    m.JobInfo(
        job="j3",
        task="t",
        state="running",
        pid=4905,
        command="pytest --watch [$HOME] \x1b[2J",
        cpu=0.3,
        rss=61 << 20,
        processes=1,
    ),
]


async def idle(scene: Stage) -> None:
    await scene.settled()


async def running(scene: Stage) -> None:
    await scene.run()
    scene.clock.pass_ms(42_000)
    scene.text(INTRO)
    scene.say(m.ToolStarted, call="1", name="read_file", summary="src/cart.py")
    scene.say(m.ToolEnded, call="1", name="read_file", status="ok", summary="214 lines")
    scene.say(m.ToolStarted, call="2", name="edit_file", summary="src/cart.py")
    scene.say(m.ToolEnded, call="2", name="edit_file", status="ok", summary="−48 +6", diff=DIFF)
    scene.say(m.FileChanged, path="src/cart.py", kind="modified", added=6, removed=48)
    scene.say(m.ToolStarted, call="3", name="write_file", summary="src/pricing.py")
    scene.say(m.ToolEnded, call="3", name="write_file", status="ok", summary="+61")
    scene.say(m.FileChanged, path="src/pricing.py", kind="added", added=61)
    scene.text(ANSWER, part="p2")
    scene.text("The failing case is the rounding of ", part="p2")
    scene.say(m.UsageCounted, tokens_in=11_800, tokens_out=604)
    scene.say(m.Progressed, step=4, doing="model")
    await scene.settled()


async def tool(scene: Stage) -> None:
    await running(scene)
    scene.say(m.ToolStarted, call="4", name="shell", summary="pytest -q tests/test_cart.py")
    scene.say(m.Delta, ch="tool_out", part="4", text="tests/test_cart.py\n........................F")
    scene.say(m.Progressed, step=4, doing="shell", cpu=61, rss=310_000_000, processes=2)
    await scene.settled()
    scene.clock.pass_ms(300)
    scene.app.view = scene.app.view
    await scene.settled()


def press(scene: Stage) -> None:
    """Let the lane report a press 1 ms ago, and the agent's answer after 2 ms."""
    now = scene.clock()
    scene.app.desk.on_press(
        PressReport(Press.STOP, scene.task, "escape", now - 1_000_000, "request", sent=True)
    )
    answer = m.CancelAccepted(
        re="request", task=scene.task, state="cancelling", cancel_id="c", first=True, reason="user",
        mode="graceful", cut_seq=0, deadline_ms=8000,
    )  # fmt: skip
    scene.app.desk.acknowledged(answer, mono=now + 1_000_000)


async def stopping(scene: Stage) -> None:
    await tool(scene)
    press(scene)
    await scene.until(
        lambda: scene.view.task.lamps[1].state == "ok" and scene.view.task.lamps[0].state == "ok"
    )
    scene.say(m.TaskStateChanged, state="cancelling", prev="running")
    scene.lamp(3, "cas", 3, said="running → cancelling")
    scene.lamp(4, "model_quiet", 4, said="connection closed")
    scene.lamp(5, "rollback_begun", 30)
    scene.lamp(5, "file", 90, done=2, total=3)
    scene.clock.pass_ms(200)
    await scene.settled()


async def stopped(scene: Stage) -> None:
    await stopping(scene)
    scene.end(
        stop_seconds=0.31, files=m.Files(restored=["src/cart.py", "src/pricing.py", "tests/test_cart.py"])
    )
    await scene.settled()


async def not_verified(scene: Stage) -> None:
    await stopping(scene)
    scene.end(
        "cancel_failed", verified=False, stop_seconds=5.0,
        evidence=evidence(rollback="1 process is alive: pid 4711 (root) sudo apt-get"),
        files=m.Files(restored=["src/cart.py"]), residue=["process 4711 root: sudo apt-get install, not permitted"],
    )  # fmt: skip
    await scene.settled()


async def not_restored(scene: Stage) -> None:
    await stopping(scene)
    scene.say(m.FileChanged, path="build/report.html", kind="added", by="shell")
    scene.end(
        stop_seconds=0.42,
        files=m.Files(
            restored=["src/cart.py", "src/pricing.py"], not_restored=["build/report.html", ".coverage"]
        ),
    )
    await scene.settled()


async def permission(scene: Stage) -> None:
    await running(scene)
    scene.say(m.TaskStateChanged, state="waiting", prev="running")
    scene.say(
        m.Asked, qid="q1", kind="tool", tool="edit_file", title="Change a file?", detail="src/cart.py", diff=DIFF,
        where="~/shop", note="Peri keeps a copy: a stop puts the file back.",
    )  # fmt: skip
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


async def permission_shell(scene: Stage) -> None:
    await running(scene)
    scene.say(m.TaskStateChanged, state="waiting", prev="running")
    scene.say(
        m.Asked, qid="q1", kind="tool", tool="shell", title="Run a command?",
        detail="npm test -- --coverage \u202e# \x1b[8mrm -rf ~", where="~/shop",
    )  # fmt: skip
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


async def tasks(scene: Stage) -> None:
    await running(scene)
    scene.app.prompt.replace_text("and write the docs")
    await scene.pilot.press("enter")
    await scene.pilot.press("ctrl+t")
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


async def jobs(scene: Stage) -> None:
    scene.session.job_list = JOBS
    await tasks(scene)
    await scene.until(lambda: "npm run dev" in scene.screen())
    await scene.pilot.press("down")


async def quitting(scene: Stage) -> None:
    scene.session.job_list = JOBS
    await scene.pilot.press("ctrl+q")
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


async def help_(scene: Stage) -> None:
    await scene.pilot.press("f1")
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


async def diff(scene: Stage) -> None:
    await running(scene)
    await scene.pilot.press("f2")
    await scene.until(lambda: len(scene.app.screen_stack) == 2)
    await scene.settled()


SCENES = {
    "idle": idle, "running": running, "tool": tool, "stopping": stopping, "stopped": stopped,
    "not-verified": not_verified, "not-restored": not_restored, "permission": permission,
    "permission-shell": permission_shell, "tasks": tasks, "jobs": jobs, "quitting": quitting, "help": help_, "diff": diff,
}  # fmt: skip
