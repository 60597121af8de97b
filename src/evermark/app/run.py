"""`evermark up`: everything started in order, until told to stop, and given back in the reverse order."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from evermark.app.build import Deployment, open_deployment
from evermark.app.checking import file_warnings
from evermark.app.delivering import DeliveryRunner
from evermark.app.ingesting import SourceRunner
from evermark.app.keeping import StateKeeper
from evermark.app.scratch import ScratchKeeper, scratch_folder
from evermark.app.serving import served
from evermark.config import Config, load
from evermark.config.spark_master import require_local_master
from evermark.delivery.sinks.webhook import WebhookSink
from evermark.embedded.java import ensure_java
from evermark.errors import ConfigError, EvermarkError, GapError, NotFoundError, of_kind
from evermark.observe.health import Board
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.server.http import Server
from evermark.server.tokens import Tokens
from evermark.sources.base import Limit, Source

# How long threads may take to let go after their own time-outs; then the process ends anyway, and loses nothing.
_JOIN_GRACE_S = 5.0


class Pipeline:
    """A deployment that runs. `run` returns when it was stopped by a signal or by `stop`."""

    def __init__(self, config: Config, sources: Mapping[str, Source] | None = None, limit: Limit | None = None) -> None:
        self.config = config
        self._given = dict(sources or {})
        self._limit = limit or Limit()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._log = get_logger(deployment=config.name)
        self.board = Board()
        self.metrics = Metrics()
        self.port: int | None = None
        self.started = threading.Event()

    @classmethod
    def from_file(cls, path: str | Path, sources: Mapping[str, Source] | None = None) -> Pipeline:
        return cls(load(Path(path)), sources)

    def stop(self) -> None:
        """Ask for a clean end; a second time, for a quick one."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def run(self) -> None:
        os.environ["EVERMARK_PID"] = str(os.getpid())  # where a failpoint in a worker finds the process to end
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
        if not self.config.sources and not self._given:
            raise ConfigError("sources: there is none", hint="name at least one; `evermark init` writes an example")
        require_local_master(self.config.spark.master, self.config.spark.conf, self.config.log_path)
        tokens = Tokens(self.config.server.tokens)
        server = Server(self.config.server.host, self.config.server.port, self.board, self.metrics, tokens)
        server.start()
        self.port = server.port
        try:
            deployment = open_deployment(self.config, self._given)
            try:
                for warning in deployment.warnings:
                    self._log.warning(warning)
                for key, text in file_warnings(self.config, deployment.log_root):
                    self._log.warning(f"{key}: {text}")
                self._check_sources(deployment)
                keeper = StateKeeper(deployment.embedded) if deployment.embedded is not None else None
                try:
                    with served(server, deployment):
                        self._run_with_spark(deployment)
                finally:
                    if keeper is not None:
                        keeper.stop()
            finally:
                deployment.close()
        finally:
            server.stop()

    def _check_sources(self, deployment: Deployment) -> None:
        """Before the slow part: what cannot work is said at once, and ends the process."""
        for name, source in deployment.sources.items():
            try:
                source.check(_checkpointed(deployment, name, source))
            except GapError as error:
                # What can be mended is, and what a person must decide is shown: neither needs a restart.
                self._log.error("the source is not as we left it", source=name, error=error)
            except EvermarkError as error:
                raise of_kind(error.kind, f"sources.{name}: {error.message}", error.hint) from error

    def _run_with_spark(self, deployment: Deployment) -> None:
        os.environ["JAVA_HOME"] = str(ensure_java(self.config.data / "java"))
        from evermark.spark.deliver import SparkDeliverer
        from evermark.spark.session import make_session, warm_up

        scratch = scratch_folder(self.config.name)
        spark = make_session(
            f"evermark {self.config.name}",
            self.config.spark.master,
            scratch,
            self.config.spark.conf,
            noise=self.config.data / "spark.log",
            finds_formats=False,
        )
        warm_up(spark)
        keeper = ScratchKeeper(scratch)
        sink = WebhookSink()
        delivery = DeliveryRunner(deployment, SparkDeliverer(spark, deployment.box), sink, self.board, self.metrics)
        runners = [
            SourceRunner(
                deployment,
                spark,
                name,
                scratch / "queries",
                self.board,
                self.metrics,
                on_span=delivery.on_span,
                least_cursors=delivery.least_cursors,
                limit=self._limit,
            )
            for name in deployment.sources
        ]
        try:
            delivery.start()
            for runner in runners:
                runner.start()
            self._log.info("up", listen=f"{self.config.server.host}:{self.port}", pid=os.getpid())
            self.started.set()
            self._stopping.wait()
            self._shut_down(runners, delivery)
        finally:
            keeper.stop()
            spark.stop()
            sink.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _shut_down(self, runners: list[SourceRunner], delivery: DeliveryRunner) -> None:
        """Stop consuming, flush, checkpoint, let go of the leases; a second signal does not wait."""
        limits = self.config.reliability.shutdown
        wait_s = limits.flush_timeout.total_seconds() + limits.checkpoint_timeout.total_seconds() + _JOIN_GRACE_S
        self._log.info("stopping", within_s=wait_s)
        for runner in runners:
            runner.stop()
        left = [r for r in runners if not self._joined(r, wait_s)]
        delivery.stop()
        if not self._joined(delivery, wait_s):
            self._log.warning("delivery did not end in time; what it had not settled is delivered again")
        if left:
            self._log.warning(
                "not ended in time; the next start resumes from the checkpoint", sources=[r.name for r in left]
            )
        self._log.info("stopped")

    def _joined(self, runner: SourceRunner | DeliveryRunner, wait_s: float) -> bool:
        waited = 0.0
        while waited < wait_s and not self._hurry.is_set():
            if runner.join(0.1):
                return True
            waited += 0.1
        return runner.join(0.0)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop()


def _checkpointed(deployment: Deployment, name: str, source: Source) -> dict[int, str]:
    found: dict[int, str] = {}
    for partition in source.partitions():
        with suppress(NotFoundError):
            found[partition] = deployment.checkpoints.load(name, partition).position
    return found
