"""Where everything stands, read from state: rows that `status` and the lists of nouns show."""

from __future__ import annotations

import http.client
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evermark.cli.deployment import lease_rows

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.config import Config

_HEALTH_WAIT_S = 6.0  # an instance asks its sources first, and waits for them a little
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
    from evermark.delivery.status import accounts, durable_heads, kept_for
    from evermark.log.read import LogReader

    heads = durable_heads(deployment.heads, deployment.sources)
    files = {source: LogReader(deployment.log_folder(source)).files_if_any() for source in deployment.sources}
    known = accounts(deployment.delivery, heads, lambda source: files[source])
    horizon = datetime.now(UTC) - deployment.config.log.retention
    kept = kept_for(deployment.delivery.cursors_outside(), files, horizon)
    rows: list[dict[str, Any]] = [
        {
            **_wishes(found.subscription.spec),
            "state": found.subscription.state.value,
            "lag_batches": found.lag_batches,
            "lag_events": found.lag_events,
            "oldest": found.oldest,
            "kept_events": kept.get(found.subscription.name, 0),
            "waiting": found.waiting,
            "dead": found.dead,
            "failures": found.subscription.failures,
            "next_attempt_at": found.subscription.next_attempt_at,
            "reason": found.subscription.reason,
        }
        for found in known.values()
    ]
    rows += [
        {**_wishes(spec), "state": NOT_REGISTERED, "reason": "begins with the next `evermark up`"}
        for spec in deployment.specs
        if spec.name not in known
    ]
    return sorted(rows, key=lambda row: str(row["subscription"]))


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
