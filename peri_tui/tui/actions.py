"""The one registry of what a user can do: it feeds key bindings, the palette, slash commands, footer and help.

An entry that is here works. The stop keys can be added to, not taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from textual.binding import Binding

from peri_tui.tui.view_model import ViewState

When = Callable[[ViewState], bool]


def always(_state: ViewState) -> bool:
    """True in every state."""
    return True


def while_running(state: ViewState) -> bool:
    """True while a task can be stopped."""
    return state.running is not None


def with_task(state: ViewState) -> bool:
    """True once there is a task to show."""
    return state.task is not None


def while_waiting(state: ViewState) -> bool:
    """True while prompts wait in the queue."""
    return bool(state.queued)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a user can do.

    ``handler`` is the name of the app's ``action_…`` method; ``keys`` its default keys; ``priority``: before the
    focused widget sees the key; ``slash`` the command in the prompt; ``footer`` the word in the hint line.
    """

    id: str
    title: str
    handler: str
    keys: tuple[str, ...] = ()
    shown_key: str = ""
    slash: str = ""
    footer: str = ""
    palette: bool = True
    priority: bool = False
    when: When = always


ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        "stop",
        "Stop the task (again, deliberately: force)",
        "stop_key('escape')",
        ("escape",),
        "Esc",
        "/stop",
        palette=False,
        priority=True,
    ),
    Action(
        "interrupt",
        "Stop the task; idle: clear the prompt; idle and empty: twice quits",
        "interrupt",
        ("ctrl+c",),
        "Ctrl+C",
        palette=False,
        priority=True,
    ),
    Action("stop_now", "Stop the task", "stop_task", when=while_running),
    Action("force", "Force the stop: skip every grace period", "force", when=while_running),
    Action(
        "send_queued", "Send the waiting prompts on", "send_queued", ("ctrl+s",), "Ctrl+S", when=while_waiting
    ),
    Action("take_back", "Take the last waiting prompt back into the input", "take_back", when=while_waiting),
    Action(
        "keep_agent",
        "Keep the silent agent (declines its end)",
        "keep_agent",
        ("ctrl+n",),
        "Ctrl+N",
        when=lambda state: state.link == "killing",
    ),
    Action(
        "palette", "Command palette", "command_palette", ("ctrl+p",), "^P", footer="palette", palette=False
    ),
    Action("tasks", "Tasks", "tasks", ("ctrl+t",), "^T", "/tasks", footer="tasks"),
    Action("diff", "Changed files of this task", "diff", ("f2",), "F2", "/diff", when=with_task),
    Action("trace", "Trace of the last stop", "trace", (), "", "/trace", when=with_task),
    Action("tool_output", "Show or fold the output of tools", "tool_output", ("ctrl+o",), "^O"),
    Action("history", "Earlier prompts that contain what is typed", "history", ("ctrl+r",), "^R"),
    Action("card", "Go to the stop card", "focus_card", ("ctrl+up",), "Ctrl+Up"),
    Action("redraw", "Draw the screen again", "redraw", ("ctrl+l",), "^L"),
    Action("theme", "Choose a theme", "change_theme", (), "", "/theme"),
    Action("help", "Help", "help", ("f1",), "F1", "/help", footer="help"),
    Action(
        "quit",
        "Quit (a running task is stopped first)",
        "quit_peri",
        ("ctrl+q",),
        "^Q",
        "/exit",
        priority=True,
    ),
)


def bindings() -> list[Binding]:
    """Return the app's key bindings. The id lets a user rebind; the two stop keys have none to take away."""
    return [
        Binding(",".join(action.keys), action.handler, action.title, show=False, priority=action.priority,
                id=None if action.id in ("stop", "interrupt") else action.id)
        for action in ACTIONS
        if action.keys
    ]  # fmt: skip


def by_slash(word: str) -> Action | None:
    """Return the action of a slash command."""
    return next((action for action in ACTIONS if action.slash == word), None)


def slash_words() -> list[str]:
    """Return every slash command."""
    return [action.slash for action in ACTIONS if action.slash]


def for_palette(state: ViewState) -> Iterable[Action]:
    """Return what the palette offers now."""
    return (action for action in ACTIONS if action.palette and action.when(state))


PROMPT_KEYS: Final[tuple[tuple[str, str], ...]] = (
    ("Enter", "send; while a task runs: queue"),
    ("Shift+Enter  Ctrl+J", "line break"),
    ("Up  Down", "earlier and later prompts"),
    ("PgUp  PgDn", "scroll the conversation"),
    ("?", "this help, in an empty prompt"),
)
