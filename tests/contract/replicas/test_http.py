"""Replicas over HTTP: a SQLite node and a Postgres node, with their own folders, keys and servers."""

from __future__ import annotations

import http.client
import json
import socket
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from evermark.cli.main import app
from evermark.errors import ConfigError, DeniedError, FormatError, UnreachableError
from evermark.replicas.auth import Party, new_key
from evermark.replicas.client import HttpPeer
from evermark.replicas.exchange import Peer
from evermark.replicas.meetings import Meetings, Synced
from evermark.replicas.node import ReplicaNode, ReplicaService, now_ms
from evermark.replicas.server import THREADS
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings
from evermark.replicas.sqlite import SqliteStore
from evermark.secrets import Secret
from evermark.testing.answer_times import median_s_of_answers
from evermark.testing.until import until

COLUMNS = "(id bigint primary key, what text, amount double precision, paid boolean, raw {bytes})"
ROW = "insert into orders values ({key}, '{text}', 0.1, true, {raw})"


class Scene:
    """`lite` and `pg`: two nodes that know each other; neither serves yet."""

    def __init__(self, folder: Path, dsn: str, stack: ExitStack) -> None:
        self.lite_db = folder / "lite.db"
        with closing(sqlite3.connect(self.lite_db)) as connection:
            connection.execute(f"create table orders {COLUMNS.format(bytes='blob')}")
        self.pg = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.pg.execute(f"create table orders {COLUMNS.format(bytes='bytea')}")
        self.key, self._stack = new_key(), stack
        self.folders = {}
        for name, store, peer in (("lite", str(self.lite_db), "pg"), ("pg", dsn, "lite")):
            self.folders[name] = ReplicaFolder(folder / name)
            peers = {peer: PeerSettings(self.key)}
            self.folders[name].save(ReplicaSettings("shop-1", name, Secret(store), peers=peers))
            replica = ReplicaNode(self.folders[name]).claimed()
            replica.store.install("orders", None, now_ms())
            replica.store.close()

    def serve(self, name: str, every_s: float = 3600.0) -> ReplicaService:
        service = ReplicaService(ReplicaNode(self.folders[name]), "127.0.0.1", 0, every_s)
        service.start()
        self._stack.callback(service.stop)
        other = "pg" if name == "lite" else "lite"
        known = self.folders[other].load().peers[name]
        self.folders[other].add_peer(name, replace(known, url=f"http://127.0.0.1:{service.server.port}"))
        return service

    def write(self, name: str, sql: str) -> None:
        if name == "pg":
            self.pg.execute(sql)
            return
        with closing(sqlite3.connect(self.lite_db, timeout=30)) as connection, connection:
            connection.execute(sql)

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        sql = "select id, what, amount, paid, raw from orders order by id"
        if name == "pg":
            found = self.pg.execute(sql).fetchall()
        else:
            with closing(sqlite3.connect(self.lite_db, timeout=30)) as connection:
                found = connection.execute(sql).fetchall()
        return [(*row[:3], bool(row[3]), bytes(row[4])) for row in found]


@pytest.fixture
def scene(tmp_path: Path, pg_dsn: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, pg_dsn, stack)


def run(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["replica", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_r14_sqlite_and_postgres_become_equal_over_http(scene: Scene) -> None:
    """GIVEN rows of every kind on both WHEN they meet once THEN both have all, and digests say so."""
    scene.write("lite", ROW.format(key=1, text="ü", raw="x'00ff'"))
    scene.write("pg", ROW.format(key=2, text="on pg", raw="decode('beef', 'hex')"))
    scene.serve("pg")
    data = scene.folders["lite"].path
    code, said, _ = run("sync", "--data", data, "--json")
    done = json.loads(said)[0]
    assert code == 0 and (done["taken"], done["pushed"]) == (1, 1)
    assert scene.rows("lite") == scene.rows("pg") and len(scene.rows("pg")) == 2
    assert run("diff", "pg", "--data", data)[0] == 0
    scene.pg.execute("begin; set local evermark.applying = '1'; update orders set what = 'hidden' where id = 1; commit")
    code, said, _ = run("diff", "pg", "--data", data, "--json")
    assert code == 3 and json.loads(said) == [{"table": "orders", "row": "1", "where": "both, but not alike"}]


def test_r9_what_was_collected_and_how_large_tables_are_is_measured(tmp_path: Path) -> None:
    """GIVEN events that are old, and a deleted row WHEN a node serves THEN its metrics say what it has collected, and
    what is left."""
    path = tmp_path / "only.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (id integer primary key)")
    folder = ReplicaFolder(tmp_path / "only")
    folder.save(ReplicaSettings("shop-1", "only", Secret(str(path))))
    replica = ReplicaNode(folder).claimed()
    replica.store.install("orders", None, now_ms())
    replica.store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("insert into orders values (1), (2)")
        connection.execute("delete from orders where id = 1")
        connection.execute('update "orders_Events" set timestamp = 1')
    service = ReplicaService(ReplicaNode(folder), "127.0.0.1", 0, 3600.0)

    def measured(name: str, what: str) -> float | None:
        return service.metrics.registry.get_sample_value(f"evermark_replica_{name}", {"table": "orders", "what": what})

    service.start()
    try:
        until(lambda: measured("table_rows", "tombstones") is not None, "the first turn of upkeep", timeout_s=60)
        assert (measured("collected_total", "events"), measured("collected_total", "tombstones")) == (3, 1)
        assert [measured("table_rows", what) for what in ("rows", "events", "tombstones")] == [1, 0, 0]
    finally:
        service.stop()


def test_r10_a_node_whose_events_were_deleted_by_hand_is_repaired_by_the_command_that_the_error_names(
    scene: Scene,
) -> None:
    """GIVEN events that somebody deleted WHEN a peer asks for them THEN the error says what to run; after that the peer
    has all."""
    scene.serve("pg")
    for key in range(3):
        scene.write("pg", ROW.format(key=key, text="a", raw="decode('02', 'hex')"))
    scene.pg.execute('delete from "orders_Events" where origin_seq = 2')
    lite, pg = (("--data", scene.folders[name].path) for name in ("lite", "pg"))
    code, _, said = run("sync", *lite)
    assert code == 1 and "evermark replica gc --as-collected orders" in said
    code, _, said = run("gc", "--as-collected", "orders", *pg)
    assert code == 0 and "up to 2 count as collected" in said
    assert run("sync", *lite)[0] == 0
    assert scene.rows("lite") == scene.rows("pg") and len(scene.rows("pg")) == 3
    assert "no event is missing" in run("gc", "--as-collected", "orders", *pg)[2]
    assert "is not replicated" in run("gc", "--as-collected", "other", *pg)[2]


def test_r8_an_answer_that_is_too_long_is_not_read_and_the_next_one_is(scene: Scene) -> None:
    """GIVEN an answer of more bytes than it may have THEN it is an error, and what is asked next is answered."""
    scene.serve("pg")
    node = ReplicaNode(scene.folders["lite"])
    replica = node.claimed()
    peer = node.peer("pg", replica)
    with pytest.raises(FormatError, match="more than 10 bytes"):
        peer._ask("standing", b"{}", bytes_max=10)
    assert set(peer.standing().floors) == {"orders"}
    peer.close()
    replica.store.close()


def test_r11_a_late_peer_takes_a_snapshot_over_http(scene: Scene) -> None:
    """GIVEN a table with rows from before WHEN a peer meets it THEN it takes a snapshot, in chunks."""
    node = ReplicaNode(scene.folders["pg"])
    replica = node.claimed()
    scene.pg.execute("create table notes (id text primary key, n numeric)")
    scene.pg.execute("insert into notes select 'k' || i, i / 4.0 from generate_series(1, 300) i")
    replica.store.install("notes", None, now_ms())
    replica.store.close()
    scene.write("lite", "create table notes (id text primary key, n numeric)")
    scene.serve("pg")
    data = scene.folders["lite"].path
    assert run("init", "--data", data, "--table", "notes")[0] == 0
    code, said, _ = run("sync", "--data", data, "--json")
    assert code == 0 and json.loads(said)[0]["snapshots"] == 1
    assert run("diff", "pg", "--data", data)[0] == 0
    code, said, _ = run("list", "--data", data, "--json")
    assert {each["table"]: each["rows"] for each in json.loads(said)["tables"]} == {"notes": 300, "orders": 0}


def test_changes_are_pushed_as_they_are_made(scene: Scene) -> None:
    """GIVEN two nodes that serve WHEN either side's rows change THEN the other has them soon, without a meeting."""
    scene.serve("pg")
    scene.serve("lite")
    scene.serve("pg")  # once more, so that it knows where the other listens
    for key in range(5):
        scene.write("lite", ROW.format(key=key, text="a", raw="x'01'"))
        scene.write("pg", ROW.format(key=100 + key, text="b", raw="decode('02', 'hex')"))
    until(lambda: len(scene.rows("pg")) == len(scene.rows("lite")) == 10, "each has the other's rows", timeout_s=60)


def test_an_answer_is_not_held_back_for_a_word_of_the_peer(scene: Scene) -> None:
    """GIVEN a peer that asks again and again over one connection THEN no answer waits the 40 ms after which a client
    says at last that it has the head."""
    assert median_s_of_answers(scene.serve("lite").server.port, "/livez") < 0.03


def test_r12_strangers_get_nothing(scene: Scene) -> None:
    """GIVEN a wrong key, another cluster, or no signature WHEN asking THEN the answer is a refusal and no more."""
    service = scene.serve("pg")
    lite = scene.folders["lite"]
    good = lite.load()
    for wrong in (
        replace(good, peers={"pg": replace(good.peers["pg"], key=new_key())}),
        replace(good, cluster="shop-2"),
    ):
        lite.save(wrong)
        node = ReplicaNode(lite)
        replica = node.open()
        with pytest.raises(DeniedError, match="refuses us"):
            replica.meetings.sync(node.peer("pg", replica))
        replica.store.close()
    url = f"http://127.0.0.1:{service.server.port}/v1/replica/hello"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=10)
    assert refused.value.code == 401
    assert scene.key.reveal() not in repr(good) + str(vars(good))


def test_errors_name_what_is_wrong(scene: Scene, tmp_path: Path) -> None:
    """GIVEN no folder, no peer, no server, a bad table THEN each command says what, and what to do, with code 1."""
    data = scene.folders["lite"].path
    for words, said in (
        (("list", "--data", tmp_path / "none"), "there is no replica"),
        (("sync", "nobody", "--data", data), "is no peer"),
        (("diff", "pg", "--data", data), "has no url"),
        (("init", "--data", data, "--table", "missing"), "there is no table"),
        (("init", "--data", tmp_path / "new", "--name", "x"), "needs a name, a cluster and a store"),
    ):
        code, out, err = run(*words)
        assert code == 1 and said in err and "hint:" in err, (words, out, err)
    node = ReplicaNode(scene.folders["lite"])
    scene.folders["lite"].add_peer("pg", PeerSettings(scene.key, "http://127.0.0.1:1"))
    node = ReplicaNode(scene.folders["lite"])
    replica = node.open()
    with pytest.raises(UnreachableError, match="does not answer"):
        replica.meetings.sync(node.peer("pg", replica))
    replica.store.close()
    with pytest.raises(ConfigError, match="twice the skew"):
        replace(node.settings, retention="1m", safety="1m")


def test_r2_a_restored_database_goes_on_under_a_new_origin(scene: Scene) -> None:
    """GIVEN a SQLite file that is put back from a copy WHEN the node starts THEN it takes a new origin, gets back what
    it had sent, and loses nothing of either."""
    scene.write("lite", ROW.format(key=1, text="before", raw="x'01'"))
    copy = scene.lite_db.with_suffix(".copy")
    with closing(sqlite3.connect(scene.lite_db)) as live, closing(sqlite3.connect(copy)) as other:
        live.backup(other)
    scene.serve("pg")
    data = scene.folders["lite"].path
    scene.write("lite", ROW.format(key=2, text="sent, then forgotten", raw="x'02'"))
    assert run("sync", "--data", data)[0] == 0
    origin = json.loads(run("list", "--data", data, "--json")[1])["origin"]
    for suffix in ("-wal", "-shm"):
        scene.lite_db.with_name(scene.lite_db.name + suffix).unlink(missing_ok=True)
    copy.replace(scene.lite_db)
    assert run("list", "--data", data)[0] == 0
    scene.write("lite", ROW.format(key=3, text="after", raw="x'03'"))
    assert run("sync", "--data", data)[0] == 0
    assert json.loads(run("list", "--data", data, "--json")[1])["origin"] != origin
    assert scene.rows("lite") == scene.rows("pg")
    assert [row[0] for row in scene.rows("pg")] == [1, 2, 3]


def test_a_folder_is_bound_to_a_store_that_can_be_opened(scene: Scene, tmp_path: Path) -> None:
    """GIVEN an `init` with a wrong store WHEN it is run again with the right one THEN it works; with a third it is
    refused, and so is a url that is none. A new key leaves the url."""
    data = tmp_path / "new"
    words = ("init", "--data", data, "--name", "new", "--cluster", "shop-1", "--table", "orders")
    code, _, said = run(*words, "--store", tmp_path / "wrong.db")
    assert code == 1 and "there is no SQLite file" in said
    assert run(*words, "--store", scene.lite_db)[0] == 0
    assert ReplicaFolder(data).load().store.reveal() == str(scene.lite_db.resolve())
    code, _, said = run(*words, "--store", tmp_path / "third.db")
    assert code == 1 and "another store" in said
    for url in ("http://h:99999", "http://[::1", "nothttp", "http://u:hidden-word@127.0.0.1:1"):
        code, _, said = run("add", "pg", "--data", data, "--url", url)
        assert code == 1 and "is no url" in said and "hidden-word" not in said
    assert run("add", "pg", "--data", data, "--url", "http://pg:1")[0] == 0
    assert run("add", "pg", "--data", data, "--key", "k" * 40)[0] == 0
    known = ReplicaFolder(data).load().peers["pg"]
    assert (known.url, known.key.reveal()) == ("http://pg:1", "k" * 40)


def test_texts_with_nul_come_whole_by_a_snapshot(scene: Scene, tmp_path: Path) -> None:
    """GIVEN a text with NUL in a SQLite table with rows WHEN another SQLite node takes a snapshot THEN it is whole."""
    stores = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.db"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("create table notes (id integer primary key, what text)")
            if name == "one":
                connection.execute("insert into notes values (1, ?)", ["a\0b"])
        stores.append(SqliteStore(path))
        stores[-1].renew(f"{name}.000000000001aaaaaaaa")
        stores[-1].install("notes", None, now_ms())
    with stores[0].snapshot("notes", 10) as (cut, lists):
        rows = list(lists)
    stores[1].merge("notes", cut, lambda: iter(rows), now_ms())
    assert stores[1].connection.execute("select what from notes").fetchall() == [("a\0b",)]
    for store in stores:
        store.close()


def test_an_unexpected_error_ends_no_thread(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a meeting that fails as nobody foresaw WHEN serving THEN the next meeting is held all the same."""
    scene.serve("pg")
    fails = [KeyError("unforeseen")]
    sync = Meetings.sync

    def failing(self: Meetings, peer: Peer) -> Synced:
        if fails:
            raise fails.pop()
        return sync(self, peer)

    monkeypatch.setattr(Meetings, "sync", failing)
    scene.write("lite", ROW.format(key=1, text="a", raw="x'01'"))
    scene.serve("lite")
    until(lambda: len(scene.rows("pg")) == 1, "the row is there in spite of it", timeout_s=60)
    assert not fails


def test_what_is_written_while_a_meeting_ends_is_pushed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a change that is made when a meeting has exchanged all, and is not over yet THEN it does not wait for the
    next meeting, which may be long in coming."""
    scene.serve("pg")
    sync, written = Meetings.sync, []

    def late(self: Meetings, peer: Peer) -> Synced:
        done = sync(self, peer)
        if not written:
            written.append(1)
            scene.write("lite", ROW.format(key=1, text="late", raw="x'01'"))
        return done

    monkeypatch.setattr(Meetings, "sync", late)
    scene.serve("lite")
    until(lambda: len(scene.rows("pg")) == 1, "the late row is there", timeout_s=60)


def test_a_node_whose_database_cut_its_connections_answers_again(scene: Scene) -> None:
    """GIVEN a node that serves, each thread with a connection of its own WHEN Postgres ends them all THEN a peer is
    told that the database cannot be reached, which is tried again, and is answered as soon as it can be."""
    scene.serve("pg")
    node = ReplicaNode(scene.folders["lite"])
    replica = node.claimed()
    with closing(node.peer("pg", replica)) as peer, closing(replica.store):
        for _ in range(2 * THREADS):
            peer.standing()
        scene.pg.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'evermark replica' and datname = current_database()"
        )
        failed = 0
        for _ in range(4 * THREADS):
            try:
                peer.standing()
            except UnreachableError:
                failed += 1
        assert 1 <= failed <= THREADS


@pytest.mark.parametrize(("status", "expected"), [(502, UnreachableError), (503, UnreachableError), (404, DeniedError)])
def test_a_node_that_is_away_behind_its_proxy_does_not_answer(status: int, expected: type[Exception]) -> None:
    """GIVEN a proxy that answers for a node, without its signature WHEN it says that there is no node behind it THEN
    the node cannot be reached, which is tried again; another answer is not the peer's, and is refused."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", "11")
            self.end_headers()
            self.wfile.write(b"Bad Gateway")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        party = Party("shop-1", "lite", "pg", new_key())
        peer = HttpPeer(f"http://127.0.0.1:{proxy.server_port}", party, dict, now_ms)
        with closing(peer), pytest.raises(expected):
            peer.standing()
        proxy.shutdown()


def test_r12_a_stranger_is_refused_before_anything_is_kept_of_its_request(scene: Scene) -> None:
    """GIVEN a stranger that says how large its request will be, and sends no more WHEN its head names no peer, another
    cluster, or a time long ago THEN it is refused at once."""
    port = scene.serve("pg").server.port
    good = {"cluster": "shop-1", "to": "pg", "node": "lite", "time": str(now_ms()), "nonce": "n", "signature": "\xe9"}
    for wrong in ({"cluster": "shop-2"}, {"to": "lite"}, {"node": "nobody"}, {"time": "1"}):
        head = "".join(f"evermark-{name}: {value}\r\n" for name, value in (good | wrong).items())
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            asked = f"POST /v1/replica/hello HTTP/1.1\r\nhost: pg\r\ncontent-length: 100000000\r\n{head}\r\n"
            connection.sendall(asked.encode("latin-1"))
            assert b" 401 " in connection.recv(1000)
    refused = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {f"evermark-{name}": value.encode("latin-1") for name, value in good.items()}
    refused.request("POST", "/v1/replica/hello", b"{}", headers)
    assert refused.getresponse().status == 401
    refused.close()


def test_r2_a_database_that_is_put_back_under_a_node_that_serves_is_opened_anew(scene: Scene) -> None:
    """GIVEN a node that serves and dials WHEN its SQLite file is replaced by a backup THEN it goes on with the new
    file, under a new origin, in all its threads: what it had sent comes back, and later changes arrive. While the file
    is away the node says that its database cannot be reached."""
    scene.serve("pg")
    lite = scene.serve("lite")
    scene.write("lite", ROW.format(key=1, text="before", raw="x'01'"))
    until(lambda: len(scene.rows("pg")) == 1, "the first row", timeout_s=60)
    copy = scene.lite_db.with_suffix(".copy")
    with closing(sqlite3.connect(scene.lite_db)) as live, closing(sqlite3.connect(copy)) as other:
        live.backup(other)
    scene.write("lite", ROW.format(key=2, text="sent, then forgotten", raw="x'02'"))
    until(lambda: len(scene.rows("pg")) == 2, "the second row", timeout_s=60)
    node = ReplicaNode(scene.folders["pg"])
    replica = node.open()
    with closing(node.peer("lite", replica)) as peer, closing(replica.store):
        before = {peer.standing().hello.said.origin for _ in range(2 * THREADS)}
        for suffix in ("-wal", "-shm"):
            scene.lite_db.with_name(scene.lite_db.name + suffix).unlink(missing_ok=True)
        copy.replace(scene.lite_db)
        scene.write("lite", ROW.format(key=3, text="after", raw="x'03'"))
        until(lambda: [row[0] for row in scene.rows("pg")] == [1, 2, 3], "what is written later", timeout_s=60)
        until(lambda: scene.rows("lite") == scene.rows("pg"), "what had been sent", timeout_s=60)
        after = set()
        for _ in range(4 * THREADS):
            with suppress(UnreachableError):  # the first that a thread is asked
                after.add(peer.standing().hello.said.origin)
        assert len(before) == len(after) == 1 and before != after
    scene.lite_db.rename(copy)
    asked = HttpPeer(f"http://127.0.0.1:{lite.server.port}", Party("shop-1", "pg", "lite", scene.key), dict, now_ms)
    with closing(asked):
        for _ in range(2 * THREADS):
            with pytest.raises(UnreachableError):
                asked.standing()
