"""Every error that Peri raises on purpose.

::

    PeriError
    ├── UsageError                a command line that cannot be obeyed (exit 2)
    ├── InputError                bad input: prompt, workspace, path (exit 42)
    ├── ConfigError               a settings file that names file, key and what was expected (exit 52)
    ├── ProtocolError             a peer broke peri.v1
    │   ├── VersionMismatch
    │   └── NotAuthorized
    ├── AgentUnreachable          no agent process answers (exit 75)
    ├── StateError                layer 3 refused
    │   ├── UnknownTask
    │   ├── IllegalTransition
    │   ├── StaleVersion
    │   ├── StaleEpoch
    │   ├── Conflict              same id, other content
    │   └── StoreUnavailable
    ├── ModelError                layer 4
    │   ├── ModelUnreachable      resolving, connecting, TLS
    │   ├── ModelRefused          an HTTP status that is an error
    │   │   ├── ModelAuthFailed
    │   │   └── ModelBusy         too many requests, overloaded (exit 75)
    │   ├── ModelTimeout          which clock ran out
    │   ├── ModelTruncated        the stream ended without its terminator
    │   └── ModelProtocolError    what came is not the protocol
    ├── ToolError                 told to the model, never the end of a task
    │   ├── OutsideWorkspace
    │   └── FileChanged           the file is not what the model read
    ├── ProcessError              layers 4 and 5
    │   ├── SpawnFailed
    │   └── WardenLost
    └── RollbackError             layer 5
        ├── JournalDamaged        names the offset
        ├── StoreFull             backups cannot be made durable, so nothing was changed
        └── WorkspaceBusy         another Peri holds the journal, with its pid

A message is one line that names what and where. ``layer`` is 1 to 5 where an error belongs to one.
"""

from __future__ import annotations

from typing import ClassVar


class PeriError(Exception):
    """Base of all; ``layer`` and ``exit_code`` are class facts, ``evidence`` is what was seen."""

    layer: ClassVar[int | None] = None
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **evidence: object) -> None:
        super().__init__(message)
        self.evidence = evidence


class UsageError(PeriError):
    """The command line cannot be obeyed."""

    exit_code = 2


class InputError(PeriError):
    """Bad input: a prompt, a workspace, a path."""

    exit_code = 42


class ConfigError(PeriError):
    """A settings file or variable is wrong; the message names file, key and what was expected."""

    exit_code = 52


class ProtocolError(PeriError):
    """A peer sent what ``peri.v1`` does not allow."""

    layer = 2


class VersionMismatch(ProtocolError):
    """The peer speaks no version that we speak."""


class NotAuthorized(ProtocolError):
    """The peer may read and stop, but not do this."""


class AgentUnreachable(PeriError):
    """No agent process answers."""

    layer = 2
    exit_code = 75


class StateError(PeriError):
    """Layer 3 refused."""

    layer = 3


class UnknownTask(StateError):
    """No task with this id."""


class IllegalTransition(StateError):
    """The arrow does not exist in the state machine."""


class StaleVersion(StateError):
    """Another writer was first."""


class StaleEpoch(StateError):
    """Another owner took the task over."""


class Conflict(StateError):
    """The same id was used for other content."""


class StoreUnavailable(StateError):
    """The state store does not answer."""


class ModelError(PeriError):
    """Layer 4 failed."""

    layer = 4


class ModelUnreachable(ModelError):
    """Resolving, connecting or the TLS handshake failed."""


class ModelRefused(ModelError):
    """The server answered with an error. ``evidence`` holds ``status`` and ``retry_after``."""


class ModelAuthFailed(ModelRefused):
    """401 or 403."""

    exit_code = 41


class ModelBusy(ModelRefused):
    """Too many requests, or the server is overloaded: later it may work."""

    exit_code = 75


class ModelTimeout(ModelError):
    """A clock ran out: ``evidence['clock']`` is connect, first_byte, idle or total."""


class ModelTruncated(ModelError):
    """The stream ended without its terminator."""


class ModelProtocolError(ModelError):
    """What the server sent is not its protocol."""


class ToolError(PeriError):
    """A tool could not do it; the model is told and goes on."""


class OutsideWorkspace(ToolError):
    """The path leaves the workspace."""


class FileChanged(ToolError):
    """The file is not what the model has read."""


class ProcessError(PeriError):
    """A process could not be started or ended."""

    layer = 5


class SpawnFailed(ProcessError):
    """The command could not be started; ``evidence`` holds ``errno`` and ``stage``."""


class WardenLost(ProcessError):
    """The warden died; its supervisors end their trees by themselves."""


class RollbackError(PeriError):
    """Layer 5 failed."""

    layer = 5


class JournalDamaged(RollbackError):
    """The journal is damaged in its middle; ``evidence['offset']`` is the byte."""


class StoreFull(RollbackError):
    """A backup cannot be made durable; nothing was changed."""


class WorkspaceBusy(RollbackError):
    """Another Peri holds this workspace; ``evidence['pid']`` is the holder."""

    exit_code = 75
