"""`evermark up`: everything started in order, until told to stop, and given back in the reverse order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from evermark.app.build import Deployment, log_place, open_deployment
from evermark.app.checking import file_warnings
from evermark.app.inspect import check_at
from evermark.app.lane import EndTimes, LaneWork
from evermark.app.lanes import Lanes, shared_out
from evermark.app.member import Membership, leases_of
from evermark.app.scratch import ScratchKeeper, scratch_folder
from evermark.app.serving import served
from evermark.app.source_lag import Lags
from evermark.app.state_supervisor import StateSupervisor
from evermark.cluster.fence import DELIVER_LEASE, is_of
from evermark.config import Config, load
from evermark.config.spark_master import cores_max, master_in_effect, require_master, require_slots
from evermark.delivery.model import SourcePartition
from evermark.delivery.tail.wish import Wish, no_spark
from evermark.embedded.java import ensure_java
from evermark.error_policy import Action, action_after, backoff_s
from evermark.errors import (
    BusyError,
    ConfigError,
    EngineError,
    EvermarkError,
    GapError,
    UnreachableError,
    known,
    of_kind,
)
from evermark.log.pieces import LogPiece
from evermark.observe.finding import for_source
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.secrets import SecretBox
from evermark.server.http import Server
from evermark.server.tokens import Tokens
from evermark.sources.base import Limit, Source
from evermark.spark.channel import Channel

if TYPE_CHECKING:
    from evermark.spark.engine import Engine

# How long threads may take to let go after their own time-outs; then the process ends anyway, and loses nothing.
_JOIN_GRACE_S = 5.0
# The same when Spark has died: nothing can be flushed any more, and another instance may be waiting for the leases.
_LET_GO_S = 15.0
_LOOK_EVERY_S = 0.5
_HURRY_S = 1.0
# Spark that ran this long before it died was healthy: the death counts as a first.
_WELL_AFTER_S = 60.0
_RESTART_BACKOFF_MAX_S = 30.0
_STATE_WAIT_S = 30.0
_STATE_PAUSE_S = 1.0
_CHECKS_AT_ONCE = 8
_SAID_MAX = 20  # sources that a line of the log names
_NO_EXECUTOR = "Spark has no executor: its cluster is full, or its workers are gone"


class StuckError(EngineError):
    """A thread could not be ended, and may hold a lease: only the end of the process frees it."""


class Pipeline:
    """A deployment that runs. `run` returns when it was stopped by a signal or by `stop`."""

    def __init__(self, config: Config, sources: Mapping[str, Source] | None = None, limit: Limit | None = None) -> None:
        self.config = config
        self._given = dict(sources or {})
        self._limit = limit or Limit()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._log = get_logger(deployment=config.name)
        self.board = HealthBoard()
        self.metrics = Metrics()
        self.port: int | None = None
        self.started = threading.Event()
        self._dead_thread: str | None = None
        self._starting_jvm: subprocess.Popen[bytes] | None = None
        self._said_stopping = False
        self._on_taken: Callable[[], None] = lambda: None
        self._engine: Engine | None = None
        self._membership: Membership | None = None
        self._leaving: threading.Thread | None = None
        self._refuse_requests: Callable[[], None] = lambda: None

    @classmethod
    def from_file(cls, path: str | Path, sources: Mapping[str, Source] | None = None) -> Pipeline:
        return cls(load(Path(path)), sources)

    def stop(self) -> None:
        """Ask for a clean end; a second time, for a quick one."""
        if self._stopping.is_set():
            self._hurry.set()
        self.board.is_stopping = True
        self._stopping.set()

    def run(self) -> None:
        os.environ["EVERMARK_PID"] = str(os.getpid())  # where a failpoint in a worker finds the process to end
        if not self.config.sources and not self._given:
            raise ConfigError("sources: there is none", hint="name at least one; `evermark init` writes an example")
        spark = self.config.spark
        require_master(spark.master, spark.conf)
        require_slots(spark.master, spark.conf, spark.lanes, spark.cores)
        for _, unreachable in self.config.not_for_a_cluster():
            raise unreachable
        log_place(self.config)  # before Spark: its processes inherit how a bucket is reached
        hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        try:
            self._listen_for_signals()
            self._run()
        except KeyboardInterrupt:  # by PySpark's own handler, in the moment before ours is back
            self._say_stopping()
        finally:
            threading.excepthook = hook
        self._log.info("stopped")

    def _run(self) -> None:
        tokens = Tokens(self.config.server.tokens)
        server = Server(self.config.server.host, self.config.server.port, self.board, self.metrics, tokens)
        server.start()
        self._refuse_requests = server.refuse
        self.port = server.port
        with ExitStack() as stack:
            stack.callback(server.stop)
            stack.callback(lambda: self._say_stopping() if self._stopping.is_set() else None)
            where = "the embedded Postgres" if self.config.state.dsn is None else "Postgres"
            self._log.info("starting", step="state", waits_for=where)
            first = _Starting(self._start_engine, self._kill_jvm)  # beside State: each takes seconds
            stack.callback(first.give_up)
            deployment = self._opened()
            if deployment is None:
                return
            stack.callback(deployment.close)
            lags = Lags(deployment, self.board)
            stack.callback(lags.stop)
            for warning in deployment.warnings:
                self._log.warning(warning)
            for key, text in file_warnings(self.config, deployment.log_root):
                self._log.warning(f"{key}: {text}")
            lags.start()
            names = sorted(deployment.sources)
            self._log.info("starting", step="sources", checks=names[:_SAID_MAX], count=len(names))
            self._check_sources(deployment)
            if deployment.embedded is not None:
                stack.callback(StateSupervisor(deployment.embedded).stop)
            stack.enter_context(served(server, deployment, self._match))
            self._on_taken = server.tail.wake
            self._membership = Membership(
                deployment.state, deployment.leases, deployment.holder, deployment.lease_limits
            )
            self._membership.on_seen = lambda: self.board.others_seen(deployment.lease_limits.ttl_s)
            self._membership.on_left = lambda leases: self._say_left(leases, deployment)
            self._membership.start()
            stack.callback(self._membership.stop)
            self._run_with_spark(deployment, first)

    def _say_left(self, leases: frozenset[str], deployment: Deployment) -> None:
        sources = {name for name in deployment.sources if any(is_of(lease, name) for lease in leases)}
        self.board.left(frozenset(sources), delivery=DELIVER_LEASE in leases)

    def _opened(self) -> Deployment | None:
        """A server that may come up a little later is waited for, but not for ever: one that is being started refuses
        connections as one does that will never be there. Why is said at once, and when it changes. None: told to stop
        first.
        """
        give_up_at, said = time.monotonic() + _STATE_WAIT_S, ""
        while not self._stopping.is_set():
            try:
                return open_deployment(self.config, self._given)
            except EvermarkError as error:
                if self._stopping.is_set():
                    break  # Ctrl-C may have reached a program that was starting the server: no failure of its own
                passes = isinstance(error, (UnreachableError, BusyError)) and self.config.state.dsn is not None
                if not passes or time.monotonic() > give_up_at:
                    raise
                if error.message != said:
                    left_s = max(0, round(give_up_at - time.monotonic()))
                    self._log.warning("state does not answer yet; it is waited for", error=error, at_most_s=left_s)
                said = error.message
            self._stopping.wait(_STATE_PAUSE_S)
        self._log.info("stopping", during="start")
        return None

    def _check_sources(self, deployment: Deployment) -> None:
        """Before the slow part: an error that only a person can mend ends the process at once. Others are retried."""
        names = sorted(deployment.sources)
        with ThreadPoolExecutor(max(1, min(len(names), _CHECKS_AT_ONCE)), thread_name_prefix="check") as pool:
            found = list(pool.map(lambda name: _trouble_of(deployment, name), names))
        for name, error in zip(names, found, strict=True):
            if error is None:
                continue
            if isinstance(error, GapError):
                # A gap is repaired, or shown until a person decides: neither needs a restart.
                self._log.error("the source is not as we left it", source=name, error=error)
            elif action_after(error, 1) is Action.RETRY:
                self._log.warning("the source cannot be read yet; it is tried until it can", source=name, error=error)
            else:
                hint = for_source(error.hint, name) if len(names) > 1 else error.hint
                raise of_kind(error.kind, f"sources.{name}: {error.message}", hint) from error

    def _run_with_spark(self, deployment: Deployment, first: _Starting) -> None:
        """Run on one Spark after another until told to stop: a JVM that dies takes nothing with it that matters."""
        deaths, start = 0, first.taken
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                engine, channel = start()
            except Exception as error:
                if self._stopping.is_set():
                    self._say_stopping()
                    return
                if not self.started.is_set():
                    raise
                reason = str(error)
            else:
                if (ended := self._run_on(engine, channel, deployment)) is None:
                    return
                reason = ended
            start = self._start_engine
            deaths = 1 if time.monotonic() - began > _WELL_AFTER_S else deaths + 1
            wait_s = backoff_s(deaths - 2, max_s=_RESTART_BACKOFF_MAX_S) if deaths > 1 else 0.0
            self._log.error("Spark and all that runs on it are started again", reason=reason, in_s=wait_s)
            self._stopping.wait(wait_s)

    def _start_engine(self) -> tuple[Engine, Channel]:
        from evermark.spark.engine import Engine
        from evermark.spark.session import make_context, warm_up

        self._log.info("starting", step="spark", master=self.config.spark.master, takes="about ten seconds")
        began = time.monotonic()
        os.environ["JAVA_HOME"] = str(ensure_java(self.config.data / "java"))
        scratch = scratch_folder(self.config.name)
        channel, cluster = self._channel()
        try:
            if self._stopping.is_set():
                raise EngineError("told to stop before Spark was started")
            context = make_context(
                f"evermark {self.config.name}",
                self.config.spark.master,
                scratch,
                self.config.spark.conf,
                noise=self.config.data / "spark.log",
                finds_formats=False,
                daemon="evermark.app.daemon",
                python=self.config.spark.python,
                cluster=cluster,
                on_jvm=self._on_jvm,
            )
        finally:
            self._starting_jvm = None
            self._listen_for_signals()  # PySpark has put a handler of its own in place
        warm_up(context)
        self._log.info("Spark runs", started_in_s=round(time.monotonic() - began, 1))
        return Engine(context, on_cluster=cluster is not None), channel

    def _channel(self) -> tuple[Channel, Mapping[str, str] | None]:
        """Where lanes will find this process; and what Spark is told of it when they are on other machines."""
        spark, key, storage = self.config.spark, self.config.secrets.key, self.config.storage
        cores = cores_max(spark.master, spark.conf, spark.cores, spark.lanes)
        if key is None or cores is None:
            return Channel(), None
        from evermark.spark.cluster import cluster_settings, driver_address

        address = driver_address(master_in_effect(spark.master, spark.conf), spark.conf)
        channel = Channel(address, spark.conf.get("spark.driver.bindAddress"))
        names = [ref.name for ref in (storage.access_key, storage.secret_key) if ref is not None and ref.kind == "env"]
        return channel, cluster_settings(address, cores, SecretBox(key), names)

    def _run_on(self, engine: Engine, channel: Channel, deployment: Deployment) -> str | None:
        """Read and deliver until told to stop (None), or until this Spark cannot be used any more (returns why)."""
        scratch = scratch_folder(self.config.name)
        keeper = ScratchKeeper(scratch)
        shutdown = self.config.reliability.shutdown
        end = EndTimes(shutdown.flush_timeout.total_seconds(), shutdown.checkpoint_timeout.total_seconds())
        spark = self.config.spark
        cores = cores_max(spark.master, spark.conf, spark.cores, spark.lanes)
        works = shared_out(deployment.for_lanes(), self._limit, end, spark.lanes, cores)
        lane_s = self.config.spark.lane.total_seconds()
        lanes = Lanes(
            engine.context, channel, works, deployment.box, self.board, self.metrics, lane_s, self._on_taken, self._able
        )
        self._dead_thread = None  # before the first thread starts: none that ends is overlooked
        self._engine = engine
        try:
            if self._membership is not None:
                self._membership.tell(lanes.share)
            lanes.start()
            self.board.engine_runs()
            self._log.info("up", listen=f"{self.config.server.host}:{self.port}", pid=os.getpid())
            self.started.set()
            trouble = self._watch(engine, lanes)
            if trouble is None:
                self._shut_down(lanes, end.in_all_s + _JOIN_GRACE_S)
            else:
                self.board.engine_lost(trouble)
                self._leave()
                engine.kill()
                self._let_go(lanes, trouble)
            return trouble
        finally:
            self._engine = None
            channel.close()
            keeper.stop()
            engine.stop()
            shutil.rmtree(scratch, ignore_errors=True)

    def _able(self, works: Sequence[LaneWork]) -> None:
        """Lanes for these works are ready: other instances may count on it."""
        if self._membership is not None:
            if self._leaving is not None:
                self._leaving.join()  # of the Spark before this one
            leases = [leases_of({n: w.parts.sources[n] for n in w.sources}, [w.shard]) for w in works]
            self._membership.able(frozenset().union(*leases))

    def _leave(self) -> None:
        """Others take what is let go of from here on; the lanes are told to stop, not that their share is nothing. In a
        thread: State may not answer, and stopping does not wait for it.
        """
        if self._membership is not None:
            self._membership.tell(lambda _: None)
            able = self._membership.able
            self._leaving = threading.Thread(target=lambda: able(frozenset()), name="leaving", daemon=True)
            self._leaving.start()

    def _match(self, place: SourcePartition, piece: LogPiece, wish: Wish) -> set[tuple[int, str]]:
        """Which events of a piece match, for the live tail, where only Spark can say."""
        if self._engine is None:
            return no_spark(place, piece, wish)
        from evermark.spark.session import sql_session
        from evermark.spark.tail import wanted_marks

        return wanted_marks(sql_session(), place, piece, wish)

    def _watch(self, engine: Engine, lanes: Lanes) -> str | None:
        """None when told to stop; when Spark or a thread that must not end has ended, returns why."""
        before: Mapping[str, str] = {}
        while not self._stopping.wait(_LOOK_EVERY_S):
            trouble = engine.trouble() or self._dead_thread
            if trouble is None and not engine.on_cluster:  # which may be full for as long as others want it
                trouble = lanes.stuck()
            names = self.config.sources.keys() | self._given.keys()
            stalled = dict.fromkeys(names, _NO_EXECUTOR) if engine.idle() else lanes.stalled()
            self._say_stalled({name: why for name, why in stalled.items() if name in before})
            before = stalled  # one look proves nothing on a busy machine
            if trouble is None and lanes.any_ended():
                trouble = "the thread of a lane ended"
            if trouble is not None:
                self.metrics.engine_restarts.inc()
                return trouble
        return None

    def _say_stalled(self, stalled: Mapping[str, str]) -> None:
        if stalled != self.board.stalled:
            self.board.stalled = stalled
            if stalled:
                reasons = ", ".join(sorted(set(stalled.values())))
                self._log.warning("sources are not read", sources=sorted(stalled), reason=reasons)
            else:
                self._log.info("Spark runs the lanes again")

    def _let_go(self, lanes: Lanes, trouble: str) -> None:
        """The lanes ended with their JVM, and with them their leases. Raises when a thread of ours does not end."""
        self._log.error("letting go of all leases", reason=trouble)
        lanes.stop()
        if not lanes.join(_LET_GO_S):
            raise StuckError(
                f"{trouble}, and the lanes did not end within {_LET_GO_S:g} s: the process ends",
                hint="its leases run out within seconds; its supervisor has to start it again (docs/playbook.md)",
            )

    def _shut_down(self, lanes: Lanes, wait_s: float) -> None:
        """Refuse requests, stop consuming, flush, checkpoint, let go of the leases; a second signal does not wait."""
        self._say_stopping(within_s=wait_s)
        self._refuse_requests()
        self._leave()
        lanes.stop()
        deadline = time.monotonic() + wait_s
        while not lanes.join(0.1) and time.monotonic() < deadline:
            if self._hurry.is_set():
                lanes.hurry()
                deadline = min(deadline, time.monotonic() + _HURRY_S)

    def _say_stopping(self, **more: float) -> None:
        """Once, wherever the signal came."""
        if not self._said_stopping:
            self._said_stopping = True
            self._log.info("stopping", **more)

    def _listen_for_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop()
        self._kill_jvm()

    def _on_jvm(self, process: subprocess.Popen[bytes]) -> None:
        self._starting_jvm = process
        if self._stopping.is_set():
            self._kill_jvm()

    def _kill_jvm(self) -> None:
        """Of a Spark that is being started, which nobody waits for any more: its start fails when its JVM is gone."""
        if (process := self._starting_jvm) is not None:
            with suppress(OSError):  # it may have ended by itself
                process.kill()

    def _on_thread_error(self, failed: threading.ExceptHookArgs) -> None:
        """An uncaught error has ended a thread: its work is not done any more."""
        name = failed.thread.name if failed.thread is not None else "?"
        error = f"{failed.exc_type.__name__}: {failed.exc_value}"
        if name.startswith("Thread-"):  # none of ours, which all have names: PySpark's, when its JVM is gone
            self._log.debug("a thread of a library ended", thread=name, error=error)
            return
        self._log.error("a thread ended by an error", thread=name, error=error)
        self._dead_thread = f"the thread {name} ended: {error}"


class _Starting:
    """The first Spark, while it is being started in a thread of its own."""

    def __init__(self, start: Callable[[], tuple[Engine, Channel]], kill: Callable[[], None]) -> None:
        self._kill = kill
        self._found: Future[tuple[Engine, Channel]] = Future()
        self._taken = False

        def run() -> None:
            try:
                self._found.set_result(start())
            except BaseException as error:  # noqa: BLE001 - raised where Spark is needed
                self._found.set_exception(error)

        threading.Thread(target=run, name="start Spark", daemon=True).start()

    def taken(self) -> tuple[Engine, Channel]:
        """Waits for it; raises what its start raised. To be called once."""
        self._taken = True
        return self._found.result()

    def give_up(self) -> None:
        """If nobody has taken it. Its JVM may not be there yet."""
        while not self._taken:
            self._kill()
            with suppress(TimeoutError):
                self._taken = self._found.exception(_LOOK_EVERY_S) is not None or self._ended()

    def _ended(self) -> bool:
        engine, channel = self._found.result()
        channel.close()
        engine.kill()
        engine.stop()
        return True


def _trouble_of(deployment: Deployment, name: str) -> EvermarkError | None:
    """Why a source cannot be read on from where it was left."""
    source = deployment.sources[name]

    def checkpointed() -> dict[int, str]:
        known = deployment.checkpoints.list(name)
        return {p: known[p].position for p in source.partitions() if p in known}

    try:
        check_at(source, checkpointed)
    except Exception as error:  # noqa: BLE001 - a source of the user's own may raise anything; the others start
        return known(error)
    return None
