"""`evermark status`: everything at one glance, whether an instance runs or not."""

from __future__ import annotations

from typing import Any

from evermark.cli.console import JsonOption, say, show, show_json
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, lease_rows, opened
from evermark.cli.replay import summary
from evermark.cli.standing import health, partition_rows, subscription_rows


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the sources, the log, the subscriptions and their lag, and replays. No instance has to run."""
    with opened(config) as deployment:
        from evermark.cluster.fence import DELIVER_LEASE

        deliver = lease_rows(deployment).get(DELIVER_LEASE)
        holder = deliver.holder if deliver is not None and deliver.held else None
        document: dict[str, Any] = {
            "deployment": deployment.config.name,
            "log": str(deployment.log_root),
            "listen": deployment.config.server.listen,
            "health": health(deployment.config),
            "sources": partition_rows(deployment),
            "delivery": {
                "owner": f"{holder.host}:{holder.pid}" if holder else None,
                "epoch": deliver.epoch if deliver else None,
            },
            "subscriptions": subscription_rows(deployment),
            "replays": [summary(replay) for replay in deployment.replays.open()],
            "dropped": deployment.delivery.counted("dropped"),
            "expired": deployment.delivery.counted("expired"),
        }
    if as_json:
        show_json(document)
    else:
        _show(document)


def _stale(said: dict[str, Any]) -> str | None:
    """Which streams of a partition cannot be read on, in a few words."""
    count, named = said.get("stale_streams", 0), sorted(said.get("stale", {}))
    if not count:
        return None
    return f"{count} stale: {', '.join(named[:3])}{' …' if count > 3 else ''}; see `evermark doctor`"


def _show(document: dict[str, Any]) -> None:
    told = document["health"]
    if told is None:
        say(f"{document['deployment']}: no instance answers on {document['listen']}")
    else:
        say(f"{document['deployment']}: {told['status']}, up for {told.get('uptime_s', 0):g} s ({document['listen']})")
        for row in document["sources"]:
            said = told["partitions"].get(f"{row['source']}/{row['partition']}", {})
            row["health"], row["note"] = said.get("status"), said.get("reason") or _stale(said)
            row["lag"] = f"{said['lag_s']:.1f} s" if said.get("lag_s") is not None else None
        if not told.get("delivering") and not told.get("delivery", {}).get("standby"):
            say("this instance does not deliver: it is starting, or delivery has failed; see its log")
    columns = ["source", "partition", "owner", "epoch", "log_head", "checkpoint", "position"]
    show(document["sources"], [*columns, "health", "lag", "note"] if told else columns, empty="there is no source")
    say("")
    show(
        document["subscriptions"],
        ["subscription", "state", "lag_events", "oldest", "waiting", "dead", "next_attempt_at", "reason"],
        empty="there is no subscription",
    )
    if document["replays"]:
        say("")
        columns = ["id", "state", "source", "streams", "since", "until", "percent", "delivered", "parked"]
        show(document["replays"], columns)
    for row in document["subscriptions"]:
        if row.get("kept_events"):
            say(f"{row['subscription']}: the log keeps {row['kept_events']} events beyond log.retention for it")
    for what in ("dropped", "expired"):
        for name, count in sorted(document[what].items()):
            say(f"{name}: {count} {what}")
