"""`evermark log tail` over a real log and a real state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evermark.app.build import Deployment
from evermark.cluster.fence import source_lease
from evermark.log.head import Head
from evermark.testing.until import until
from tests.contract.cli.test_commands import deployment, file, held_elsewhere, invoke, log_batches, refused

__all__ = ["deployment", "file"]


def logged(deployment: Deployment, last: int, durable: int) -> int:
    """Batches up to `last`, of which `durable` may be read; returns the epoch of their owner."""
    epoch = held_elsewhere(deployment, source_lease("shop")).epoch
    log_batches(deployment.log_folder("shop"), epoch, 1, last)
    for batch in range(1, durable + 1):
        deployment.heads.move("shop", 0, head(batch, epoch))
    return epoch


def head(batch: int, epoch: int) -> Head:
    return Head(batch, epoch, f"{batch + 1:06}", batch)


def batches(*args: object) -> list[int]:
    """The batch of each event that is printed, by its position."""
    found = invoke("log", "tail", "--no-follow", "--json", *args)
    assert found.exit_code == 0, found.output
    return [int(json.loads(line)["evermark"]["position"]) for line in found.stdout.splitlines()]


def test_the_log_is_read_from_a_place_to_what_is_durable(file: Path, deployment: Deployment) -> None:
    """GIVEN four batches of which three are durable WHEN followed from a place, to the end THEN these events, filtered,
    and none that is not durable.
    """
    logged(deployment, 4, 3)
    every = batches("-c", file, "--from", "beginning")
    assert len(set(every)) == 3
    assert batches("-c", file) == []
    assert batches("-c", file, "--from", "batch:2") == every[-len(every) // 3 :]
    assert batches("-c", file, "--from", "1999-01-01", "--limit", "1") == every[:1]
    assert batches("-c", file, "--from", "beginning", "--stream", "no.such") == []
    assert batches("-c", file, "--from", "beginning", "--where", "op = 'delete'") == []
    line = invoke("log", "tail", "-c", file, "--no-follow", "--from", "batch:2").stdout
    assert "shop/0 batch 3" in line and "public.orders" in line


@pytest.mark.parametrize(
    "given", [("--from", "batch:x"), ("--from", "yesterday"), ("--where", "reflect('a')"), ("--source", "none")]
)
def test_what_is_not_right_is_refused(file: Path, deployment: Deployment, given: tuple[str, str]) -> None:
    """GIVEN a place, a predicate or a source that is not right WHEN followed THEN it is refused, and named."""
    assert given[1].removeprefix("batch:")[:7] in refused("log", "tail", "-c", file, *given)


def test_it_follows_until_it_is_interrupted(file: Path, deployment: Deployment, tmp_path: Path) -> None:
    """GIVEN a log that is followed WHEN a batch becomes durable THEN it is printed at once; Ctrl-C ends it well."""
    epoch = logged(deployment, 3, 1)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "evermark.cli.main", "log", "tail", "-c", str(file), "--from", "beginning"]
    with out.open("wb") as target, subprocess.Popen(command, stdout=target, env=dict(os.environ)) as following:
        try:
            until(lambda: "batch 1" in out.read_text(), what="the first batch is printed")
            deployment.heads.move("shop", 0, head(2, epoch))
            until(lambda: "batch 2" in out.read_text(), what="the second, when it is durable")
            assert "batch 3" not in out.read_text()
        finally:
            following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0
