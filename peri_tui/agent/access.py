"""Who may do what: the gate in front of the agent's socket.

The same user may read and **stop**; to submit, answer or trust, a connection must show the token of this instance.
Browsers are refused outright: any ``Origin`` header, and any ``Host`` that is not ours.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

HOSTS = frozenset({"localhost"})


@dataclass(frozen=True, slots=True)
class Refused:
    """An HTTP answer instead of a connection; the same words for every wrong token."""

    status: HTTPStatus
    text: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """The peer may read and stop; ``may_write`` also submit, answer and trust."""

    may_write: bool


def admit(
    token: str,
    *,
    peer_uid: int,
    hosts: Sequence[str],
    origins: Sequence[str],
    authorizations: Sequence[str],
    own_uid: int | None = None,
) -> Admitted | Refused:
    """Judge a request by its peer and its headers, each given as all values of that header.

    Args:
        token: the token of this instance.
        peer_uid: the user id of the peer process, as the kernel says it.
        hosts, origins, authorizations: header values.
        own_uid: our user id; the real one unless a test says otherwise.
    """
    if peer_uid != (os.getuid() if own_uid is None else own_uid):
        return Refused(HTTPStatus.FORBIDDEN, "another user's agent\n")
    if origins:
        return Refused(HTTPStatus.FORBIDDEN, "no browser may connect\n")
    if len(hosts) != 1 or hosts[0] not in HOSTS:
        return Refused(HTTPStatus.FORBIDDEN, "wrong Host\n")
    if len(authorizations) > 1:
        return Refused(HTTPStatus.BAD_REQUEST, "more than one Authorization\n")
    if not authorizations:
        return Admitted(may_write=False)
    scheme, _, given = authorizations[0].partition(" ")
    right = hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())
    if scheme.lower() != "bearer" or not right:
        return Refused(HTTPStatus.UNAUTHORIZED, "wrong token\n")
    return Admitted(may_write=True)


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, -1 where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        # macOS: the 0700 folder of the socket is the guard.
        return os.getuid()
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return -1
    return int(struct.unpack("3i", raw)[1])
