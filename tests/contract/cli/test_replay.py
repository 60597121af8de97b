"""`evermark replay` against a real state: what it asks for, what it shows, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.app.build import Deployment
from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.model import MadeBy
from evermark.delivery.replay.plan import targets_of
from evermark.errors import NotFoundError
from tests.contract.cli.test_commands import deployment, file, held_elsewhere, invoke, log_batches, refused, said, told

__all__ = ["deployment", "file"]

WINDOW = ("--since", "2026-11-01", "--until", "2026-11-02T12:00Z")


def test_a_replay_is_asked_for_shown_and_cancelled(file: Path, deployment: Deployment) -> None:
    """GIVEN no instance WHEN a replay is asked for THEN it waits, can be looked at, and ends when a person says so."""
    made = told(
        "replay", "start", "-c", file, *WINDOW, "-s", "billing", "--stream", "public.orders", "--where", "op = 'insert'"
    )["id"]
    (row,) = told("replay", "list", "-c", file)
    assert (row["id"], row["state"], row["asked_by"], row["source"]) == (made, "waiting", "cli", "shop")
    for command in (("replay", "list"), ("status",)):
        table = invoke(*command, "-c", file).stdout
        assert [f"{made} " in line and " billing " in line for line in table.splitlines()].count(True) == 1
    assert (row["since"], row["until"]) == ("2026-11-01T00:00:00+00:00", "2026-11-02T12:00:00+00:00")
    shown = told("replay", "show", made, "-c", file)
    assert (shown["where"], shown["subscription"], shown["targets"]) == ("op = 'insert'", "billing", [])
    assert [r["id"] for r in told("status", "-c", file)["replays"]] == [made]
    assert "is cancelled" in said("replay", "cancel", made, "-c", file)
    assert "was cancelled already" in said("replay", "cancel", made, "-c", file)
    assert told("status", "-c", file)["replays"] == []


def test_it_works_while_an_instance_delivers(file: Path, deployment: Deployment) -> None:
    """GIVEN an instance that holds the lease WHEN a person asks THEN the request is there for it to find."""
    lease = held_elsewhere(deployment, DELIVER_LEASE)
    made = told("replay", "start", "-c", file, *WINDOW)["id"]
    deployment.delivery.register(deployment.specs, MadeBy.FILE, {}, lease.epoch)
    replay = deployment.replays.one(made)
    targets = targets_of(replay, deployment.delivery.subscriptions())
    assert not isinstance(targets, str)
    deployment.replays.start(made, {0: 3}, 100, targets, lease.epoch)
    shown = told("replay", "show", made, "-c", file)
    assert (shown["state"], shown["percent"]) == ("running", 0.0)
    assert [(t["subscription"], t["state"]) for t in shown["targets"]] == [("billing", "running")]
    deployment.replays.pass_by(deployment.replays.one(made).targets[0], lease.epoch)
    assert deployment.replays.finish(made, lease.epoch)
    assert told("replay", "show", made, "-c", file)["percent"] == 100.0


def test_a_stream_that_nothing_is_known_of_is_warned_of(file: Path, deployment: Deployment) -> None:
    """GIVEN a log WHEN streams are named that it has no event of THEN a warning each, with what was meant."""
    log_batches(deployment.log_folder("shop"), 1, 1, 2)
    asked = ("replay", "start", "-c", file, *WINDOW)
    assert "warning" not in said(*asked, "--stream", "public.orders")
    slip = said(*asked, "--stream", "public.ordres", "--stream", "orders", "--stream", "mail")
    assert slip.count("warning: stream ") == 3 and slip.count("did you mean public.orders?") == 2
    assert "stream mail: the log has no event of it yet, and the file has no table of this name" in slip
    assert "known are public.orders" in slip
    assert len(told("replay", "list", "-c", file)) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--since", "yesterday"), "not a time"),
        (("--since", "2026-11-02", "--until", "2026-11-01"), "is before"),
        (("--since", "2999-01-01"), "--since 2999-01-01 is in the future"),
        (("--since", "2026-11-01", "-s", "nobody"), "no subscription"),
        (("--since", "2026-11-01", "--where", "reflect('x')"), "reflect"),
        (("--since", "2026-11-01", "--source", "nowhere"), "no source"),
    ],
)
def test_what_makes_no_sense_is_refused(file: Path, deployment: Deployment, words: tuple[str, ...], why: str) -> None:
    """GIVEN a wrong time, window, name or predicate WHEN it is asked for THEN it is said, and nothing is kept."""
    why_not = refused("replay", "start", "-c", file, *words)
    assert why in why_not and "None" not in why_not
    assert deployment.replays.newest(10) == []


def test_an_unknown_id_is_said_with_a_hint(file: Path, deployment: Deployment) -> None:
    """GIVEN an id nobody has WHEN it is shown or cancelled THEN both say how to find the right one."""
    assert "no replay" in refused("replay", "show", "nobody", "-c", file)
    assert "no replay" in refused("replay", "cancel", "nobody", "-c", file)
    with pytest.raises(NotFoundError):
        deployment.replays.one("nobody")
