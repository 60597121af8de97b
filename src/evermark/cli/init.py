"""`evermark init`: a commented evermark.yaml to begin with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from evermark.cli.options import DEFAULT_CONFIG
from evermark.disk import write_whole
from evermark.errors import ConfigError

# "# Sentence" explains; any other line with a leading "#" is a setting that works when the "#" is taken away.
STARTER = """\
# Evermark's configuration. Any text may hold ${VARIABLE}, ${VARIABLE:-default} or ${file:/path}.
version: 1

# Names the slot, the publication and the state of this deployment: keep it, and use another one elsewhere.
name: @NAME@

# The log (every event), the state (an embedded Postgres) and the key that seals secrets are kept in this folder.
# Back up the whole of it.
data: ./evermark-data

#log:
#  path: s3://acme/shop             # or a local folder; without it: the folder log in the data folder
#  retention: 30d                   # older events are removed, once every subscription has them

# How a bucket is reached. What is left out comes from the environment's own AWS_… variables (docs/storage.md).
#storage:
#  endpoint: "https://minio.internal:9000"
#  region: eu-central-1
#  access_key: "${S3_ACCESS_KEY}"   # by reference only, as secret_key
#  secret_key: "${S3_SECRET_KEY}"
#  path_style: true                 # false: the bucket stands in the host's name

# Without a dsn Evermark runs a Postgres of its own in the data folder.
#state:
#  dsn: "${STATE_DSN}"

# Seals the secrets that are kept in state. Without it a key is made in the data folder.
#secrets:
#  key: "${EVERMARK_KEY}"           # or ${file:/run/secrets/evermark}

#spark:
#  master: "local[16,4]"            # threads for tasks, tries of a task; in this version a local master only
#  lane: 5m                         # how long the task lives that reads and delivers, before the next one takes over
#  lanes: 1                         # so many of these tasks share the sources and the subscriptions
#  conf: {}

# Health, metrics and the HTTP API. Tokens say who may use the API (docs/api.md).
#server:
#  listen: "127.0.0.1:8320"
#  tokens: {ops: "${OPS_TOKEN}"}

sources:
  shop:
    type: postgres                  # or package.module:Class with options: {...}
    dsn: "${SHOP_DSN}"              # postgresql://user:password@host:5432/database
    # In mode tables changes are taken from the WAL, and nothing but a publication and a slot is made in the database.
    # In mode outbox triggers write them into a table of ours, in which your transactions may put messages, too.
    mode: tables                    # tables | outbox
    #start: copy                    # rows that are there already come, too, as events with op = read
    # The tables whose changes `evermark source install` captures. After a change here, run it again.
    tables:
      - public.orders
    # Columns that never leave the database, and columns of which only a hash does. Events that are in the log stay.
    #  - {name: public.users, exclude: [password], hash: [email]}

subscriptions:
  billing:
    url: https://billing.example/hooks
    # Make one with: evermark subscription secret
    secret: "${BILLING_SECRET}"
    streams: [public.orders]
    #ops: [insert, update]
    #where: "op = 'insert' and data.total > 100"
    from: now                       # now | beginning | a time
    #ordered: false                 # true: order per key holds through retries
    #bundle: 1                      # events in one POST, up to 1000
    #concurrency: 20
    #timeout: 10s
    #rate: 50/s
    #headers: {X-Team: billing}
    #body: standard                 # standard | cloudevents | raw
    #allow_networks: [10.0.0.0/8]   # private networks this subscription may reach
    #body_limit: 1MiB
    #parked_limit: 10000
    #retry_waits: [5s, 5m, 30m, 2h, 5h, 10h, 10h]   # of an event that was refused; then it is dead
    #ttl: 7d                        # what could not be delivered for so long is given up, and counted; 0: never

# Subscriptions that act for a user of block streams (a source of type blocks); the keys above, and these.
#bots:
#  helper:
#    url: https://helper.example/hooks
#    secret: "${BILLING_SECRET}"
#    source: shop
#    user: helper-bot
#    mode: all                      # all | mentions_replies_reactions | none
#    device: helper-device-1        # only for encrypted messages: whose session keys it uses
#    inbox: helper-inbox            # only if the log does not say which stream that is

#reliability:
#  circuit_breaker: {threshold: 5, timeout: 30s, suspend_after: 10}
#  shutdown: {flush_timeout: 10s, checkpoint_timeout: 5s}

# Several instances share the work by leases: docs/instances.md.
#cluster: {leases: {backend: postgres, ttl: 10s}}
"""


def starter(folder_name: str) -> str:
    """The text of a starter file; the deployment is called after its folder, as far as that is a name."""
    name = re.sub(r"[^a-z0-9_-]+", "-", folder_name.lower()).strip("-_")[:31].rstrip("-_")
    return STARTER.replace("@NAME@", name if re.match(r"[a-z]", name) and name not in _WORDS else "evermark")


_WORDS = ("yes", "no", "true", "false", "on", "off", "null", "y", "n")  # YAML reads these as something else


def write_starter(path: Path, *, force: bool = False) -> None:
    """Write it whole or not at all; an existing file is replaced only with `force`."""
    try:
        write_whole(path, starter(path.absolute().parent.name), replace=force)
    except FileExistsError:
        raise ConfigError(f"{path} exists already", hint="replace it with: evermark init --force") from None
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise ConfigError(
            f"cannot write {path}: {reason}", hint="does the folder exist, and may you write to it?"
        ) from None


NEXT = (
    "export SHOP_DSN=postgresql://user:password@host:5432/database",
    "export BILLING_SECRET=$(evermark subscription secret)",
    "evermark config check --connect",
    "evermark source install",
    "evermark up",
)


def init(
    path: Annotated[Path, typer.Option("--config", "-c", help="The file to write.")] = DEFAULT_CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented evermark.yaml to begin with."""
    write_starter(path, force=force)
    typer.echo(f"wrote {path}: say in it what you have, then:")
    option = "" if path == DEFAULT_CONFIG else f" -c {path}"
    for command in NEXT:
        typer.echo(f"  {command}{option if command.startswith('evermark') else ''}")
