"""Postgres refuses to run as root. Started by root, its programs run as another user.

That user may be unable to reach the data folder or the programs: homes and temporary folders are closed to others
(mode 0700), and a virtual environment often lies in one. Opening these folders to every user would be a lasting
change to the machine. Instead the server process alone keeps one capability, the narrowest there is for walking
through folders, and only when the path needs it.

This file is also the program that does it: `python -I demote.py UID GID CAPABILITY PROGRAM ARGS…`. A separate process,
because changing users between fork and exec is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

USER_ENV = "EVERMARK_POSTGRES_USER"
_PREFERRED_USERS = ("evermark", "postgres", "nobody")

# From linux/capability.h. The first lets a process walk and read; the second, wider, is what containers usually have.
CAP_DAC_READ_SEARCH = 2
CAP_DAC_OVERRIDE = 1
NO_CAPABILITY = -1

_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAPBSET_READ = 23
_CAPABILITY_VERSION_3 = 0x20080522


Account = pwd.struct_passwd  # the user that the server runs as; None in its place: the user of this process


def account_for_root(data: Path) -> Account | None:
    """The account for a server on `data`: the owner it already has, else the first of a short list that exists."""
    if data.exists() and (owner := data.stat().st_uid) != 0:
        try:
            return pwd.getpwuid(owner)
        except KeyError:
            return None
    named = os.environ.get(USER_ENV)
    for name in (named,) if named else _PREFERRED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return entry
    return None


def reachable(path: Path, account: Account) -> bool:
    """Whether `account` may walk down to `path`, by the mode bits of every folder above it."""
    for folder in path.resolve().parents:
        found = folder.stat()
        if found.st_uid == account.pw_uid:
            needed = stat.S_IXUSR
        elif found.st_gid == account.pw_gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not found.st_mode & needed:
            return False
    return True


def capability_for(paths: Iterable[Path], account: Account) -> int | None:
    """The capability that `account` needs to reach all of `paths`; None when it cannot be had here."""
    if all(reachable(path, account) for path in paths):
        return NO_CAPABILITY
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):
        if libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            return capability
    return None


def command_as(account: Account, capability: int, command: Sequence[str]) -> list[str]:
    """`command`, wrapped to run as `account`."""
    return [sys.executable, "-I", "-S", __file__, str(account.pw_uid), str(account.pw_gid), str(capability), *command]


def become(uid: int, gid: int, capability: int) -> None:
    """Give up root for good, keeping at most one capability, which also survives the exec that follows."""
    libc = ctypes.CDLL(None, use_errno=True)
    if capability != NO_CAPABILITY:
        _checked(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if capability != NO_CAPABILITY:
        bit = 1 << capability
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; then the high words
        _checked(libc.capset(header, sets), "capset")
        _checked(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0), "prctl(PR_CAP_AMBIENT)")


def _checked(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


if __name__ == "__main__":
    become(*map(int, sys.argv[1:4]))
    os.execv(sys.argv[4], sys.argv[4:])  # noqa: S606 - the program is ours, named by its full path
