"""One tree of errors. Each class knows its kind; each instance carries a hint for the operator.

    EvermarkError
    ├── ConfigError            the file, a variable or an option is wrong
    ├── UnreachableError       a server does not answer, or stopped answering
    ├── BusyError              something else is using it just now (an active slot, a lock)
    ├── DeniedError            we lack a permission, or an address is not allowed
    ├── SetupError             the far side is not set up: publication, wal_level, slot, schema
    ├── GapError               positions that should follow the checkpoint cannot be read
    │   └── IdentityError      the source is not the one we left: restored, cloned, promoted
    ├── StaleError             our lease epoch is old: another instance owns this now
    ├── ConflictError          a compare-and-set lost, though our lease may still be good
    ├── NotFoundError          asked for something that is not there
    ├── FormatError            a durable format is newer than this program, or damaged
    ├── EngineError            Spark itself failed: a lost worker, a scratch folder that vanished
    └── DiskFullError          no space left where the log or state lives

An event that cannot be decoded is no error: it is logged raw, as `op = poison`.

`error_policy.py` alone maps a kind to what is done about it.
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    CONFIG = "config"
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    DENIED = "denied"
    SETUP = "setup"
    GAP = "gap"
    IDENTITY = "identity"
    STALE = "stale"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"
    FORMAT = "format"
    ENGINE = "engine"
    DISK_FULL = "disk_full"
    UNKNOWN = "unknown"


_BY_KIND: dict[str, type[EvermarkError]] = {}


class EvermarkError(Exception):
    """What went wrong and where; `hint` says what to do about it."""

    kind: Kind = Kind.UNKNOWN
    partition: int | None = None  # of the source, when only one has the trouble

    def __init_subclass__(cls) -> None:
        if cls.kind is not Kind.UNKNOWN:
            _BY_KIND.setdefault(cls.kind, cls)

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross processes.
        return (_rebuild, (type(self), self.message, self.hint, self.partition))


def _rebuild(cls: type[EvermarkError], message: str, hint: str, partition: int | None) -> EvermarkError:
    error = cls(message, hint=hint)
    error.partition = partition
    return error


class ConfigError(EvermarkError):
    """`each` has an error of its own for every problem that the message tells, if it tells several."""

    kind = Kind.CONFIG
    each: tuple[ConfigError, ...] = ()


class UnreachableError(EvermarkError):
    kind = Kind.UNREACHABLE


class BusyError(EvermarkError):
    kind = Kind.BUSY


class DeniedError(EvermarkError):
    kind = Kind.DENIED


class SetupError(EvermarkError):
    kind = Kind.SETUP


class GapError(EvermarkError):
    kind = Kind.GAP


class IdentityError(GapError):
    kind = Kind.IDENTITY


class StaleError(EvermarkError):
    kind = Kind.STALE


class ConflictError(EvermarkError):
    kind = Kind.CONFLICT


class NotFoundError(EvermarkError):
    kind = Kind.NOT_FOUND


class FormatError(EvermarkError):
    kind = Kind.FORMAT


class EngineError(EvermarkError):
    kind = Kind.ENGINE


class DiskFullError(EvermarkError):
    kind = Kind.DISK_FULL


def of_kind(kind: str, message: str, hint: str = "") -> EvermarkError:
    """Rebuild an error that crossed a process as plain values."""
    return _BY_KIND.get(kind, EvermarkError)(message, hint=hint)


def known(error: Exception) -> EvermarkError:
    """The error itself, or one of unknown kind for what is none of ours."""
    return error if isinstance(error, EvermarkError) else EvermarkError(f"{type(error).__name__}: {error}"[:1000])
