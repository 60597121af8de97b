"""Where everything stands, read from state: rows that `status` and the lists of nouns show."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evermark.cli.deployment import lease_rows

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.config import Config
    from evermark.delivery.base import CursorVector, Group, Place

_HEALTH_WAIT_S = 2.0
_HEALTH_BYTES_MAX = 4 * 1024 * 1024
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104 - looked at, not listened on
NOT_REGISTERED = "new"


def partition_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """One row per source partition: its owner, its checkpoint, its log head."""
    from evermark.cluster.fence import source_lease

    leases = lease_rows(deployment)
    rows: list[dict[str, Any]] = []
    for source in sorted(deployment.sources):
        lease = leases.get(source_lease(source))
        holder = lease.holder if lease is not None and lease.held else None
        checkpoints = deployment.checkpoints.list(source)
        heads = deployment.heads.load(source)
        for partition in sorted({*checkpoints, *heads} or {0}):
            checkpoint, head = checkpoints.get(partition), heads.get(partition)
            rows.append(
                {
                    "source": source,
                    "partition": partition,
                    "owner": f"{holder.host}:{holder.pid}" if holder else None,
                    "epoch": lease.epoch if lease else None,
                    "log_head": head.batch if head else 0,
                    "checkpoint": checkpoint.batch if checkpoint else None,
                    "position": checkpoint.position if checkpoint else None,
                }
            )
    return rows


def subscription_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """One row per subscription, those of the file that no instance has seen yet included. No secret is in them."""
    from evermark.delivery.lag import lag_of
    from evermark.log.read import LogReader

    heads = log_heads(deployment)
    group = deployment.delivery.group()
    outside = deployment.delivery.cursors_outside()
    counts = deployment.delivery.parked_counts()
    since = deployment.delivery.parked_since()
    known = deployment.delivery.subscriptions()
    sources = {place.source for place in heads}
    files = {source: LogReader(deployment.log_folder(source)).files_if_any() for source in sources}
    rows: list[dict[str, Any]] = []
    for name, found in known.items():
        parked = counts.get(name, {})
        vector = group.cursors if name in group.members else outside.get(name, {})
        lag = lag_of(vector, heads, files)
        rows.append(
            {
                **_wishes(found.spec),
                "state": found.state.value,
                "lag_batches": lag_batches(heads, vector),
                "lag_events": lag.events,
                "oldest": min((moment for moment in (lag.oldest, since.get(name)) if moment is not None), default=None),
                "waiting": parked.get("waiting", 0),
                "dead": parked.get("dead", 0),
                "failures": found.failures,
                "next_attempt_at": found.next_attempt_at,
                "reason": found.reason,
            }
        )
    rows += [
        {**_wishes(spec), "state": NOT_REGISTERED, "reason": "begins with the next `evermark up`"}
        for spec in deployment.specs
        if spec.name not in known
    ]
    return sorted(rows, key=lambda row: str(row["subscription"]))


def log_heads(deployment: Deployment) -> dict[Place, int]:
    from evermark.delivery.base import Place

    return {
        Place(source, partition): head.batch
        for source in deployment.sources
        for partition, head in deployment.heads.load(source).items()
    }


def lag_batches(heads: Mapping[Place, int], cursors: CursorVector) -> int:
    """How many batches a reader has before it; a place it has not seen yet is all before it."""
    return sum(max(0, head - cursors.get(place, 0)) for place, head in heads.items())


def least_cursors(group: Group, outside: Mapping[str, CursorVector], source: str) -> dict[int, int]:
    """Per partition of a source, the batch that every reader has passed; a place one has not seen counts as 0."""
    readers = [group.cursors, *outside.values()]
    places = {place for cursors in readers for place in cursors if place.source == source}
    return {place.partition: min(cursors.get(place, 0) for cursors in readers) for place in places}


def health(config: Config) -> dict[str, Any] | None:
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


def _wishes(spec: Any) -> dict[str, Any]:
    """What was asked for. Values of headers may be credentials: only their names are told."""
    from evermark.observe.logging import without_secrets

    return {
        "subscription": spec.name,
        "url": without_secrets(spec.url),
        "streams": list(spec.streams),
        "ops": list(spec.ops),
        "where": spec.where,
        "ordered": spec.ordered,
        "bundle": spec.bundle,
        "headers": sorted(spec.headers),
        "made_by": spec.made_by.value,
    }
