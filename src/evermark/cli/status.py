"""`evermark status`: everything at one glance, whether an instance runs or not."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evermark.checkpoints.base import Checkpoint
from evermark.cli import backfill, replay
from evermark.cli.console import say, show, show_json
from evermark.cli.deployment import holder_in, opened, own_lease
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.cluster.base import LeaseRow
from evermark.errors import EvermarkError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.config import Config

_HEALTH_WAIT_S = 6.0  # an instance asks its sources first, and waits for them a little
_HEALTH_BYTES_MAX = 4 * 1024 * 1024
_UNKNOWN: Mapping[str, LeaseRow] = {}
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104 - looked at, not listened on


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the sources, the log, the subscriptions and their lag, and replays. No instance has to run."""
    from evermark.cli.subscription import subscription_rows
    from evermark.cluster.fence import DELIVER_LEASE, deliver_lease
    from evermark.delivery.replay.shown import summary
    from evermark.delivery.store.stream_status import PostgresStatus

    with opened(config) as deployment:
        leases = _leases(deployment)
        document: dict[str, Any] = {
            "deployment": deployment.config.name,
            "log": str(deployment.log_root),
            "listen": deployment.config.server.listen,
            "health": _health(deployment.config),
            "sources": _partitions(deployment, leases),
            "delivery": _owned(leases, DELIVER_LEASE),
            "shards": {str(shard): _owned(leases, deliver_lease(shard)) for shard in deployment.delivery.groups()},
            "subscriptions": subscription_rows(deployment),
            "streams": [vars(row) for row in PostgresStatus(deployment.state).all()],
            "replays": [summary(each) for each in deployment.replays.open()],
            "copies": backfill.copy_rows(deployment),
            "dropped": deployment.delivery.counted("dropped"),
            "expired": deployment.delivery.counted("expired"),
        }
    if as_json:
        show_json(document)
    else:
        _show(document)


def _leases(deployment: Deployment) -> Mapping[str, LeaseRow]:
    """A store of leases that is away keeps nobody from seeing the rest."""
    try:
        return deployment.leases.rows()
    except EvermarkError as error:
        say(f"who owns what is not known: {error}")
        return _UNKNOWN


def _owned(leases: Mapping[str, LeaseRow], lease: str) -> dict[str, Any]:
    if leases is _UNKNOWN:
        return {"owner": "unknown", "epoch": None}
    return {"owner": holder_in(leases, lease), "epoch": leases[lease].epoch if lease in leases else None}


def _partitions(deployment: Deployment, leases: Mapping[str, LeaseRow]) -> list[dict[str, Any]]:
    """One row per source partition: its owner, its checkpoint, its log head."""
    rows: list[dict[str, Any]] = []
    for source in sorted(deployment.sources):
        checkpoints, heads = _checkpoints(deployment, source), deployment.heads.load(source)
        for partition in sorted({*checkpoints, *heads} or {0}):
            checkpoint, head = checkpoints.get(partition), heads.get(partition)
            rows.append(
                {
                    "source": source,
                    "partition": partition,
                    **_owned(leases, own_lease(leases, source, partition)),
                    "log_head": head.batch if head else 0,
                    "checkpoint": checkpoint.batch if checkpoint else None,
                    "position": checkpoint.position if checkpoint else None,
                }
            )
    return rows


def _checkpoints(deployment: Deployment, source: str) -> Mapping[int, Checkpoint]:
    """A store of checkpoints that is away keeps nobody from seeing the rest."""
    try:
        return deployment.checkpoints.list(source)
    except EvermarkError as error:
        say(f"{source}: its checkpoints cannot be read: {error}")
        return {}


def _health(config: Config) -> dict[str, Any] | None:
    """What the instance behind `server.listen` says of itself; None when nothing of ours answers there."""
    host, port = _ANY_ADDRESS.get(config.server.host, config.server.host), config.server.port
    if port == 0:
        return None
    connection = http.client.HTTPConnection(host, port, timeout=_HEALTH_WAIT_S)
    try:
        connection.request("GET", "/health")
        found = json.loads(connection.getresponse().read(_HEALTH_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) and "partitions" in found else None


def _status(row: Mapping[str, Any]) -> str | None:
    """As a stream has it: healthy, failover with the event it goes on from, replay with its window."""
    if row.get("status") == "failover":
        return f"failover from {row['checkpoint_event_id']}" if row["checkpoint_event_id"] else "failover"
    if row.get("status") == "replay":
        return f"replay {row['replay_from']:%Y-%m-%dT%H:%MZ} to {row['replay_to']:%Y-%m-%dT%H:%MZ}"
    return row.get("status")


def _show_health(document: dict[str, Any], told: Mapping[str, Any]) -> None:
    say(f"{document['deployment']}: {told['status']}, up for {told.get('uptime_s', 0):g} s ({document['listen']})")
    for row in document["sources"]:
        said = told["partitions"].get(f"{row['source']}/{row['partition']}", {})
        row["health"], row["note"] = said.get("status"), said.get("reason") or None
        if (count := said.get("stale_streams", 0)) and not row["note"]:
            named = ", ".join(sorted(said.get("stale", {}))[:3]) + (" …" if count > 3 else "")
            row["note"] = f"{count} stale: {named}; see `evermark doctor`"
        row["lag"] = f"{said['lag_s']:.1f} s" if said.get("lag_s") is not None else None
    for source, why in told.get("checkpoints_away", {}).items():
        say(f"{source}: its checkpoints cannot be saved: {why['reason']}; events are taken nevertheless")
    for trouble in told.get("log_troubles", ()):
        say(f"{trouble['source']}: its log, {trouble['what']}: {trouble['reason']}\n  hint: {trouble['hint']}")
    if not told.get("delivering") and not told.get("delivery", {}).get("standby"):
        say("this instance does not deliver: it is starting, or delivery has failed; see its log")


def _show(document: dict[str, Any]) -> None:
    told = document["health"]
    if told is None:
        say(f"{document['deployment']}: no instance answers on {document['listen']}")
    else:
        _show_health(document, told)
    columns = ["source", "partition", "owner", "epoch", "log_head", "checkpoint", "position"]
    show(document["sources"], [*columns, "health", "lag", "note"] if told else columns, empty="there is no source")
    say("")
    streams = {row["subscription"]: row for row in document["streams"]}
    for row in document["subscriptions"]:
        row["status"] = _status(streams.get(row["subscription"], {}))
    columns = [
        "subscription",
        "state",
        "status",
        "lag_events",
        "oldest",
        "waiting",
        "dead",
        "next_attempt_at",
        "reason",
    ]
    show(
        document["subscriptions"],
        columns,
        empty="there is no subscription",
    )
    if document["replays"]:
        say("")
        show(document["replays"], replay.COLUMNS)
    if unfinished := [row for row in document["copies"] if backfill.is_open(row)]:
        say("")
        show(unfinished, backfill.COLUMNS)
    for row in document["subscriptions"]:
        if row.get("kept_events"):
            say(f"{row['subscription']}: the log keeps {row['kept_events']} events beyond log.retention for it")
    for what in ("dropped", "expired"):
        for name, count in sorted(document[what].items()):
            say(f"{name}: {count} {what}")
