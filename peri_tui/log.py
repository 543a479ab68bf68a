"""Structured log and trace files: one JSON line an event, appended in one write, never a secret.

Both processes append to the same files (``O_APPEND``, one ``write`` a line, so lines do not mix). A secret is kept
out twice: callers never pass one, and every line is searched for the values registered with ``Log.hide``.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from peri_tui.core.trace import TraceRecord

_encoder = msgspec.json.Encoder(enc_hook=str)


def secret_forms(secret: str) -> tuple[str, ...]:
    """Return the ways in which a secret may be written, longest first: as it is, URL-encoded, base64, JSON."""
    raw = secret.encode("utf-8", "surrogateescape")
    coded = base64.b64encode(raw).decode()
    forms = {secret, quote(raw, safe=""), quote(raw), coded, coded.rstrip("=")}
    forms |= {base64.urlsafe_b64encode(raw).decode().rstrip("="), json.dumps(secret)[1:-1]}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


class Log:
    """Appends events to a log file and trace records to a file a task.

    Args:
        log_file: the JSON lines log.
        trace_dir: the folder of ``<task>.jsonl`` trace files.
        src: who writes (instance or client id).
        wall: wall clock in seconds.
        mono: monotonic clock in nanoseconds.
    """

    def __init__(
        self,
        log_file: Path,
        trace_dir: Path,
        src: str,
        *,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._log_file = log_file
        self._trace_dir = trace_dir
        self._src = src
        self._wall = wall
        self._mono = mono
        self._secrets: set[bytes] = set()

    def hide(self, secret: str) -> None:
        """Never write this value, nor its URL-encoded or base64 form."""
        if len(secret) >= 6:
            self._secrets |= {form.encode("utf-8", "surrogateescape") for form in secret_forms(secret)}

    def event(self, name: str, *, task: str = "", layer: int = 0, **facts: object) -> None:
        """Append one log line. Never raises for a full or missing disk: a log must not stop a stop."""
        line = {
            "ts": round(self._wall(), 6),
            "src": self._src,
            "ev": name,
            "task": task,
            "layer": layer,
        } | facts
        self._append(self._log_file, {key: value for key, value in line.items() if value not in ("", 0)})

    def trace(
        self, task: str, layer: int, ev: str, *, cancel_id: str = "", mono: int | None = None, **data: Any
    ) -> TraceRecord:
        """Append one trace record and return it; ``mono`` back-dates it to when it was seen."""
        record = TraceRecord(
            task=task,
            layer=layer,
            ev=ev,
            mono=self._mono() if mono is None else mono,
            ts=round(self._wall(), 6),
            src=self._src,
            cancel_id=cancel_id,
            data=data,
        )
        self._append(self._trace_dir / f"{task}.jsonl", record)
        return record

    def _append(self, path: Path, line: object) -> None:
        data = _encoder.encode(line)
        for secret in sorted(self._secrets, key=len, reverse=True):
            data = data.replace(secret, b"***")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data + b"\n")
            finally:
                os.close(fd)
        except OSError:
            return


def read_trace(trace_dir: Path, task: str) -> list[TraceRecord]:
    """Return the records of a task, oldest first; a torn last line is left out, a missing file is empty."""
    try:
        lines = (trace_dir / f"{task}.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            records.append(msgspec.json.decode(line, type=TraceRecord))
        except msgspec.DecodeError:
            continue
    return sorted(records, key=lambda record: record.mono)
