"""How a fork is asked for, of a process that has loaded the program (`tests/forked.py`). Imports next to nothing.

As a program (`tests/forked_python`) it is the Python that Spark of a forked `up` starts its daemon with: it asks for a
fork beside that `up`, gives it its three files, and ends as the fork does.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence

LENGTH = 4
STATUS = 4
BESIDE = "EVERMARK_TEST_FORKS"  # where the process that forks the daemon listens
PYTHON = "EVERMARK_TEST_PYTHON"
DAEMON = "evermark.app.daemon"


def ask(
    link: socket.socket, words: Sequence[str], env: Mapping[str, str], files: Sequence[int], new_session: bool = False
) -> tuple[socket.socket, int]:
    """Ask for a fork with these words, this environment, and these three files; where its status comes, and its pid."""
    asked = {"words": list(words), "env": dict(env), "cwd": os.getcwd(), "new_session": new_session}  # noqa: PTH109
    packed = json.dumps(asked).encode()
    ours, theirs = socket.socketpair()
    with theirs:
        given = array.array("i", [theirs.fileno(), *files])
        link.sendmsg([len(packed).to_bytes(LENGTH, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
        link.sendall(packed)
    return ours, int.from_bytes(exactly(ours, LENGTH), "big")


def exactly(link: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = link.recv(count - len(got))
        if not more:
            raise EOFError
        got += more
    return got


def _main(words: Sequence[str]) -> int:
    if tuple(words[:2]) != ("-m", DAEMON):
        os.execv(os.environ[PYTHON], [os.environ[PYTHON], *words])  # noqa: S606 - the Python of the tests
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{os.environ[BESIDE]}")
        ours, _ = ask(link, words, os.environ, (0, 1, 2))
    status = ours.recv(STATUS)  # nothing if the instance is killed, and all that belongs to it
    return abs(os.waitstatus_to_exitcode(int.from_bytes(status, "big"))) if status else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
