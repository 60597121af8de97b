"""The playbook's `The log is lost or damaged`, step by step: what is said, what goes on, and that each remedy helps."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg

from evermark.log.read import FileRange, LogReader
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.tails import tailing
from evermark.testing.until import until

PLAYBOOK = "docs/playbook.md, `The log is lost or damaged`"


class LostLog(Scene):
    """A shop with two receivers: `steady` gets everything at once, `slow` is paused now and then, and reads the log."""

    sold = 0

    def __init__(self, folder: Path, dsn: str) -> None:
        super().__init__(folder, dsn, {"steady": None, "slow": None})
        self.log_folder = folder / "data" / "log" / "shop"

    def sell(self, *, waits: bool = True) -> None:
        """One more order, which `steady` gets."""
        self.sold += 1
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("insert into public.orders (total) values (1)")
        if waits:
            self.wait_for("steady")

    def wait_confirmed(self) -> None:
        """Until the slot was told that everything up to now is taken."""
        confirmed = "select bool_and(confirmed_flush_lsn >= %s::pg_lsn) from pg_replication_slots where database = %s"
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            now = conn.execute("select pg_current_wal_lsn()::text, current_database()").fetchone()
            until(lambda: conn.execute(confirmed, now).fetchone() == (True,), "the slot is told")

    def wait_for(self, name: str) -> None:
        until(lambda: self.delivered(name) == self.sold, f"{name} has all")

    def files(self) -> list[FileRange]:
        return sorted(LogReader(self.log_folder).files(), key=lambda file: file.batch_min)

    def missing(self) -> list[str]:
        return [row["file"] for row in json.loads(self.run("log", "missing", "--json").stdout)]

    def give_up(self, victim: Path, running: Instance) -> None:
        """And a client of the live tail hears of it, once."""
        with tailing(running) as tail:
            until(lambda: any(f"the file {victim}" in each for each in tail.others), "the client is told why it waits")
            assert len(tail.ids) == self.sold - 1 and tail.resyncs == []
            victim.rename(self.folder / "aside")
            self.run("log", "missing", "--give-up", "--yes")
            until(lambda: tail.resyncs and len(tail.others) == 2, "the client is told, and goes on")
            assert "events were given up" in "".join(tail.resyncs) and len(tail.resyncs) == 1
            assert len(tail.ids) == self.sold - 1

    def replay(self) -> str:
        """Asks for one of everything, which sends nothing."""
        window = ("--since", "2000-01-01", "--where", "key = 'none'")
        return str(json.loads(self.run("replay", "start", *window, "--subscription", "steady", "--json").stdout)["id"])

    def replayed(self, replay: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("replay", "show", replay, "--json").stdout)
        return found

    def refused(self, *words: str) -> str:
        done = self.run(*words, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        return done.stderr

    def doctor(self) -> dict[str, Any]:
        """What is wrong, by check."""
        found = json.loads(self.run("doctor", "--json", check=False).stdout)["findings"]
        return {row["check"]: row for row in found if row["grade"] == "wrong"}


def told(running: Instance) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(running.ask("/health")[1])
    return found


def says(running: Instance, text: str) -> bool:
    """Whether health says this of the log, and what to do."""
    troubles = [each for each in told(running)["log_troubles"] if text in each["reason"]]
    return any(PLAYBOOK in each["hint"] for each in troubles)


def is_well(running: Instance) -> bool:
    found = told(running)
    return found["status"] == "healthy" and found["log_troubles"] == []


def is_so(running: Instance, status: str, reason: str) -> bool:
    found = running.health("shop/0")
    return found.get("status") == status and reason in found["reason"] and PLAYBOOK in found["hint"]


def test_a_data_file_that_is_lost_or_damaged_is_put_back_or_given_up(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a subscription, and a replay, that have to read a file WHEN that is deleted, or damaged, THEN all is said,
    the others go on, and they go on when the file is back, or given up; what the source still has of that is taken
    again. WHEN a commit, or the folder, is away for a while THEN reading goes on by itself when it is back."""
    with LostLog(tmp_path, pg_dsn) as shop:
        running = shop.up()
        shop.sell()
        shop.wait_for("slow")
        shop.run("subscription", "pause", "slow")
        for _ in range(3):
            shop.sell()
        victim = Path(shop.files()[2].path)
        kept = victim.read_bytes()
        victim.unlink()
        shop.run("subscription", "resume", "slow")
        until(lambda: says(running, f"subscription slow: the file {victim} of the log is missing"), "it is said")
        assert told(running)["status"] == "degraded"
        assert running.health("shop/0")["status"] == "healthy"
        replay = shop.replay()
        until(lambda: says(running, f"replay {replay} for subscription steady: the file {victim} of"), "it is said")
        (target,) = shop.replayed(replay)["targets"]
        assert f"the file {victim} of the log is missing" in target["reason"] and PLAYBOOK in target["reason"]
        assert target["next_attempt_at"] is not None
        shop.sell()
        assert shop.missing() == [victim.name]
        assert victim.name in shop.doctor()["log"]["found"]
        forget = ("forget", "--stream", "public.orders", "--key", "3", "--yes")
        for words in (("query", "select key, op from shop"), forget):
            error = shop.refused("log", *words)
            assert f"the file {victim} of the log is missing" in error and PLAYBOOK in error
        victim.write_bytes(kept)
        shop.wait_for("slow")
        until(lambda: shop.replayed(replay)["state"] == "done", "the replay has gone on")
        until(lambda: is_well(running), "health is healthy again")
        assert shop.missing() == [] and "log" not in shop.doctor()

        shop.run("subscription", "pause", "slow")
        shop.sell()
        victim = Path(shop.files()[-1].path)
        victim.write_bytes(victim.read_bytes()[:200])
        shop.run("subscription", "resume", "slow")
        until(lambda: says(running, f"the file {victim} of the log is damaged"), "it is said")
        assert f"the file {victim} of the log is damaged" in shop.refused("log", "query", "select key, op from shop")
        assert shop.missing() == []
        shop.give_up(victim, running)
        until(lambda: is_well(running), "health is healthy again")
        assert shop.delivered("slow") == shop.sold - 1
        assert "is being read by an instance" in shop.refused("checkpoint", "reset", "shop", "--from", "resync")
        assert running.terminate() == 0

        shop.run("checkpoint", "reset", "shop", "--from", "resync")
        commit = sorted((shop.log_folder / "_delta_log").glob("*.json"))[2]
        commit.rename(tmp_path / "commit")
        assert "cannot be read" in shop.doctor()["log"]["found"]
        running = shop.up()
        until(lambda: is_so(running, "stale", "cannot be read"), "it is said that a commit is missing")
        (tmp_path / "commit").rename(commit)
        shop.wait_for("slow")
        until(lambda: is_well(running), "health is healthy again")

        shop.log_folder.rename(tmp_path / "away")
        shop.sell(waits=False)
        until(lambda: is_so(running, "stale", "is gone"), "it is said that the log is gone")
        (tmp_path / "away").rename(shop.log_folder)
        for name in ("steady", "slow"):
            shop.wait_for(name)
        assert running.terminate() == 0
        assert sorted(shop.logged()) == sorted(shop.committed())


def test_a_log_that_is_lost_whole_begins_anew_with_what_the_source_has(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a log whose folder is away WHEN it starts THEN that is said, nothing is taken, and nothing made in its
    place; WHEN it is back THEN it goes on. WHEN it is lost, without a copy, and its checkpoint is reset THEN it goes
    on, and after a comparison all is there that the outbox has."""
    with LostLog(tmp_path, pg_dsn) as shop:
        running = shop.up()
        shop.sell()
        shop.wait_confirmed()
        for _ in range(2):
            shop.sell()
        shop.run("subscription", "pause", "slow")
        shop.sell()
        assert running.terminate() == 0
        shop.log_folder.rename(tmp_path / "away")
        shop.run("subscription", "resume", "slow")
        shop.sell(waits=False)
        running = shop.up()
        until(lambda: is_so(running, "stale", f"{shop.log_folder} is gone"), "it is said that the log is gone")
        assert f"{shop.log_folder} is gone" in shop.doctor()["resume"]["found"]
        assert not shop.log_folder.exists()
        (tmp_path / "away").rename(shop.log_folder)
        for name in ("steady", "slow"):
            shop.wait_for(name)
        until(lambda: is_well(running), "health is healthy again")
        assert running.terminate() == 0
        shutil.rmtree(shop.log_folder)
        assert "is gone" in shop.doctor()["resume"]["found"]

        shop.run("checkpoint", "reset", "shop")
        running = shop.up()
        shop.sell()
        assert running.terminate() == 0
        assert len(shop.logged()) < len(shop.committed()), "the slot was told of the first, and sends it no more"
        shop.run("checkpoint", "reset", "shop", "--from", "resync")
        running = shop.up()
        until(lambda: sorted(shop.logged()) == sorted(shop.committed()), "the log has all that the outbox has")
        shop.sell()
        assert running.terminate() == 0


def test_a_log_whose_newest_commits_are_missing_is_passed_by_nobody(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a log without its newest commits, and a subscription and a replay that have to read them WHEN it starts
    THEN the source stops, both wait, and it is said of the subscription; WHEN the log is put back whole THEN all go on,
    and nothing was passed over."""
    with LostLog(tmp_path, pg_dsn) as shop:
        running = shop.up()
        shop.sell()
        shop.wait_for("slow")
        shop.run("subscription", "pause", "slow")
        for _ in range(3):
            shop.sell()
        assert running.terminate() == 0
        shutil.copytree(shop.log_folder, tmp_path / "kept")
        for commit in sorted((shop.log_folder / "_delta_log").glob("*.json"))[-2:]:
            commit.unlink()
        replay = shop.replay()
        shop.run("subscription", "resume", "slow")
        running = shop.up()
        until(lambda: running.health("shop/0").get("status") == "failed", "it stops")
        assert "but batch 4 was taken" in running.health("shop/0")["reason"]
        until(lambda: says(running, "subscription slow: the log of shop/0 ends at batch"), "it is said")
        assert shop.replayed(replay)["state"] == "waiting"
        assert running.terminate() == 0
        shutil.rmtree(shop.log_folder)
        (tmp_path / "kept").rename(shop.log_folder)
        running = shop.up()
        shop.wait_for("slow")
        until(lambda: shop.replayed(replay)["state"] == "done", "the replay has gone on")
        until(lambda: is_well(running), "health is healthy again")
        assert running.terminate() == 0


def test_a_data_folder_that_is_put_back_from_a_backup_takes_what_came_since(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a copy of the whole data folder, and events since, of which the outbox noted that the log has them WHEN the
    copy takes the folder's place THEN they are taken once more from the outbox, which still has them."""
    with LostLog(tmp_path, pg_dsn) as shop:
        running = shop.up()
        shop.sell()
        shop.wait_confirmed()
        assert running.terminate() == 0
        data, backup = shop.folder / "data", tmp_path / "backup"
        subprocess.run(["cp", "-a", data, backup], check=True)  # State's files may belong to another user
        running = shop.up()
        for _ in range(3):
            shop.sell()
        shop.wait_confirmed()
        with psycopg.connect(shop.dsn, autocommit=True) as conn:  # as the reader does every five minutes
            noted = "select pgstream.note_floor(slot, pg_snapshot_xmin(pg_current_snapshot())) from pgstream.readers"
            conn.execute(noted)
        assert running.terminate() == 0
        shutil.rmtree(data)
        backup.rename(data)
        running = shop.up()
        until(lambda: sorted(shop.logged()) == sorted(shop.committed()), "the log has all that the outbox has")
        until(lambda: is_well(running), "health is healthy again")
        assert running.terminate() == 0
