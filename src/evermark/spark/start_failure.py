"""What is said when Spark does not start: one line and a hint. The stack traces stay in spark.log."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from evermark.errors import ConfigError, EngineError, UnreachableError

_PROBE_TIMEOUT_S = 3.0
_NOISE_BYTES_MAX = 256 * 1024
_MASTER_PORT = re.compile(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})")
_CLASS_NAME = re.compile(r"^(Exception in thread \S+ |Caused by: )?((\w+\.)+)(?=\w+(Exception|Error)\b)")
# What a JVM and Spark write on every start, and lines of a stack trace.
_USUAL = re.compile(
    r"^(WARNING: |OpenJDK .* warning: |Error occurred during initialization of VM|Using Spark's |Setting |To adjust |"
    r"\d\d/\d\d/\d\d .*(WARN|INFO) |\s+at |\s*$)"
)
_MEMORY = re.compile(
    r"OutOfMemory|insufficient memory|Cannot allocate memory|reserve enough space|system memory", re.IGNORECASE
)


def require_master_answers(master: str) -> None:
    """Raise `UnreachableError` when no address of a `spark://` master takes a connection; other masters pass unasked.

    Spark itself would take a minute to find out.
    """
    if not master.startswith("spark://"):
        return
    refusals: list[str] = []
    for address in master.removeprefix("spark://").split(","):
        parsed = _MASTER_PORT.fullmatch(address.strip())
        if parsed is None:
            raise ConfigError(
                f"spark.master: {master} has no host and port in {address!r}", hint="write it as spark://host:7077"
            )
        try:
            socket.create_connection((parsed[1].strip("[]"), int(parsed[2])), _PROBE_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            refusals.append(f"{address.strip()}: {str(getattr(error, 'strerror', None) or error).lower()}")
        else:
            return
    raise UnreachableError(
        f"the Spark master at {master} does not answer ({'; '.join(refusals)})",
        hint="is it up, and reachable from this machine? Without spark.master, Evermark runs Spark by itself",
    )


def start_error(error: Exception, conf: Mapping[str, str], noise: Path | None) -> EngineError:
    """What Spark, or the JVM that was to run it, says of its own end."""
    written = ""
    with suppress(OSError):
        if noise is not None:
            with noise.open("rb") as file:
                written = file.read(_NOISE_BYTES_MAX).decode("utf-8", "replace")
    lines = str(error).splitlines()
    said = _telling(lines[1:]) or _telling(written.splitlines()) or _telling(lines)
    hints = []
    if _MEMORY.search(said):
        hints.append(
            "the JVM takes 1g, or what spark.driver.memory in spark.conf says, and the machine must have it free"
        )
    elif conf:
        hints.append(f"is spark.conf right? It sets {', '.join(sorted(conf))}")
    if noise is not None:
        hints.append(f"the details are in {noise}")
    return EngineError(
        f"Spark could not be started: {said or type(error).__name__}",
        hint="; ".join(hints) or "the lines above have the details",
    )


def _telling(lines: Iterable[str]) -> str:
    """The first line that says what happened, without the package of a Java class; empty when there is none."""
    for line in lines:
        text = line.removeprefix(": ")
        if not _USUAL.match(text):
            return _CLASS_NAME.sub("", text.strip())[:300]
    return ""
