"""The table of runs: what this agent has, in which order it starts, and what has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peri_tui.agent.scheduler.run import Run


class RunTable:
    """Runs from the queue to their end.

    Args:
        concurrency: how many run at once. Tasks of one session run one after the other, because each extends the
            same conversation.
        start: called with a run whose turn it is.

    ``empty`` is set while nothing is here but runs that are held.
    """

    def __init__(self, concurrency: int, start: Callable[[Run], None]) -> None:
        self._concurrency = concurrency
        self._start = start
        self._runs: dict[str, Run] = {}
        self._queue: list[Run] = []
        self._active: set[str] = set()
        self._held: set[str] = set()
        self.empty = asyncio.Event()
        self.empty.set()

    def get(self, task: str) -> Run | None:
        """Return a task's run, if it is here."""
        return self._runs.get(task)

    def all(self) -> list[Run]:
        """Return every run."""
        return list(self._runs.values())

    def queued(self) -> list[Run]:
        """Return the runs that have not had their turn, in order."""
        return list(self._queue)

    def is_active(self, run: Run) -> bool:
        """Tell whether the run has had its turn and not given it back."""
        return run.task in self._active

    def add(self, run: Run) -> None:
        """Make a run known, and so stoppable, before there is anything that runs."""
        self._runs[run.task] = run
        self._judge()

    def enqueue(self, run: Run, *, held: bool = False, first: bool = False) -> None:
        """Put a run into the queue; a held one waits for ``release``."""
        if held:
            self._held.add(run.task)
        self._queue.insert(0 if first else len(self._queue), run)
        self.add(run)

    def release(self, task: str) -> None:
        """Let a held run have its turn."""
        self._held.discard(task)
        self._judge()

    def is_held(self, run: Run) -> bool:
        """Tell whether the run waits for ``release``."""
        return run.task in self._held

    def withdraw(self, run: Run) -> None:
        """Take a run out of the queue, so that it never has its turn."""
        if run in self._queue:
            self._queue.remove(run)

    def pump(self) -> None:
        """Start what may start."""
        for run in list(self._queue):
            if run.token.is_set:
                self._queue.remove(run)
            elif len(self._active) < self._concurrency and not self._must_wait(run):
                self._queue.remove(run)
                self._active.add(run.task)
                self._start(run)

    def give_back(self, run: Run) -> None:
        """End a run's turn, without forgetting it."""
        self._active.discard(run.task)

    def drop(self, run: Run) -> None:
        """Forget a run, and let the next have its turn."""
        self.give_back(run)
        self.release(run.task)
        self.withdraw(run)
        if self._runs.get(run.task) is run:
            del self._runs[run.task]
        self.pump()
        self._judge()

    def _judge(self) -> None:
        if self._runs.keys() <= self._held:
            self.empty.set()
        else:
            self.empty.clear()

    def _must_wait(self, run: Run) -> bool:
        busy = {self._runs[task].row.session for task in self._active if task in self._runs} - {""}
        return run.task in self._held or run.row.session in busy
