"""`evermark blocknode`: a block-stream server."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.blocknode.settings import NodeSettings
from evermark.cli.console import noun, say, seconds, show_json, warn

if TYPE_CHECKING:
    from evermark.blocknode.faults import Faults

app = noun("A block-stream server.")

_ENV = "EVERMARK_BLOCKNODE_TOKEN"
_ENV_FOLLOW = "EVERMARK_BLOCKNODE_FOLLOW_TOKEN"


@app.command()
def serve(
    data: Annotated[Path, typer.Option(help="Folder that holds the streams; made if need be.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8330,
    token: Annotated[
        str | None, typer.Option(envvar=_ENV, show_default=False, help="Require this bearer token of every client.")
    ] = None,
    follow: Annotated[
        str | None, typer.Option(help="Copy the node at this url, and serve readers only.", show_default=False)
    ] = None,
    follow_token: Annotated[
        str | None, typer.Option(envvar=_ENV_FOLLOW, show_default=False, help="The token of that node.")
    ] = None,
    seal_events: Annotated[int, typer.Option(min=1, max=10_000, help="Seal a block at that many events,")] = 100,
    seal_after: Annotated[str, typer.Option(help="or when its first event is this old.")] = "2s",
    snapshot_every: Annotated[int, typer.Option(min=1, max=100_000, help="Blocks from snapshot to snapshot.")] = 10,
    page_blocks: Annotated[int, typer.Option(min=1, max=10_000, help="Blocks in one answer, at most.")] = 500,
    resume_blocks: Annotated[
        int, typer.Option(min=1, max=100_000, help="A cookie further behind is answered with a reset.")
    ] = 500,
    event_bytes: Annotated[int, typer.Option(min=1024, max=4_194_304, help="Size of an event, at most.")] = 65_536,
    keepalive: Annotated[str, typer.Option(help="Send a comment when a sync has been quiet for this long.")] = "15s",
    stall: Annotated[str, typer.Option(help="Cut a sync off whose client reads nothing for this long.")] = "30s",
    faults: Annotated[str | None, typer.Option(hidden=True, help="For tests: the mistakes to make, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it listens as JSON.")] = False,
) -> None:
    """Serve durable append-only streams over HTTP, until SIGTERM or Ctrl-C. See docs/blocknode.md."""
    from evermark.blocknode.faults import Faults
    from evermark.observe.logging import set_up_logging

    set_up_logging()
    settings = NodeSettings(
        data=data,
        host=host,
        port=port,
        token=token or None,
        follow=follow,
        follow_token=follow_token or None,
        seal_events=seal_events,
        seal_after_s=seconds(seal_after, "--seal-after"),
        snapshot_every=snapshot_every,
        page_blocks=page_blocks,
        resume_blocks=resume_blocks,
        event_bytes=event_bytes,
        keepalive_s=seconds(keepalive, "--keepalive"),
        stall_s=seconds(stall, "--stall"),
    )
    if not token and not _is_loopback(host):
        warn(f"no --token: every client that reaches {host} can read, write and delete here")
    _serve(settings, Faults.parse(faults) if faults else Faults(), as_json=as_json)


def _serve(settings: NodeSettings, faults: Faults, *, as_json: bool) -> None:
    from evermark.blocknode.node import Node

    node = Node(settings, faults)

    def listening() -> None:
        if as_json:
            show_json({"listening": node.url, "port": node.port, "cut_bytes": node.cut_bytes})
            sys.stdout.flush()
        say(f"serving {settings.data} on {node.url}" + (f", following {settings.follow}" if settings.follow else ""))

    asyncio.run(node.serve(listening))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
