"""Why a node refuses a request: a code for programs, an error for people, a status for HTTP."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from evermark.observe.logging import without_secrets


class Code(StrEnum):
    """Every code there is, with its HTTP status. Clients decide by the code; the texts beside it may change."""

    status: int

    def __new__(cls, value: str, status: int) -> Self:
        made = str.__new__(cls, value)
        made._value_, made.status = value, status
        return made

    BAD_REQUEST = "bad_request", 400
    TOO_LARGE = "too_large", 413
    UNAUTHORIZED = "unauthorized", 401
    NOT_FOUND = "not_found", 404  # no such path
    STREAM_NOT_FOUND = "stream_not_found", 404
    STREAM_EXISTS = "stream_exists", 409  # with other contents
    HASH_MISMATCH = "hash_mismatch", 422
    MEMBERS_FIXED = "members_fixed", 422
    TOO_MANY = "too_many", 422
    RANGE_EMPTY = "range_empty", 416
    RANGE_IMPOSSIBLE = "range_impossible", 416
    SYNC_NOT_FOUND = "sync_not_found", 404
    READ_ONLY = "read_only", 403  # this node follows another one
    BEHIND = "behind", 503  # this node follows another one, and does not have the blocks yet
    BUSY = "busy", 503
    DISK_FULL = "disk_full", 503
    STOPPING = "stopping", 503
    FAILED = "failed", 500


class Refused(Exception):
    """The answer to a request that is not carried out; nothing was changed by it."""

    def __init__(self, code: Code, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    def wire(self) -> dict[str, str]:
        return {"code": str(self.code), "message": without_secrets(self.message), "hint": without_secrets(self.hint)}


def bad_request(message: str, hint: str = "docs/blocknode.md describes every request") -> Refused:
    return Refused(Code.BAD_REQUEST, message, hint)


def stream_not_found(stream: str) -> Refused:
    return Refused(Code.STREAM_NOT_FOUND, f"there is no stream {stream}", f"create it: PUT /v1/streams/{stream}")


def behind(stream: str) -> Refused:
    said = f"this node follows another one and does not have these blocks of {stream} yet"
    return Refused(Code.BEHIND, said, "ask again in a moment, or the node it follows")


def busy(message: str) -> Refused:
    return Refused(Code.BUSY, message, "try again in a moment")


def stopping() -> Refused:
    return Refused(Code.STOPPING, "this node is stopping", "try another node, or this one in a moment")
