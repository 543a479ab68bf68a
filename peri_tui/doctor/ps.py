"""``peri ps``: processes, connections and files that belong to Peri and its tasks; ends what dead agents left.

Works without a screen and without asking an agent. Tasks of living agents are stopped with ``peri stop``, never here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby

from peri_tui.agent.processes.sweep import Leftover, Sweep, SweepResult
from peri_tui.config import Paths
from peri_tui.core.messages import scrub
from peri_tui.core.sanitize import one_line
from peri_tui.core.states import EXIT_DONE, EXIT_NOT_CLEAN
from peri_tui.doctor.census import AgentSeen, Census, ProcessSeen, take_census
from peri_tui.doctor.descriptors import Connection
from peri_tui.errors import UsageError

Ask = Callable[[str], str]


def show_processes(
    paths: Paths,
    *,
    kill: bool = False,
    yes: bool = False,
    as_json: bool = False,
    interactive: bool = False,
    ask: Ask = input,
    sweep: Sweep | None = None,
) -> int:
    """Print what runs, and with ``kill`` end what dead agents left.

    Args:
        paths: the user's folders.
        kill: end leftovers of dead agents; ``yes`` without a question.
        as_json: one JSON object: agents, left, and what ``kill`` did.
        interactive: somebody is there who can answer.
        ask: puts the question.

    Returns:
        0 when no dead agent has left anything (any more), 74 when something is left.

    Raises:
        UsageError: ``kill`` with nobody there to ask and without ``yes``.
    """
    if kill and not yes and not interactive:
        raise UsageError(
            "peri ps --kill: nobody is here to ask; add --yes to end what is left without a question"
        )
    sweep = sweep or Sweep(paths)
    census = take_census(paths, sweep)
    result = None
    if not as_json:
        sys.stdout.write(as_text(census))
    if kill and census.left and (yes or _agreed(census, ask)):
        result = sweep.end()
        if not as_json:
            sys.stdout.write(_told(result))
    if as_json:
        sys.stdout.write(_as_json(census, result))
    left = result.left if result is not None else census.left
    return EXIT_NOT_CLEAN if left else EXIT_DONE


def _agreed(census: Census, ask: Ask) -> bool:
    count = len(census.left)
    sys.stdout.flush()
    try:
        answer = ask(f"End {'this process' if count == 1 else f'these {count} processes'}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    sys.stdout.write("nothing was ended\n")
    return False


def _told(result: SweepResult) -> str:
    lines = [f"ended {_name(one)}" for one in result.ended]
    lines += [f"not ended {_name(one)} ({why})" for one, why in result.left]
    return "".join(line + "\n" for line in lines)


def _name(one: Leftover) -> str:
    return f"pid {one.ref.pid}  {one_line(one.ref.command, 100)}"


def as_text(census: Census) -> str:
    """Return the census for people."""
    lines: list[str] = []
    for agent in census.agents:
        lines += _agent_lines(agent)
    if not census.agents:
        lines.append("nothing runs")
    if census.unreadable:
        lines.append(f"{census.unreadable} processes may not be looked at: what they hold open is not listed")
    if census.left:
        count = len(census.left)
        some = f"{count} process{'es' if count > 1 else ''} outlived {'their' if count > 1 else 'its'} agent"
        lines.append(f"{some}: 'peri ps --kill' ends what is left")
    return "".join(line + "\n" for line in lines)


def _agent_lines(agent: AgentSeen) -> list[str]:
    state = "" if agent.alive else "  DEAD, this is left of it:"
    lines = [f"agent {agent.instance}  pid {agent.pid}  {one_line(agent.workspace, 60)}".rstrip() + state]
    order = sorted(agent.processes, key=lambda one: (one.task, one.start_time, one.pid))
    for task, group in groupby(order, key=lambda one: one.task):
        if task:
            lines.append(f"  {task if task.startswith('service:') else f'task {task}'}")
        lines += [_process_line(one) for one in group]
    lines += [_connection_line(one) for one in agent.connections]
    lines += [f"    file  {one.pid:>7}  {one_line(one.path, 110)}" for one in agent.files]
    if agent.files_more:
        lines.append(f"    and {agent.files_more} more open files")
    return lines


def _process_line(one: ProcessSeen) -> str:
    mark = f"  [left, found by {one.leftover}]" if one.leftover else ""
    return (
        f"    {one.role:<10} {one.pid:>7}  {_span(one.age):>8}  cpu {one.cpu:>6.1f} s  {one.rss / 2**20:>7.1f} MiB"
        f"  {one_line(one.command, 80)}{mark}"
    )


def _connection_line(one: Connection) -> str:
    where = f"{one.local} → {one.peer}" if one.peer else one.local
    return f"    {one.kind:<5} {one.pid:>7}  {one_line(where, 100)}  {one.state}".rstrip()


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _as_json(census: Census, result: SweepResult | None) -> str:
    value: dict[str, object] = {
        "agents": [asdict(agent) for agent in census.agents],
        "left": [_leftover(one) for one in census.left],
        "unreadable": census.unreadable,
    }
    if result is not None:
        value["ended"] = [_leftover(one) for one in result.ended]
        value["not_ended"] = [_leftover(one) | {"reason": why} for one, why in result.left]
    # A path or an argument may be any bytes; what is no text must not keep the rest from being told.
    return scrub(json.dumps(value, ensure_ascii=False)) + "\n"


def _leftover(one: Leftover) -> dict[str, object]:
    return {
        "pid": one.ref.pid, "start_time": one.ref.start_time, "command": one.ref.command, "agent": one.instance,
        "task": one.task, "found": one.found, "role": one.role,
    }  # fmt: skip
