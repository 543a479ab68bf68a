"""The agent's HTTP routes from outside, for any thread: no event loop, one deadline over the whole call.

httpx is imported when the first call is made: it costs more than the rest of a ``peri stop``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from peri_tui.errors import AgentUnreachable

if TYPE_CHECKING:
    from httpcore import NetworkBackend, NetworkStream
else:
    # httpcore's backends are called by name, never checked by type; importing it here would cost every start.
    NetworkBackend = NetworkStream = object


def post_cancel(
    socket_path: str | os.PathLike[str],
    task: str,
    *,
    reason: str = "user",
    mode: str = "graceful",
    epoch: int = 0,
    t_ui: int = 0,
    attempt: int = 1,
    timeout: float = 2.0,
) -> dict[str, Any]:
    """Ask an agent to end a task, over a connection of its own; any thread, no event loop.

    Args:
        socket_path: the agent's Unix socket.
        task, reason, mode, epoch, attempt: as in ``Cancel``.
        t_ui: monotonic nanoseconds of the key press, where the time of a stop begins; 0 if there was none.
        timeout: seconds for the whole.

    Returns:
        The agent's answer: a ``cancel.accepted``, ``cancel.noop`` or ``error`` message as a dictionary.

    Raises:
        AgentUnreachable: nobody answered within ``timeout`` seconds, or not with JSON.
    """
    query = urlencode({"epoch": epoch, "reason": reason, "mode": mode, "t_ui": t_ui, "attempt": attempt})
    return _ask(socket_path, "POST", f"/v1/tasks/{quote(task, safe='')}/cancel?{query}", timeout)


def get_task(socket_path: str | os.PathLike[str], task: str, *, timeout: float = 2.0) -> dict[str, Any]:
    """Return what an agent says of a task.

    Raises:
        AgentUnreachable: nobody answered within ``timeout`` seconds, or not with JSON.
    """
    return _ask(socket_path, "GET", f"/v1/tasks/{quote(task, safe='')}", timeout)


def get_trace(socket_path: str | os.PathLike[str], task: str, *, timeout: float = 2.0) -> dict[str, Any]:
    """Return the cancel trace of a task; a bare list is returned as ``{"records": [...]}``.

    Raises:
        AgentUnreachable: nobody answered within ``timeout`` seconds, or not with JSON.
    """
    return _ask(socket_path, "GET", f"/v1/tasks/{quote(task, safe='')}/trace", timeout)


class _UnixStream(NetworkStream):
    """A blocking Unix socket whose deadline is that of the whole call, not of each read."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        import httpcore

        with _blocking(self._sock, self._deadline, httpcore.ReadTimeout, httpcore.ReadError):
            return self._sock.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        import httpcore

        with _blocking(self._sock, self._deadline, httpcore.WriteTimeout, httpcore.WriteError):
            self._sock.sendall(buffer)

    def close(self) -> None:
        self._sock.close()

    def get_extra_info(self, info: str) -> Any:
        return None


class _UnixBackend(NetworkBackend):
    """Connects to a Unix socket; unlike httpcore's own it closes the socket when nobody listens."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> NetworkStream:
        import httpcore

        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _blocking(sock, self._deadline, httpcore.ConnectTimeout, httpcore.ConnectError):
                sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return _UnixStream(sock, self._deadline)


@contextlib.contextmanager
def _blocking(
    sock: socket.socket, deadline: float, late: type[Exception], broken: type[Exception]
) -> Iterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise late("the time is over")
    sock.settimeout(left)
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise broken(error.strerror or str(error)) from error


def _ask(socket_path: str | os.PathLike[str], method: str, target: str, timeout: float) -> dict[str, Any]:
    import httpcore
    import httpx

    path = os.fspath(socket_path)
    where = f"agent at {path}"
    deadline = time.monotonic() + timeout
    # No TLS on a Unix socket, so no certificates: loading them would cost 0.1 s of a stop.
    unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        transport = httpx.HTTPTransport(verify=unused, trust_env=False)
        transport._pool = httpcore.ConnectionPool(
            ssl_context=unused, uds=path, network_backend=_UnixBackend(deadline)
        )
        with httpx.Client(transport=transport, timeout=timeout, trust_env=False) as client:
            answer = client.request(method, f"http://localhost{target}").json()
    except httpx.TimeoutException:
        raise AgentUnreachable(f"{where}: no answer within {timeout:g} s") from None
    except httpx.HTTPError as error:
        raise AgentUnreachable(f"{where}: {str(error) or type(error).__name__}") from None
    except ValueError:
        raise AgentUnreachable(f"{where}: its answer to {method} is no JSON") from None
    return answer if isinstance(answer, dict) else {"records": answer}
