"""Spark as a process that can die: this process's JVM, whether it still works, and a clean slate for the next JVM.

PySpark keeps its JVM in class attributes and never looks whether it lives. A JVM that was killed, or ended itself for
want of memory, would leave every later session talking to a closed socket.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from contextlib import suppress
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from evermark.observe.logging import get_logger

_BEAT_EVERY_S = 1.0
_STARTING_BEATS = 20
_END_WAIT_S = 5.0
_STOP_WAIT_S = 20.0
# Looks at the engine (two a second) without an answer of the JVM in between, until it counts as hung. Looks are counted
# and not seconds: a machine or process that slept for a while has not been waiting.
_LOOKS_WITHOUT_ANSWER_MAX = 60


class Engine:
    """The Spark of this process together with the JVM it runs in."""

    def __init__(self, context: SparkContext, *, on_cluster: bool = False) -> None:
        """`on_cluster`: executors are processes of their own, and may be none."""
        self.context = context
        self._executors: list[int] = []  # that Spark knew at its first beats, and knows just now
        self.on_cluster = on_cluster
        self._stopped = False
        gateway: Any = SparkContext._gateway  # noqa: SLF001 - nothing public knows the JVM's process
        self._jvm: subprocess.Popen[bytes] = gateway.proc
        self._looks_without_answer = 0
        self._over = threading.Event()
        # Looked up once: to find a class by its name, the JVM tries each part of the name in vain.
        self._clock: Any = context._jvm.java.lang.System  # type: ignore[union-attr] # noqa: SLF001
        self._spark: Any = context._jsc.sc()  # noqa: SLF001 - PySpark knows neither its end nor its executors
        self._heart = threading.Thread(target=self._beat, name="engine heartbeat", daemon=True)
        self._heart.start()
        _quieten(context)

    @property
    def pid(self) -> int:
        return self._jvm.pid

    def trouble(self) -> str | None:
        """Why Spark cannot be used any more; None while it can. To be asked about twice a second."""
        code = self._jvm.poll()
        if code is not None:
            return f"Spark's JVM ended ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)})"
        if self._stopped:  # by a master that gave the application up, or does not come back
            return "Spark ended the application"
        self._looks_without_answer += 1
        if self._looks_without_answer > _LOOKS_WITHOUT_ANSWER_MAX:
            return "Spark's JVM does not answer"
        return None

    def idle(self) -> bool:
        """Whether there is nobody to run a task. Executors that are being started are no trouble yet."""
        known = self._executors
        return bool(known) and known[-1] == 0 and (any(known) or len(known) > _STARTING_BEATS)

    def kill(self) -> None:
        """End the JVM at once: threads that wait for an answer of it get an error instead."""
        self._jvm.kill()
        self._jvm.wait()

    def stop(self) -> None:
        """Give everything back. After this a new session starts a new JVM, whether this one was well or not."""
        self._over.set()
        if self._jvm.poll() is None:
            # If this fails, or a JVM that hangs does not answer, the process is ended below.
            stopping = threading.Thread(target=self._stop_spark, name="stop Spark", daemon=True)
            stopping.start()
            stopping.join(_STOP_WAIT_S)
            if stopping.is_alive():
                self.kill()
        self._end_jvm()
        self._forget()

    def _stop_spark(self) -> None:
        with suppress(Exception):
            self.context.stop()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_EVERY_S):
            with suppress(Exception):  # an error is no answer: `trouble` counts those
                self._clock.nanoTime()
                self._looks_without_answer = 0
                if self.on_cluster:
                    self._stopped = bool(self._spark.isStopped())
                    # The driver is in that list, too.
                    known = len(self._spark.statusTracker().getExecutorInfos()) - 1
                    self._executors = [*self._executors[-_STARTING_BEATS:], known]

    def _end_jvm(self) -> None:
        """The JVM ends by itself when its stdin is closed; if it does not, it is killed."""
        if self._jvm.stdin is not None:
            with suppress(OSError):
                self._jvm.stdin.close()
        try:
            self._jvm.wait(_END_WAIT_S if self._jvm.poll() is None else 0)
        except subprocess.TimeoutExpired:
            self.kill()

    def _forget(self) -> None:
        context: Any = SparkContext
        session: Any = SparkSession
        gateway = context._gateway  # noqa: SLF001
        # A stop over a dead JVM breaks off half-way: these are the class attributes it leaves behind.
        server = getattr(self.context, "_accumulatorServer", None)
        with suppress(Exception):
            if server is not None:
                server.shutdown()
        with suppress(Exception):
            gateway.shutdown()
        with context._lock:  # noqa: SLF001
            context._active_spark_context = None  # noqa: SLF001
            context._gateway = None  # noqa: SLF001
            context._jvm = None  # noqa: SLF001
        session._instantiatedSession = None  # noqa: SLF001
        session._activeSession = None  # noqa: SLF001


def _quieten(context: SparkContext) -> None:
    """A JVM that ends breaks connections, and PySpark writes tracebacks about that to our terminal."""
    log = get_logger(part="spark")
    server: Any = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: log.debug("connection of the accumulator server torn")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_of_py4j)  # where Py4J writes some of its errors


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in record.pathname
