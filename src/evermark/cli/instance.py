"""`evermark instance`: the running instances, and the leases each holds."""

from __future__ import annotations

from collections import defaultdict

from evermark.cli.console import noun, show
from evermark.cli.deployment import opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.cluster.base import Holder
from evermark.cluster.postgres import LeaseRow, lease_rows

app = noun("Running Evermark processes.")


@app.command("list")
def list_instances(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the processes that run, and the leases each holds."""
    with opened(config) as deployment:
        by_holder: dict[Holder, list[LeaseRow]] = defaultdict(list)
        for row in lease_rows(deployment.state).values():
            if row.holder is not None and row.held:
                by_holder[row.holder].append(row)
    rows = [
        {
            "instance": holder.instance,
            "host": holder.host,
            "pid": holder.pid,
            "leases": [row.name for row in held],
            "epochs": {row.name: row.epoch for row in held},
            "expires_at": min(row.expires_at for row in held if row.expires_at),
        }
        for holder, held in sorted(by_holder.items(), key=lambda found: (found[0].host, found[0].pid))
    ]
    columns = ("instance", "host", "pid", "leases", "expires_at")
    show(rows, columns, as_json=as_json, empty="no instance runs; start one with: evermark up")
