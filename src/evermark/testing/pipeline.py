"""The real thing under test: `evermark up` as a process that can be killed, a shop that writes, receivers that record.

Used by the fault tests and `make chaos`. What is checked at the end is always the same: the log holds every committed
event exactly once, and every receiver's handler saw every event it should have seen, exactly once after its dedup.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import psycopg
import pyarrow.parquet as pq

from evermark.delivery.webhook.signing import new_secret
from evermark.embedded import postmaster
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.log.read import LogReader
from evermark.storage import Place, readable
from evermark.testing import ready_folders
from evermark.testing.commands import REAL, Commands
from evermark.testing.listener import Failing, Listener, Record
from evermark.testing.until import until

# How long a condition is waited for: a busy machine is no failure. How quick the product is, `make bench` says.
PATIENCE_S = 300.0

TOKEN = "token-of-whoever-looks-at-a-scene"

_CONFIG = """\
version: 1
name: scene
data: {data}
server: {{listen: "127.0.0.1:0", tokens: {{scene: "${{SCENE_TOKEN}}"}}}}
sources:
  {source}: {settings}
subscriptions:
"""
_SUBSCRIPTION = """\
  {name}: {{url: "{url}", secret: "${{SCENE_SECRET}}", allow_networks: [127.0.0.0/8]{more}}}
"""


@dataclass(frozen=True)
class Ledger:
    """What was counted when a scene was over. An event is delivered when every receiver's handler has seen it."""

    produced: int = 0
    taken: int = 0
    delivered: int = 0
    doubled: int = 0  # in the log, or at a handler
    lost: int = 0  # missing from the log, or at a handler

    @property
    def has_each_once(self) -> bool:
        """Every event that was produced was taken once, and handled once."""
        return self == Ledger(self.produced, self.produced, self.produced)

    def __add__(self, other: Ledger) -> Ledger:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Ledger(*(mine + theirs for mine, theirs in pairs))

    def __str__(self) -> str:
        return " ".join(f"{name}={count}" for name, count in vars(self).items())


class Instance:
    """One `evermark up` process. Its log is read from the beginning, or from the last `forget` on."""

    def __init__(self, config: Path, env: Mapping[str, str], log: Path, commands: Commands = REAL) -> None:
        self.log = log
        self._read_from = 0
        with log.open("ab") as out:
            self.process = commands.start(["up", "-c", str(config)], env, out)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """All of it sleeps, as the machine would: the driver, Spark and the lanes, but not the State it may share."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid)
            for process in (mine, *mine.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if process.name() != "postgres":
                        process.send_signal(number)

    def terminate(self, timeout_s: float = PATIENCE_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def interrupt(self, timeout_s: float = PATIENCE_S) -> int:
        """Ctrl-C: the terminal signals every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout_s)

    def died(self) -> bool:
        return self.process.poll() is not None

    def forget(self) -> None:
        """Scenes that share this instance ask what it logged since they began."""
        self._read_from = len(self.log.read_text())

    def text(self) -> str:
        return self.log.read_text()[self._read_from :]

    def said(self, text: str) -> bool:
        return text in self.text()

    def listens_on(self) -> str | None:
        """Its address, once it is up. The last line may be half written."""
        written = self.log.read_text().splitlines(keepends=True)
        lines = (json.loads(line) for line in written if line.startswith("{") and line.endswith("\n"))
        return next((line["listen"] for line in lines if line["event"] == "up"), None)

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of an answer over HTTP; (0, "") before it is up. The address is in its own log."""
        listen = self.listens_on()
        if listen is None:
            assert not self.died(), self.log.read_text()[-3000:]
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://{listen}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as unwell:
            return unwell.code, unwell.read().decode()

    def health(self, partition: str) -> dict[str, Any]:
        """What /health says of a partition; nothing when it does not know it."""
        code, text = self.ask("/health")
        found: dict[str, Any] = json.loads(text)["partitions"].get(partition, {}) if code else {}
        return found


class Writer(threading.Thread):
    """Inserts orders in transactions of changing size until told to stop; a steady trickle, not a load test.

    Each transaction costs the instance that reads it a micro-batch, about 30 ms of processor.
    """

    def __init__(self, dsn: str, pause_s: float = 0.1) -> None:
        super().__init__(name="writer", daemon=True)
        self._dsn = dsn
        self._pause_s = pause_s
        self._done = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._dsn) as conn:
            n = 0
            while not self._done.wait(self._pause_s):
                n += 1
                with conn.transaction():
                    for _ in range(1 + n % 8):
                        conn.execute("insert into public.orders (total) values (%s)", (n,))

    def finish(self) -> None:
        self._done.set()
        self.join()


class Stage(ABC):
    """A deployment with one source, and receivers in this process. `with` starts the receivers and ends all."""

    source: str  # its name
    sections: str = ""  # more of the file
    embeds_state: bool = True  # the file names no other
    commands: ClassVar[Commands] = REAL  # fault tests have a cheaper way

    def __init__(self, folder: Path, receivers: Mapping[str, Failing | None], **options: str) -> None:
        self.folder = folder
        self._secret = new_secret()
        self.handled: dict[str, Counter[str]] = {name: Counter() for name in receivers}
        self.order: dict[str, list[str]] = {name: [] for name in receivers}
        self.receivers = {
            name: Listener(secrets=[self._secret], failing=failing, on_record=self._recorder(name), records_max=1)
            for name, failing in receivers.items()
        }
        self._options = options
        self.config = folder / "evermark.yaml"
        self.log_root: Place = folder / "data" / "log"
        self.env = {**os.environ, "SCENE_SECRET": self._secret, "SCENE_TOKEN": TOKEN}
        self._instances: list[Instance] = []

    @abstractmethod
    def settings(self) -> str:
        """Of the source, as YAML on one line."""

    def prepare(self) -> None:  # noqa: B027 - not every source needs something
        """Before the first start, when the file is written."""

    @abstractmethod
    def committed(self) -> list[str]:
        """Ids of all events at the source."""

    def __enter__(self) -> Self:
        text = _CONFIG.format(data=self.folder / "data", source=self.source, settings=self.settings())
        for name, listener in self.receivers.items():
            listener.start()
            more = f", {self._options[name]}" if name in self._options else ""
            text += _SUBSCRIPTION.format(name=name, url=listener.url, more=more)
        self.config.write_text(text + self.sections)
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self._instances:
            if not instance.died():
                instance.wake()
                instance.kill()
        for listener in self.receivers.values():
            listener.stop()
        # The embedded state outlives a killed instance on purpose; here no other will come back for it.
        state = EmbeddedPostgres(self._state_folder)
        if postmaster.running(state.data) is not None:
            with state:  # its last user stops the server
                pass

    @property
    def _state_folder(self) -> Path:
        return self.folder / "data" / "state"

    def _lay_state(self, commands: Commands) -> None:
        """What is not the real command, where that is cheaper, need not make a data folder either."""
        if commands is not REAL and self.embeds_state and not self._state_folder.exists():
            ready_folders.lay(self._state_folder)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        self._lay_state(self.commands)
        done = self.commands.run([*words, "-c", str(self.config)], self.env)
        if check and done.returncode != 0:
            raise AssertionError(f"evermark {' '.join(words)}: {done.stderr}")
        return done

    def up(self, failpoint: str | None = None, commands: Commands | None = None) -> Instance:
        env = {**self.env, "EVERMARK_FAILPOINT": failpoint} if failpoint else self.env
        self._lay_state(commands or self.commands)
        instance = Instance(self.config, env, self.folder / f"up-{len(self._instances)}.log", commands or self.commands)
        self._instances.append(instance)
        return instance

    def logged(self) -> list[str]:
        files = LogReader(self.log_root / self.source).files()
        rows = [row for f in files for row in pq.read_table(readable(f.path), columns=["event_id", "op"]).to_pylist()]
        return [row["event_id"] for row in rows if row["op"] != "schema"]

    def said(self, text: str) -> int:
        """How often the instances of this scene logged `text`."""
        return sum(instance.log.read_text().count(text) for instance in self._instances)

    def delivered(self, name: str) -> int:
        return len(self.handled[name])

    def wait_delivered(self, more_than: int, timeout_s: float = PATIENCE_S) -> None:
        first = next(iter(self.handled))
        until(lambda: self.delivered(first) > more_than, f"{first} has more than {more_than}", timeout_s=timeout_s)

    def accept_all(self, refusing: str) -> None:
        """A receiver that refused some events takes all from now on, also those that were refused before."""
        self.receivers[refusing].failing = None
        wanted = set(self.committed())

        def are_tried_and_taken() -> bool:
            # Asked for again: an event that is being tried just now, and refused, goes on by its schedule, in minutes.
            self.run("delivery", "retry", "--subscription", refusing)
            return refusing not in self.missing(wanted)

        until(are_tried_and_taken, f"{refusing} has what it refused")

    def check_complete(self, timeout_s: float = PATIENCE_S) -> Ledger:
        """Wait until every receiver has everything, then require exactness everywhere; what was counted."""
        committed = self.committed()
        wanted = set(committed)
        try:
            until(lambda: not self.missing(wanted), "every receiver has every event", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"of {len(wanted)} events are missing: {self.missing(wanted)}") from error
        logged = Counter(self.logged())
        assert set(logged) == wanted, f"log lacks {len(wanted - set(logged))}, adds {len(set(logged) - wanted)}"
        assert max(logged.values(), default=1) == 1, "the log holds an event twice"
        for name, seen in self.handled.items():
            assert set(seen) == wanted, f"{name} got events that were never committed"
            assert max(seen.values(), default=1) == 1, f"the handler of {name} ran twice for one event"
        everywhere = wanted.intersection(*self.handled.values())
        doubled = sum(sum(seen.values()) - len(seen) for seen in (logged, *self.handled.values()))
        return Ledger(len(wanted), len(logged), len(everywhere), doubled, len(wanted - (everywhere & set(logged))))

    def missing(self, wanted: set[str]) -> dict[str, int]:
        """How many events each receiver that is not complete still lacks."""
        lacks = {name: len(wanted - set(seen)) for name, seen in self.handled.items()}
        return {name: count for name, count in lacks.items() if count}

    def _recorder(self, name: str) -> Callable[[Record], None]:
        def record(record: Record) -> None:
            if not record.duplicate:
                self.handled[name][record.event.id] += 1
                self.order[name].append(record.event.position)

        return record


class Scene(Stage):
    """A shop's database with an outbox."""

    source = "shop"

    def __init__(
        self, folder: Path, dsn: str, receivers: Mapping[str, Failing | None], slots: int = 1, **options: str
    ) -> None:
        super().__init__(folder, receivers, **options)
        self.dsn = dsn
        self._slots = slots
        self.env["SHOP_DSN"] = dsn

    def settings(self) -> str:
        return f'{{type: postgres, dsn: "${{SHOP_DSN}}", tables: [public.orders], slots: {self._slots}}}'

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
        self.run("source", "install")

    def committed(self) -> list[str]:
        """Ids of all events in the shop's outbox."""
        with psycopg.connect(self.dsn) as conn:
            return [str(row[0]) for row in conn.execute("select id from pgstream.events where op <> 'control'")]


def some_of(names: Sequence[str], count: int, seed: int) -> list[str]:
    """So many of the names, in their order; others with another seed. A start takes nine seconds of processor, so tests
    die at a few failpoints of each run, and `make chaos` at all of them."""
    return sorted(random.Random(seed).sample(names, count), key=names.index)


def died_by_itself(instance: Instance, timeout_s: float = PATIENCE_S) -> None:
    """A failpoint ended it."""
    until(instance.died, "the failpoint was reached", timeout_s=timeout_s)
    assert instance.process.returncode == -signal.SIGKILL, instance.log.read_text()[-2000:]
