"""`evermark replica`: tables in several databases that stay equal."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import (
    EXIT_FAILED,
    EXIT_WRONG,
    noun,
    say,
    seconds,
    set_by_signals,
    show,
    show_error,
    show_fields,
    show_json,
    warn,
)
from evermark.cli.options import JsonOption
from evermark.errors import ConfigError, EvermarkError
from evermark.replicas.auth import new_key
from evermark.replicas.ranges import Ranges, gaps, held_as_json
from evermark.secrets import Secret

if TYPE_CHECKING:
    from evermark.replicas.replica import Replica

app = noun("Replicas: tables in several databases that stay equal.")

DataOption = Annotated[Path, typer.Option("--data", envvar="EVERMARK_REPLICA", help="The node's folder.")]
_DATA = Path("replica")


@app.command()
def init(
    data: DataOption = _DATA,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="This node's name, unique in its cluster.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="ID", help="The cluster's id, the same on every node.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="STORE", help="A SQLite file, a Postgres DSN, or env:NAME for either.")
    ] = None,
    schema: Annotated[str | None, typer.Option(metavar="SCHEMA", help="Postgres: where the tables are.")] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="Replicate TABLE, or only some columns: TABLE:a,b,c.")
    ] = None,
    new_origin: Annotated[bool, typer.Option("--new-origin", help="Go on under a new origin, as a copy must.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a database a node of a cluster, or add tables.

    Rows that are in the tables already are replicated as well.
    """
    from evermark.replicas.node import ReplicaNode, now_ms, open_store
    from evermark.replicas.settings import ReplicaFolder, ReplicaSettings, resolved

    folder = ReplicaFolder(data)
    if not folder.exists():
        if name is None or cluster is None or store is None:
            raise ConfigError("a new replica needs a name, a cluster and a store", hint="--name, --cluster and --store")
        settings = ReplicaSettings(cluster, name, Secret(resolved(store)), schema)
        open_store(settings).close()  # a folder is bound to its store for good: not to one that cannot be opened
        folder.save(settings)
    node = ReplicaNode(folder)
    if (store is not None and resolved(store) != resolved(node.settings.store.reveal())) or schema not in (
        None,
        node.settings.schema,
    ):
        raise ConfigError(
            f"{data} is the replica {node.settings.name}, of another store or schema",
            hint="leave --store and --schema out, or choose another folder with --data",
        )
    if name not in (None, node.settings.name) or cluster not in (None, node.settings.cluster):
        raise ConfigError(f"{data} is the replica {node.settings.name}", hint="choose another folder with --data")
    replica = node.claimed()
    if new_origin:
        node.claim(replica.node, anew=True)
    for text in table or []:
        wanted, _, columns = text.partition(":")
        replica.store.install(wanted, columns.split(",") if columns else None, now_ms())
        say(f"{wanted} is replicated")
        _warn_of_columns(replica, wanted)
    tables = {each.name: each.as_json() for each in replica.store.tables().values()}
    document = {"node": node.settings.name, "origin": replica.store.identity()[0], "tables": tables}
    show_fields(document | {"tables": tables if as_json else list(tables)}, as_json=as_json)


def _warn_of_columns(replica: Replica, table: str) -> None:
    if found := replica.store.left_out(table):
        warn(f"{table}: not replicated: {', '.join(found)}; all columns that are wanted go into --table {table}:a,b,c")


@app.command()
def add(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="The peer's name.")],
    data: DataOption = _DATA,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Where it listens; without one it dials us.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="EVERMARK_REPLICA_KEY", help="The key that the two share; made if not given."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add a peer, or change its url.

    On the peer, add this node with the same key.
    """
    from evermark.replicas.node import ReplicaNode
    from evermark.replicas.settings import PeerSettings, ReplicaFolder

    folder = ReplicaFolder(data)
    known = folder.load().peers.get(peer)
    made = new_key() if key is None else Secret(key)
    shown = made.reveal() if key is None and known is None else None
    if known is not None:
        settings = folder.add_peer(peer, replace(known, url=url or known.url, key=known.key if key is None else made))
    else:
        settings = folder.add_peer(peer, PeerSettings(made, url))
    node = ReplicaNode(folder)
    replica = node.claimed()
    replica.store.close()
    if shown is not None:
        say(f"on {peer} run, with this node's url: evermark replica add {settings.name} --url URL --key KEY")
    show_fields({"peer": peer, "url": settings.peers[peer].url, "key": shown}, as_json=as_json)


@app.command()
def remove(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="The peer's name.")],
    data: DataOption = _DATA,
) -> None:
    """Take a peer out. If it was ever met, it is evicted."""
    from evermark.replicas.node import ReplicaNode
    from evermark.replicas.settings import ReplicaFolder

    folder = ReplicaFolder(data)
    folder.remove_peer(peer)
    replica = ReplicaNode(folder).claimed()
    was_met = replica.upkeep.remove_member(peer)
    replica.store.close()
    say(f"{peer} is {'evicted' if was_met else 'removed'}; take it out on the other nodes as well")


@app.command("list")
def list_(data: DataOption = _DATA, as_json: JsonOption = False) -> None:
    """Show this node, its tables and its members."""
    from evermark.replicas.node import ReplicaNode, now_ms
    from evermark.replicas.settings import ReplicaFolder

    node = ReplicaNode(ReplicaFolder(data))
    replica = node.claimed()
    store = replica.store
    evicted, now = store.evicted(), now_ms()
    tables: list[dict[str, Any]] = []
    for name, table in store.tables().items():
        given_up, floors = store.lost(name), replica.upkeep.floors(name)
        missing = gaps(store.held(name), given_up)
        columns, count = list(table.columns), sum(ranges.count for ranges in missing.values())
        _warn_of_columns(replica, name)
        found = {"table": name, **asdict(store.counts(name)), "columns": columns, "missing": count}
        numbers = {"gaps": held_as_json(missing), "given_up": held_as_json(given_up)}
        tables.append(found | numbers | {"holding": list(floors.holding)})
    members: list[dict[str, Any]] = []
    for name, member in sorted(store.members().items()):
        lag = None
        if member.said is not None:
            lag = sum(
                end - start + 1
                for table in store.tables()
                for origin, ranges in store.held(table).items()
                for start, end in (ranges - member.said.held.get(table, {}).get(origin, ranges - ranges))
            )
        url = node.settings.peers[name].url if name in node.settings.peers else None
        state = "never met" if member.said is None else "evicted" if member.origin in evicted else "member"
        silent = None if member.said is None else round((now - member.heard_ms) / 1000)
        members.append({"name": name, "state": state, "url": url, "lacks": lag, "silent_s": silent})
    quarantined = [asdict(each) for each in store.quarantined()]
    origin = store.identity()[0]
    if as_json:
        about = {"node": replica.node.name, "cluster": node.settings.cluster, "origin": origin}
        show_json(about | {"tables": tables, "members": members, "quarantined": quarantined})
        return
    say(f"{replica.node.name} of {node.settings.cluster}, origin {origin}")
    show(tables, ("table", "rows", "events", "tombstones", "missing", "holding"), empty="no table is replicated")
    show(members, ("name", "state", "url", "lacks", "silent_s"), empty="no peer: evermark replica add PEER")
    for each in quarantined:
        warn(f"{each['table']}: event {each['seq']} of {each['origin']} is quarantined: {each['reason']}")


@app.command()
def serve(
    data: DataOption = _DATA,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: any.")] = "127.0.0.1:8440",
    every: Annotated[str, typer.Option(metavar="DURATION", help="Meet each peer so often.")] = "5s",
    as_json: JsonOption = False,
) -> None:
    """Serve peers, push changes, meet them, collect."""
    from evermark.observe.logging import set_up_logging
    from evermark.replicas.node import ReplicaNode, ReplicaService
    from evermark.replicas.settings import ReplicaFolder

    set_up_logging()
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen[:60]!r} is no address", hint="for example 127.0.0.1:8440")
    service = ReplicaService(
        ReplicaNode(ReplicaFolder(data)), host or "127.0.0.1", int(port), seconds(every, "--every")
    )
    done = threading.Event()
    with set_by_signals(done):
        service.start()
        if as_json:
            show_json({"listening": f"{host}:{service.server.port}", "port": service.server.port})
            sys.stdout.flush()
        say(f"{service.node.settings.name} serves on {host}:{service.server.port}")
        done.wait()
        service.stop()


@app.command()
def sync(
    peers: Annotated[list[str] | None, typer.Argument(metavar="[PEER]...", help="Which; all with a url.")] = None,
    data: DataOption = _DATA,
    as_json: JsonOption = False,
) -> None:
    """Meet peers once: both then hold what either held.

    Exit code 1 if a meeting failed, or a peer still lacks rows.
    """
    from evermark.replicas.node import ReplicaNode
    from evermark.replicas.settings import ReplicaFolder

    node = ReplicaNode(ReplicaFolder(data))
    replica = node.claimed()
    found, failed = [], False
    for name in peers or node.dialled():
        try:
            found.append(asdict(replica.meetings.sync(node.peer(name, replica))))
        except EvermarkError as error:
            failed = True
            show_error(error)
    for each in found:
        for table, why in each["skipped"].items():
            warn(f"{each['peer']}: {table} was not synced: {why}")
        for table, why in each["unsent"].items():
            failed = True
            warn(f"{each['peer']} still lacks rows of {table}: {why}")
    columns = ("peer", "taken", "applied", "duplicates", "pushed", "quarantined", "snapshots")
    show(found, columns, as_json=as_json, empty="" if failed else "no peer has a url")
    if failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def diff(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="The peer to compare with.")],
    data: DataOption = _DATA,
    table: Annotated[list[str] | None, typer.Option(metavar="TABLE", help="Which; all if not given.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Name so many rows of a table.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Name the rows that differ from those of a peer.

    Digests of key ranges are compared. Exit code 3 if rows differ.
    """
    from evermark.replicas.diff import differences
    from evermark.replicas.node import ReplicaNode
    from evermark.replicas.settings import ReplicaFolder

    node = ReplicaNode(ReplicaFolder(data))
    replica = node.claimed()
    link = node.peer(peer, replica)
    rows: list[dict[str, Any]] = []
    for name in table or list(replica.store.tables()):
        found, whole = differences(replica.node, link, name, limit)
        for each in found:
            where = "both, but not alike" if each.here and each.there else "here only" if each.here else "there only"
            rows.append({"table": name, "row": each.record_id, "where": where})
        rows += [
            {"table": name, "row": row, "where": "here, not captured"} for row in replica.store.uncaptured(name, limit)
        ]
        if not whole:
            warn(f"{name}: more than {limit} rows differ")
    show(rows, ("table", "row", "where"), as_json=as_json, empty=f"no difference; {link.bytes_moved} bytes were moved")
    if rows:
        raise typer.Exit(EXIT_WRONG)


@app.command()
def snapshot(
    data: DataOption = _DATA,
    table: Annotated[list[str] | None, typer.Option(metavar="TABLE", help="Make a snapshot of TABLE.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make snapshots, and list the snapshots there are.

    Peers get a snapshot by themselves when they need it.
    """
    from evermark.replicas.node import ReplicaNode, now_ms
    from evermark.replicas.settings import ReplicaFolder
    from evermark.replicas.snapshots import Snapshots

    folder = ReplicaFolder(data)
    replica = ReplicaNode(folder).claimed()
    kept = Snapshots(folder.snapshots)
    for name in table or []:
        kept.make(replica.store, replica.node.table(name).name, now_ms())
    rows = [
        {
            "snapshot": each.id,
            "table": each.table,
            "rows": sum(chunk.rows for chunk in each.chunks),
            "bytes": sum(chunk.size for chunk in each.chunks),
            "chunks": len(each.chunks),
            "digest": each.digest,
        }
        for each in kept.list()
    ]
    show(rows, ("snapshot", "rows", "bytes", "chunks", "digest"), as_json=as_json, empty="no snapshots")


def _lost(text: str) -> tuple[str, str, Ranges]:
    found = re.fullmatch(r"([^:]+):([^:]+):([0-9]{1,18})-([0-9]{1,18})", text)
    if not found or not 0 < int(found[3]) <= int(found[4]):
        raise ConfigError(
            f"--give-up {text[:120]!r} is not TABLE:ORIGIN:FROM-TO", hint="`evermark replica list --json` has the gaps"
        )
    return found[1], found[2], Ranges(((int(found[3]), int(found[4])),))


@app.command()
def gc(
    data: DataOption = _DATA,
    evict: Annotated[
        list[str] | None, typer.Option(metavar="PEER", help="Give up PEER: it must come back by a snapshot.")
    ] = None,
    give_up: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE:ORIGIN:FROM-TO", help="Wait no more for events that nobody has, as after a restore."
        ),
    ] = None,
    as_collected: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="Go on without events of TABLE that were deleted by hand."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Collect what every member has and is old enough."""
    from evermark.replicas.node import ReplicaNode
    from evermark.replicas.settings import ReplicaFolder

    replica = ReplicaNode(ReplicaFolder(data)).claimed()
    if evict:
        replica.upkeep.evict(evict)
    for text in give_up or []:
        table, origin, numbers = _lost(text)
        found = replica.upkeep.give_up(table, origin, numbers)
        say(f"{table}: {sum(end - start + 1 for start, end in found)} events of {origin} are given up")
    for table in as_collected or []:
        reached = replica.upkeep.count_as_collected(table).floors
        for origin, last in reached.items():
            say(f"{table}: events of {origin} up to {last} count as collected; who lacks them takes a snapshot")
        if not reached:
            say(f"{table}: no event is missing")
    rows = []
    for name, done in replica.upkeep.collect().items():
        holding = list(replica.upkeep.floors(name).holding)
        rows.append({"table": name, "events": done.events, "tombstones": done.tombstones, "holding": holding})
    show(rows, ("table", "events", "tombstones", "holding"), as_json=as_json, empty="no table is replicated")
