"""What a model server's refusal means: one line for people, and whether another attempt helps."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from peri_tui.core.messages import scrub
from peri_tui.errors import ModelAuthFailed, ModelBusy, ModelError, ModelRefused, ModelUnreachable
from peri_tui.log import secret_forms

BUSY: Final = frozenset({429, 503, 529})
_RETRY_STATUS: Final = frozenset({408, 409, 429})
_LONGEST: Final = 300


def one_line(text: str, secret: str = "") -> str:
    """Return text from a server as one short line of printable characters, without the key."""
    if len(secret) >= 4:
        for form in secret_forms(secret):
            text = text.replace(form, "***")
    line = " ".join("".join(char if char.isprintable() else " " for char in scrub(text)).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def refusal(
    status: int, headers: Mapping[str, str], body: bytes, url: str, secret: str, said: str = ""
) -> ModelRefused:
    """Return the error for a status, or for an error object inside a 200 (``status`` 200).

    Args:
        status: the HTTP status.
        headers: of the answer, lower case.
        body: of the answer, at most its beginning.
        url: that was asked.
        secret: the key.
        said: the server's words, where they are known already.
    """
    kind = headers.get("content-type", "")
    said = one_line(said or _words(body, kind), secret)
    tail = f": {said}" if said else ""
    evidence: dict[str, Any] = {"status": status, "retry_after": retry_after(headers)}
    if headers.get("x-should-retry") in ("true", "false"):
        evidence["retry"] = headers["x-should-retry"] == "true"
    where = f"model server {url}"
    if status in (401, 403):
        hint = "the key was refused" if secret else "it wants a key: set PERI_API_KEY or OPENAI_API_KEY"
        return ModelAuthFailed(f"{where}: {status}, {hint}{tail}", **evidence)
    if status in (404, 405):
        hint = "is the base URL right (it usually ends in /v1), and the model's name?"
        return ModelRefused(f"{where}: {status}; {hint}{tail}", **evidence)
    if 300 <= status < 400:
        target = one_line(headers.get("location", "elsewhere"), secret)
        return ModelRefused(f"{where}: {status}, redirects to {target}; set that as base URL", **evidence)
    kind_of = ModelBusy if status in BUSY else ModelRefused
    return kind_of(f"{where}: {'error' if status == 200 else status}{tail}", **evidence)


def error_object(found: object, url: str, secret: str) -> ModelRefused:
    """Return the error for an ``error`` object that came inside a stream."""
    code: object = None
    said = ""
    if isinstance(found, dict):
        code = found.get("code") or found.get("status") or found.get("type")
        said = str(found.get("message") or code or found)
    else:
        said = str(found)
    error = refusal(200, {}, b"", url, secret, said)
    numeric = int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdigit()) else 0
    overloaded = "overloaded" in str(code) or "rate_limit" in str(code) or str(code) == "server_error"
    error.evidence["retry"] = overloaded or _worth(numeric)
    if numeric in (401, 403):
        return ModelAuthFailed(str(error), **error.evidence)
    return ModelBusy(str(error), **error.evidence) if overloaded or numeric in BUSY else error


def retry_wait(error: ModelError, planned: float) -> float | None:
    """Return how many seconds to wait before the next attempt, or None where none helps.

    Args:
        error: what ended the attempt, before anything had come.
        planned: the schedule's own wait.
    """
    evidence = error.evidence
    if isinstance(error, ModelUnreachable):
        return planned if evidence.get("retry") else None
    if not isinstance(error, ModelRefused) or isinstance(error, ModelAuthFailed):
        return None
    status = evidence.get("status")
    worth = evidence.get("retry", _worth(status if isinstance(status, int) else 0))
    asked = evidence.get("retry_after")
    if not worth:
        return None
    return max(planned, asked) if isinstance(asked, float) else planned


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait in seconds that the server asks for: ``retry-after-ms``, seconds, or a date."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        try:
            seconds = float(value) * scale
        except ValueError:
            continue
        if 0 <= seconds < 1e9:
            return seconds
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _worth(status: int) -> bool:
    return status in _RETRY_STATUS or 500 <= status < 600


def _words(body: bytes, kind: str) -> str:
    text = body.decode("utf-8", "replace")
    if "html" in kind or text.lstrip()[:1] == "<":
        return "a web page, not a model API"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(found, list) and found:
        found = found[0]
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error.get("code") or json.dumps(error))
    return str(error)
