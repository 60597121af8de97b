"""`evermark demo`: the main job on embedded parts, with the pipeline killed twice while orders flow.

A shop writes orders into a table of its own Postgres. Evermark takes every change of the table and delivers it to
three receivers, one of which fails now and then. Beside it people talk in rooms on a block node, and two bots listen;
while the pipeline is dead the first time, hundreds of messages are sealed into blocks behind new snapshots. Then the
replication slot is thrown away under it, and the first quarter of all orders is asked for once more.

The demo passes only if the log has every change that the shop committed, but for those that were overwritten while
there was no slot; if what the receivers wrote down, after their own dedup, equals the log and what the bots were to
hear; and if the replay reached their handlers. In a third act three peers keep a table equal, one away for a while and
another set back to a backup: every row that was written must be with each of them, under one digest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from evermark.app import demo_chat, demo_replicas
from evermark.app.demo_book import Compared, Logged, compare
from evermark.app.demo_chat import EVERMARK
from evermark.app.demo_shop import ORDERS, STREAM, Shop, throw_slot_away
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import EvermarkError
from evermark.event import Op
from evermark.log.read import LogReader
from evermark.state.connection import schema_for

_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - made up, for this demo's loopback receivers
_DRAIN_S = 180.0
_UP_S = 180.0
_END_S = 30.0
_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 3.0  # what takes a process, or all of the log
_SAY_EVERY_S = 15.0  # of a wait that goes on
# A replay leaves the processor to what is live, and to other programs on this machine.
_REPLAY_BESIDE_S = 120.0
_REPLAY_S = 300.0
_DEPLOYMENT = "demo"

_CONFIG = """\
version: 1
name: {name}
data: {data}
server: {{listen: "127.0.0.1:0"}}
sources:
  shop: {{type: postgres, mode: tables, dsn: "${{SHOP_DSN}}", tables: [public.orders]}}
{chat}
subscriptions:
  billing:
    {{url: "http://127.0.0.1:{billing}/", secret: "${{DEMO_SECRET}}", allow_networks: [127.0.0.0/8],
     streams: [public.orders]}}
  shipping:
    {{url: "http://127.0.0.1:{shipping}/", secret: "${{DEMO_SECRET}}", allow_networks: [127.0.0.0/8],
     streams: [public.orders]}}
  big_deals:
    {{url: "http://127.0.0.1:{big_deals}/", secret: "${{DEMO_SECRET}}", allow_networks: [127.0.0.0/8],
     streams: [public.orders], where: "op = 'insert' and data.total > 50", bundle: 20}}
{bots}
"""

_RECEIVERS: dict[str, list[str]] = {
    "billing": [],
    "shipping": ["--fail", "503:2%", "--seed", "7"],
    "big_deals": [],
    **{bot: [] for bot in demo_chat.BOTS},
}
_TALK_WHILE_DEAD = 150
_BIG_DEAL = Decimal(50)


@dataclass(frozen=True)
class Ledger:
    """What went in and what came out. `lost` counts changes that the log should have and does not, and events that a
    receiver should have and does not; `overwritten` the changes of an order that were followed by another one before
    the lost slot had been replaced: they are in no WAL and in no row."""

    produced: int
    taken: int
    overwritten: int
    delivered: int
    duplicates_dropped: int
    parked: int
    lost: int

    def line(self) -> str:
        return "ledger " + " ".join(f"{name}={value}" for name, value in vars(self).items())


@dataclass
class Handled:
    """What a receiver's handler saw, from the receiver's own record."""

    ids: set[str] = field(default_factory=set)
    replayed: set[str] = field(default_factory=set)
    duplicates: int = 0


def handled_by(name: str, record: Path) -> Handled:
    found = Handled()
    seen: set[str] = set()
    for line in record.read_text().splitlines(keepends=True) if record.exists() else ():
        if not line.endswith("\n"):
            break  # being written just now
        row = json.loads(line)
        if row["duplicate"]:
            found.duplicates += 1
        elif row["delivery"] in seen:
            raise EvermarkError(f"the handler of {name} saw {row['delivery']} twice")
        else:
            seen.add(row["delivery"])
            (found.ids if row["delivery"] == row["id"] else found.replayed).add(row["id"])
    return found


class Demo:
    def __init__(self, folder: Path, seconds: float, rate: float, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._seconds = seconds
        self._rate = rate
        self._say = say
        self._records = {name: folder / f"{name}.jsonl" for name in _RECEIVERS}
        self._env = dict(os.environ)
        self._replayed: tuple[datetime, datetime] | None = None
        self._repaired_at = 0  # so many changes the shop had made when the lost slot had been replaced
        self._pipeline: subprocess.Popen[bytes] | None = None  # the last one that was started

    def run(self) -> Ledger:
        self._say("starting a Postgres for the shop, a block node for the chat, and a receiver for each subscription")
        with (
            EmbeddedPostgres(self.folder / "shop") as server,
            demo_chat.block_node(self.folder, self._env) as node,
            self._receivers() as ports,
        ):
            dsn = server.dsn()
            self._env |= {"SHOP_DSN": dsn, "DEMO_SECRET": _SECRET}
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(ORDERS)
            config = self.folder / "evermark.yaml"
            more = {"chat": demo_chat.SETTINGS.format(node=node), "bots": demo_chat.BOTS_SETTINGS.format(**ports)}
            config.write_text(_CONFIG.format(name=_DEPLOYMENT, data=self.folder / "data", **ports, **more))
            self._install(config)
            shop, chat = Shop(dsn, self._rate), demo_chat.Chat(node, self._rate / 10)
            chat.open_rooms()
            self._act(config, dsn, shop, chat)
            if shop.error is not None or chat.error is not None:
                raise EvermarkError(f"the shop could not write, or nobody could talk: {shop.error or chat.error}")
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("create database harbour")
            missing = demo_replicas.play(self.folder / "peers", server.dsn("harbour"), self._env, self._say)
            ledger = self._ledger(shop, chat)
            return replace(ledger, lost=ledger.lost + missing)

    def _act(self, config: Path, dsn: str, shop: Shop, chat: demo_chat.Chat) -> None:
        """Produce all the while; kill the pipeline twice; let it drain; stop it properly."""
        pipeline = self._up(config)
        try:
            shop.start()
            chat.start()
            self._say(f"the shop writes about {self._rate:.0f} changes a second; two bots listen to a chat")
            for strike in (1, 2):
                self._wait_for_growth()
                self._let_it_run(f"kill -9 number {strike}")
                pipeline.kill()
                pipeline.wait()
                self._say(f"kill -9 number {strike}: the pipeline is gone, the shop goes on")
                if strike == 1:
                    chat.talk(_TALK_WHILE_DEAD)
                    self._say(f"{2 * _TALK_WHILE_DEAD} messages are sealed into blocks, behind snapshots, unheard")
                time.sleep(self._seconds / 30)
                pipeline = self._up(config)
            self._wait_for_growth()
            self._let_it_run("the replication slot is thrown away")
            self._lose_the_slot(dsn, shop)
            self._replay(config, chat, shop)
            chat.finish()
            shop.finish()
            self._say("the shop is closed, the chat is quiet; draining")
            self._drain(shop, chat)
            pipeline.send_signal(signal.SIGTERM)
            code = pipeline.wait(timeout=60)
            self._say(f"the pipeline was stopped with SIGTERM and ended with code {code}")
            if code != 0:
                raise EvermarkError(f"the pipeline ended with code {code}", hint=f"see {self.folder / 'up.log'}")
        finally:
            chat.finish()
            shop.finish()
            _end(pipeline)

    def _let_it_run(self, until: str) -> None:
        self._say(f"deliveries arrive; {self._seconds / 3:.0f} s until {until}")
        time.sleep(self._seconds / 3)

    def _lose_the_slot(self, dsn: str, shop: Shop) -> None:
        throw_slot_away(dsn, f"evermark_{_DEPLOYMENT}_shop", shop)
        self._say("the replication slot is thrown away while orders flow")
        self._wait(lambda: "the gap is closed" in (self.folder / "up.log").read_text(), "the slot is repaired")
        self._repaired_at = len(shop.book)
        self._say("the table was compared with the log, and what differed was taken; a new slot reads on")

    def _replay(self, config: Path, *makers: demo_chat.Chat | Shop) -> None:
        """The first quarter of all that happened so far, once more."""
        times = [row.at for row in self._orders()]
        since, until = min(times), min(times) + (max(times) - min(times)) / 4
        window = ["--since", since.isoformat(), "--until", until.isoformat()]
        replay = self._ask(config, "start", *window, "--source", "shop")["id"]
        self._replayed = since, until
        self._say("evermark replay start --since … --until …: the first quarter is asked for once more")

        def done() -> bool:
            return bool(self._ask(config, "show", replay)["state"] == "done")

        try:
            self._wait(done, "the replay is done", _REPLAY_BESIDE_S, _ASK_EVERY_S)
            self._say("the replay is done; live deliveries went on meanwhile")
        except EvermarkError:
            self._require_pipeline()
            # A replay rests while fresh events flow. Where these take the whole machine, it has to be left alone.
            self._say("this machine is busy with what is live, which goes first: the shop closes for the replay")
            for maker in makers:
                maker.finish()
            self._wait(done, "the replay is done", _REPLAY_S, _ASK_EVERY_S)
            self._say("the replay is done")

    def _ask(self, config: Path, *words: str) -> dict[str, Any]:
        """What `evermark replay` answers."""
        command = [*EVERMARK, "replay", *words, "--json", "-c", str(config)]
        ran = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise EvermarkError(f"`evermark replay {words[0]}` failed: {ran.stderr.strip()}")
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer

    def _wait(
        self, condition: Callable[[], bool], what: str, seconds: float = _UP_S, every: float | None = None
    ) -> None:
        began = said = time.monotonic()
        while not condition():
            now = time.monotonic()
            self._require_pipeline()
            if now > began + seconds:
                raise EvermarkError(f"not within {seconds:.0f} s: {what}", hint=f"see {self.folder / 'up.log'}")
            if now > said + _SAY_EVERY_S:
                said = now
                self._say(f"  waiting until {what}: {now - began:.0f} s, of {seconds:.0f} s at most")
            time.sleep(_LOOK_EVERY_S if every is None else every)

    def _require_pipeline(self) -> None:
        if self._pipeline is not None and (code := self._pipeline.poll()) is not None:
            raise EvermarkError(f"the pipeline ended with code {code}", hint=f"see {self.folder / 'up.log'}")

    def _up(self, config: Path) -> subprocess.Popen[bytes]:
        self._say("starting `evermark up`; Spark takes 10 to 40 s to start")
        with (self.folder / "up.log").open("ab") as log:
            self._pipeline = subprocess.Popen(
                [*EVERMARK, "up", "-c", str(config)], env=self._env, stdout=log, stderr=log
            )
        return self._pipeline

    def _install(self, config: Path) -> None:
        command = [*EVERMARK, "source", "install", "shop", "-c", str(config)]
        ran = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise EvermarkError(f"`evermark source install` failed: {ran.stderr.strip()}")
        self._say("installed: a publication and a replication slot, nothing else in the shop's database")

    @contextmanager
    def _receivers(self) -> Iterator[dict[str, int]]:
        started: list[subprocess.Popen[bytes]] = []
        ports: dict[str, int] = {}
        env = {**self._env, "EVERMARK_SECRET": _SECRET}
        try:
            for name, options in _RECEIVERS.items():
                out = self.folder / f"{name}.log"
                record = ["--record", str(self._records[name])]
                command = [*EVERMARK, "listen", "--port", "0", "--json", *record, *options]
                with out.open("wb") as log:
                    started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
                ports[name] = _port_in(out)
            yield ports
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(timeout=20)

    def _handled(self, name: str) -> Handled:
        return handled_by(name, self._records[name])

    def _wait_for_growth(self) -> None:
        """Until something new was delivered: killing before that would prove nothing."""
        record = self._records["billing"]
        before = record.stat().st_size if record.exists() else 0
        self._wait(lambda: record.exists() and record.stat().st_size > before, "something new is delivered")

    def _drain(self, shop: Shop, chat: demo_chat.Chat) -> None:
        with suppress(EvermarkError):  # the ledger says what is missing
            self._wait(lambda: not self._compared(shop).lost, "the log has everything", _DRAIN_S, _ASK_EVERY_S)
            expected = _expected(self._orders()) | chat.owed
            all_there = "every receiver has everything"
            self._wait(lambda: all(expected[name] <= self._handled(name).ids for name in expected), all_there, _DRAIN_S)

    def _compared(self, shop: Shop) -> Compared:
        return compare(shop.book, self._orders(), self._repaired_at)

    def _ledger(self, shop: Shop, chat: demo_chat.Chat) -> Ledger:
        orders, heard = self._orders(), self._logged("chat")
        compared = self._compared(shop)
        if compared.made_up:
            raise EvermarkError(f"the log holds changes that were never made: {compared.made_up[:10]}")
        ids = [row.event_id for row in orders] + [row["event_id"] for row in heard]
        if len(ids) != len(set(ids)):
            raise EvermarkError("the log holds an event twice")
        messages = {row["event_id"] for row in heard}
        if messages - chat.taken:
            raise EvermarkError("the log holds messages of a room without a bot")
        expected = _expected(orders) | chat.owed
        handled = {name: self._handled(name) for name in expected}
        strangers = {name: handled[name].ids - expected[name] for name in expected}
        if any(strangers.values()):
            raise EvermarkError(f"receivers have events that the log does not have, or not for them: {strangers}")
        self._say(f"the bots heard {sum(len(expected[bot] & handled[bot].ids) for bot in demo_chat.BOTS)} messages")
        missing = sum(len(expected[name] - handled[name].ids) for name in expected)
        if self._replayed is not None:
            since, until = self._replayed
            window = _expected([row for row in orders if since <= row.at <= until])
            missing += sum(len(window[name] - handled[name].replayed) for name in window)
            self._say(f"replayed: {sum(len(ids) for ids in window.values())} deliveries, none taken for a duplicate")
        return Ledger(
            produced=len(shop.book) + len(chat.taken),
            taken=compared.taken + len(messages),
            overwritten=compared.overwritten,
            delivered=sum(len(found.ids) for found in handled.values()),
            duplicates_dropped=sum(found.duplicates for found in handled.values()),
            parked=self._parked(),
            lost=len(compared.lost) + len(chat.taken - messages) + missing,
        )

    def _logged(self, source: str, *columns: str) -> list[dict[str, Any]]:
        files = LogReader(self.folder / "data" / "log" / source).files()
        wanted = ["event_id", "op", *columns]
        rows = [row for each in files for row in pq.read_table(each.path, columns=wanted).to_pylist()]
        return [row for row in rows if row["op"] != Op.SCHEMA]

    def _orders(self) -> list[Logged]:
        """What the log says of the shop's table."""
        rows = self._logged("shop", "key", "event_time", "batch", "payload", "flags", "stream")
        return [_order(row) for row in rows if row["stream"] == STREAM]

    def _parked(self) -> int:
        with EmbeddedPostgres(self.folder / "data" / "state") as server, psycopg.connect(server.dsn()) as conn:
            row = conn.execute(f"select count(*) from {schema_for(_DEPLOYMENT)}.enqueued_messages").fetchone()
            return int(row[0]) if row else 0


def _order(row: Mapping[str, Any]) -> Logged:
    image = json.loads(row["payload"], parse_float=Decimal) if row["op"] != Op.DELETE else {}
    return Logged(
        event_id=row["event_id"],
        op=row["op"],
        order=int(row["key"]),
        number=int(image["change"]) if image else None,
        total=Decimal(image["total"]) if image else None,
        at=row["event_time"],
        batch=row["batch"],
        is_repaired="repaired" in (row["flags"] or ()),
    )


def _expected(orders: Iterable[Logged]) -> dict[str, set[str]]:
    """What each receiver of orders should have of these events."""
    rows = list(orders)
    everything = {row.event_id for row in rows}
    big = {row.event_id for row in rows if row.op == Op.INSERT and row.total is not None and row.total > _BIG_DEAL}
    return {"billing": everything, "shipping": everything, "big_deals": big}


def _end(pipeline: subprocess.Popen[bytes]) -> None:
    """By SIGTERM first: a pipeline that is killed leaves its embedded Postgres behind."""
    if pipeline.poll() is None:
        pipeline.terminate()
        try:
            pipeline.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            pipeline.kill()
            pipeline.wait()


def _port_in(log: Path) -> int:
    """The port a receiver says it listens on."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            try:
                found = json.loads(line).get("port")
            except ValueError:
                continue
            if found:
                return int(found)
        time.sleep(0.05)
    raise EvermarkError("a receiver did not start", hint=log.read_text()[-500:])


def run_demo(seconds: float, rate: float, keep: Path | None, say: Callable[[str], None]) -> int:
    """0 only if nothing was lost. The ledger is the last line on stdout."""
    folder = keep or Path(tempfile.mkdtemp(prefix="evermark-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: all processes of the demo are stopped
    try:
        ledger = Demo(folder, seconds, rate, say).run()
    except (EvermarkError, KeyboardInterrupt):
        say(f"what was left is in {folder}")
        raise
    sys.stdout.write(ledger.line() + "\n")
    good = ledger.lost == 0 and 0 < ledger.produced == ledger.taken + ledger.overwritten
    if good and keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not good:
        say(f"what was left is in {folder}")
    return 0 if good else 1
