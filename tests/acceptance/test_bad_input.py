"""Bad input through the real `evermark up`: each is refused with what, where and what to do, and nothing is lost.

What refuses to start ends with an exit code other than 0. What goes wrong later is said in the log and in /health, and
the process goes on when its cause is repaired. All but the first are forks of a process that has loaded the program.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from evermark.testing.commands import REAL
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until
from tests.acceptance.bad_input_scene import (
    PASSWORD,
    SOURCE,
    Deployment,
    fill,
    name_of_a_private_address,
    order,
    shop_health,
    small_disk,
    untouched,
    wait_for_health,
    wear_out_state,
    what_it_said,
    with_password,
)
from tests.forked import FORKED

NOWHERE = f"postgresql://shop:{PASSWORD}@127.0.0.1:1/shop"
PRIVATE = ("https://10.1.2.3/hooks", "http://127.0.0.1:8080/", "https://[fd00::7]/", "http://localhost/")
INSIDE = name_of_a_private_address()

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="a disk that can be filled safely is a small mount, which only root makes"
)


class ForkedScene(Scene):
    commands = FORKED


@pytest.fixture(scope="module")
def shop_dsn(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with an installed source and three events that nobody took. Refused starts leave it as it is."""
    with fresh_database(pg_server) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
        ran = Deployment(tmp_path_factory.mktemp("install"), dsn, dsn).run("source", "install")
        assert ran.returncode == 0, ran.stderr
        order(dsn, 3)
        yield dsn


@pytest.fixture
def shop(tmp_path: Path, shop_dsn: str) -> Iterator[Deployment]:
    """A deployment that reads it; whatever the test does, the slot and the events must not have been touched."""
    before = untouched(shop_dsn)
    yield Deployment(tmp_path, shop_dsn, shop_dsn)
    assert untouched(shop_dsn) == before


@pytest.fixture
def nowhere(tmp_path: Path) -> Deployment:
    """A deployment that must be refused before it connects to anything."""
    return Deployment(tmp_path, NOWHERE, NOWHERE)


def test_malformed_yaml_names_the_line(nowhere: Deployment) -> None:
    """GIVEN a key that is indented by a space too few WHEN it goes up THEN file, line and what to look at are said."""
    nowhere.write("sources:\n  shop:\n    type: postgres\n   dsn: there\n")
    said = nowhere.refused(REAL)
    assert "evermark.yaml, line 9" in said and "look at the indentation, quotes and brackets" in said


def test_a_missing_variable_is_named_with_the_key_that_wants_it(nowhere: Deployment) -> None:
    """GIVEN a variable that is not set WHEN it goes up THEN variable, key and line are said."""
    del nowhere.env["SHOP_DSN"]
    said = nowhere.refused()
    assert "SHOP_DSN" in said and "sources.shop.dsn" in said and "line 7" in said


def test_receivers_on_private_addresses_are_refused_with_the_line_to_add(nowhere: Deployment) -> None:
    """GIVEN urls with private addresses WHEN it goes up THEN each is refused with the line that would open it."""
    lines = [f'  s{n}: {{url: "{url}", secret: "${{SECRET}}"}}\n' for n, url in enumerate(PRIVATE)]
    nowhere.write(SOURCE + "subscriptions:\n" + "".join(lines))
    said = nowhere.refused()
    for n, network in enumerate(("10.1.2.3/32", "127.0.0.1/32", "fd00::7/128", "127.0.0.1/32")):
        (about,) = (line for line in said.splitlines() if f"subscriptions.s{n}.url" in line)
        assert f"line {9 + n}" in about and "a private address is refused" in about
        assert f"allow_networks: [{network}]" in about


def test_a_port_that_is_taken_is_named(shop: Deployment) -> None:
    """GIVEN a program on the port WHEN it goes up THEN the address, and the key to change, are said."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        shop.head = shop.head.replace("127.0.0.1:0", address)
        shop.write(SOURCE)
        said = shop.refused()
    assert address in said and "server.listen" in said and "a free port" in said


def test_state_that_does_not_answer_is_waited_for_and_named_without_its_password(
    shop: Deployment, shop_dsn: str, tmp_path: Path
) -> None:
    """GIVEN no state WHEN it goes up THEN it is waited for, and why is said, and not the password; told to stop it
    waits no longer. How it ends by itself is a test of the command line."""
    shop.env["STATE_DSN"] = with_password(shop_dsn, "shop", port="1")
    waiting = Instance(shop.file, shop.env, tmp_path / "up.log", FORKED)
    until(lambda: "it is waited for" in waiting.log.read_text(), "it says that it waits")
    assert waiting.terminate() == 0
    said = waiting.log.read_text()
    assert "does not answer" in said and "state.dsn" in said and PASSWORD not in said


def test_a_source_that_does_not_answer_is_named_without_its_password_and_ends_nothing(
    shop: Deployment, shop_dsn: str, tmp_path: Path
) -> None:
    """GIVEN a database that does not answer WHEN it goes up THEN log and health say which and why, and it goes on."""
    shop.env["SHOP_DSN"] = with_password(shop_dsn, "shop", port="1")
    running = Instance(shop.file, shop.env, tmp_path / "up.log", FORKED)
    try:
        found = wait_for_health(running, "stale")
        said = running.log.read_text()
        assert "the source cannot be read yet" in said and '"shop"' in said
        assert "does not answer" in found["reason"] and found["hint"]
        assert "Postgres at 127.0.0.1:1/" in found["reason"] and "Postgres at 127.0.0.1:1/" in said
        assert PASSWORD not in said and PASSWORD not in found["reason"]
        assert running.terminate() == 0
    finally:
        running.kill()


def test_a_wrong_password_is_said_without_it(shop: Deployment, shop_dsn: str) -> None:
    """GIVEN a login that the server refuses WHEN it goes up THEN that is said, with where to look."""
    shop.env["SHOP_DSN"] = with_password(shop_dsn, "nobody_here")
    said = shop.refused()
    assert "sources.shop" in said and "refused the login" in said and "pg_hba.conf" in said


@needs_root
def test_a_full_disk_refuses_the_first_start(shop: Deployment, tmp_path: Path) -> None:
    """GIVEN a data folder without room WHEN it goes up for the first time THEN where room is wanted is said."""
    with small_disk(tmp_path / "data", "1m") as disk:
        fill(disk)
        said = shop.refused()
    assert "no space" in said and str(disk) in said and "free some space" in said


def test_a_publication_dropped_by_hand_is_missed_before_anything_is_read(shop: Deployment, shop_dsn: str) -> None:
    """GIVEN events in the slot WHEN somebody dropped the publication THEN its name and the remedy are said."""
    with psycopg.connect(shop_dsn, autocommit=True) as conn:
        conn.execute("drop publication evermark_bad_shop")
    said = shop.refused()
    assert "sources.shop" in said and "publication evermark_bad_shop" in said and "is gone" in said
    assert "evermark source" in said


def test_a_wrong_wal_level_is_said_with_the_command_that_sets_it(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a server with wal_level = replica WHEN installing or going up THEN both say what to set, and to restart."""
    with postgres_server(tmp_path / "replica", {"wal_level": "replica"}) as server:
        deployment = Deployment(tmp_path, server.dsn(), pg_dsn)
        for said in (deployment.refused(), what_it_said(deployment.run("source", "install"))):
            assert "wal_level" in said and "'replica'" in said and f":{server.port}/" in said
            assert "alter system set wal_level = 'logical'" in said and "restart" in said


@contextmanager
def login_role(dsn: str) -> Iterator[str]:
    """The name of a role that may log in, and nothing else."""
    role = f"reader_{psycopg.conninfo.conninfo_to_dict(dsn)['dbname']}"
    with psycopg.connect(dsn, autocommit=True) as conn:
        name, password = sql.Identifier(role), sql.Literal(PASSWORD)
        conn.execute(sql.SQL("create role {} login password {}").format(name, password))
        yield role
        conn.execute(sql.SQL("drop owned by {}").format(name))
        conn.execute(sql.SQL("drop role {}").format(name))


@pytest.fixture(scope="module")
def scene(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All its own on one small disk, a subscription to a private address, and a role that may not read yet."""
    folder = tmp_path_factory.mktemp("scene")
    folder.chmod(0o711)
    with ExitStack() as stack:
        dsn = stack.enter_context(fresh_database(pg_server))
        role = stack.enter_context(login_role(dsn))
        if os.geteuid() == 0:
            stack.enter_context(small_disk(folder / "data", "192m"))
        made = stack.enter_context(ForkedScene(folder, dsn, {"one": None}))
        with made.config.open("a") as file:
            file.write(f'  inside: {{url: "https://{INSIDE or "closed.invalid"}/", secret: "${{SCENE_SECRET}}"}}\n')
        made.env["SHOP_DSN"] = with_password(dsn, role)
        yield made


def give_grants(scene: Scene) -> str:
    """What `source install --print` says the role needs, but for the attribute REPLICATION; the role."""
    role = str(psycopg.conninfo.conninfo_to_dict(scene.env["SHOP_DSN"])["user"])
    printed = scene.run("source", "install", "--print", "--role", role).stdout
    with psycopg.connect(scene.dsn, autocommit=True) as admin:
        admin.execute(printed[printed.index("grant usage") :].encode())
    return role


@pytest.fixture(scope="module")
def running(scene: Scene) -> Instance:
    """The same, with every right, and up."""
    role = give_grants(scene)
    with psycopg.connect(scene.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("alter role {} replication").format(sql.Identifier(role)))
    return scene.up()


def test_a_role_without_permission_is_told_what_it_lacks_and_then_takes_everything(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    """GIVEN a role that lacks grants, then REPLICATION WHEN each is given THEN the next start takes all that waited."""
    order(scene.dsn, 20)
    before = untouched(scene.dsn)

    # WHEN it may not look into the schema
    said = what_it_said(scene.run("up", check=False))
    assert "sources.shop" in said and "permission denied for schema pgstream" in said
    assert "evermark source install --print" in said

    # WHEN it has the grants, but may not use slots
    role = give_grants(scene)
    said = what_it_said(scene.run("up", check=False))
    assert "sources.shop" in said and f"role {role}" in said and "may not read replication slots" in said
    assert "alter role" in said and "replication" in said
    assert untouched(scene.dsn) == before

    # WHEN it has everything
    running: Instance = request.getfixturevalue("running")
    scene.check_complete()
    assert len(scene.logged()) == 20
    assert not running.said(PASSWORD)


@pytest.mark.skipif(INSIDE is None, reason="this machine resolves no name to a private address")
def test_a_name_of_a_private_address_is_refused_when_dialled_and_hurts_nobody_else(
    scene: Scene, running: Instance
) -> None:
    """GIVEN a name behind which is a private address WHEN events come THEN log and list say why; others get theirs."""
    order(scene.dsn, 10)
    scene.check_complete()
    until(lambda: running.said("subscription fell behind"), "the refusal is logged")
    (inside,) = (
        s for s in json.loads(scene.run("subscription", "list", "--json").stdout) if s["url"].startswith("https")
    )
    assert inside["state"] in ("behind", "suspended") and inside["lag_batches"] > 0
    for said in (inside["reason"], running.log.read_text()):
        assert "is not allowed" in said and "allow_networks" in said
    assert shop_health(running)["status"] in ("healthy", "lagging")


@needs_root
def test_a_full_disk_under_a_running_instance_is_said_and_loses_nothing(scene: Scene, running: Instance) -> None:
    """GIVEN log and state on one disk WHEN it is full, and has room again THEN every event arrives, once."""
    disk = scene.folder / "data"
    order(scene.dsn, 10)
    scene.check_complete()

    # WHEN the room runs out, for the log and for the state
    filler = fill(disk)
    order(scene.dsn, 10)
    unwell = wait_for_health(running, "stale")
    assert "no space left" in unwell["reason"].lower() and "free some space" in unwell["hint"]
    failed = running.log.read_text().count("partition failed")
    until(lambda: running.log.read_text().count("partition failed") > failed + 1, "it tries, and says so each time")
    assert shop_health(running)["status"] == "stale", "a full disk must not look healthy between two tries"
    assert unwell["events"] > 0, "what was taken before is not forgotten"

    # WHEN the state server dies of it, too
    def died_and(said: str) -> bool:
        return wear_out_state(disk / "state") and running.said(said)

    until(lambda: died_and("the embedded state server is gone"), "its end is noticed and said")
    # Postgres may try for a minute before it gives up.
    until(lambda: died_and("the embedded state server does not start"), "so is that it does not start", timeout_s=90)
    until(lambda: "state does not answer" in shop_health(running)["reason"], "without state no lease, and that is said")
    assert shop_health(running)["status"] == "stale", "state that cannot be asked is not another owner"
    order(scene.dsn, 10)

    # WHEN there is room again
    filler.unlink()
    scene.check_complete()
    wait_for_health(running, "healthy")
    assert not running.died() and running.terminate() == 0

    # WHEN a deployment that has run before is started without room
    filler = fill(disk)
    said = what_it_said(scene.run("up", check=False))
    assert "no space left" in said and str(disk) in said and "free some space" in said
    filler.unlink()
