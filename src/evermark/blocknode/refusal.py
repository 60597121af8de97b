"""What a node says no to: a code for programs, an error for people, a status for HTTP."""

from __future__ import annotations

from enum import StrEnum

from evermark.errors import BusyError, ConfigError, ConflictError, DeniedError, EvermarkError, NotFoundError
from evermark.observe.logging import without_secrets


class Code(StrEnum):
    """Every code there is. A client decides by them; the texts beside them may change."""

    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"  # no such path
    STREAM_NOT_FOUND = "stream_not_found"
    STREAM_EXISTS = "stream_exists"  # with other contents
    HASH_MISMATCH = "hash_mismatch"
    MEMBERS_FIXED = "members_fixed"
    TOO_MANY = "too_many"
    RANGE_EMPTY = "range_empty"
    RANGE_IMPOSSIBLE = "range_impossible"
    SYNC_NOT_FOUND = "sync_not_found"
    READ_ONLY = "read_only"  # this node follows another one
    BEHIND = "behind"  # this node follows another one, and does not have that yet
    BUSY = "busy"
    DISK_FULL = "disk_full"
    STOPPING = "stopping"
    FAILED = "failed"


STATUSES: dict[Code, int] = {
    Code.BAD_REQUEST: 400,
    Code.TOO_LARGE: 413,
    Code.UNAUTHORIZED: 401,
    Code.NOT_FOUND: 404,
    Code.STREAM_NOT_FOUND: 404,
    Code.STREAM_EXISTS: 409,
    Code.HASH_MISMATCH: 422,
    Code.MEMBERS_FIXED: 422,
    Code.TOO_MANY: 422,
    Code.RANGE_EMPTY: 416,
    Code.RANGE_IMPOSSIBLE: 416,
    Code.SYNC_NOT_FOUND: 404,
    Code.READ_ONLY: 403,
    Code.BEHIND: 503,
    Code.BUSY: 503,
    Code.DISK_FULL: 503,
    Code.STOPPING: 503,
    Code.FAILED: 500,
}


class Refused(Exception):
    """The answer to a request that is not carried out; nothing was changed by it."""

    def __init__(self, code: Code, error: EvermarkError) -> None:
        super().__init__(error.message)
        self.code = code
        self.error = error

    @property
    def status(self) -> int:
        return STATUSES[self.code]

    def told(self) -> dict[str, str]:
        return {
            "code": str(self.code),
            "message": without_secrets(self.error.message),
            "hint": without_secrets(self.error.hint),
        }


def bad_request(message: str, hint: str = "docs/blocknode.md describes every request") -> Refused:
    return Refused(Code.BAD_REQUEST, ConfigError(message, hint=hint))


def stream_not_found(stream: str) -> Refused:
    return Refused(
        Code.STREAM_NOT_FOUND,
        NotFoundError(f"there is no stream {stream}", hint=f"create it: PUT /v1/streams/{stream}"),
    )


def stream_exists(stream: str) -> Refused:
    hint = "it differs in kind, creator, members or settings: choose another id, or delete it"
    return Refused(Code.STREAM_EXISTS, ConflictError(f"the stream {stream} exists already", hint=hint))


def behind(stream: str) -> Refused:
    hint = "ask again in a moment, or the node it follows"
    return Refused(
        Code.BEHIND, BusyError(f"this node follows another and does not have that of {stream} yet", hint=hint)
    )


def read_only(leader: str) -> Refused:
    return Refused(
        Code.READ_ONLY, DeniedError("this node follows another one and only reads", hint=f"write to {leader}")
    )


def too_many(message: str, hint: str) -> Refused:
    return Refused(Code.TOO_MANY, ConfigError(message, hint=hint))


def busy(message: str) -> Refused:
    return Refused(Code.BUSY, BusyError(message, hint="try again in a moment"))


def stopping() -> Refused:
    return Refused(Code.STOPPING, BusyError("this node is stopping", hint="try another node, or this one in a moment"))
