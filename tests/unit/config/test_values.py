"""The values of evermark.yaml: each is checked, and told with its path and what is expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from evermark.cli.main import app
from evermark.config.addresses import is_public
from evermark.sources.postgres.settings import PostgresSettings, derived_name
from tests.unit.config.config_file import MINIMAL, read, refused, source, subscription

STORED = MINIMAL + "log: {path: 's3://acme/shop'}\n"


def etcd(settings: str) -> str:
    return MINIMAL + f"reliability: {{checkpoint: {{backend: etcd, etcd: {{{settings}}}}}}}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version: 1\n", "name: is required"),
        ("version: 1\nname: Shop\n", "name: must have the form"),
        ("version: 1\nname: no\n", "name: expected text"),
        ("version: 1\nname: " + "a" * 32 + "\n", "name: must have the form"),
        (MINIMAL + "data: s3://a/b\n", "data: expected the path of a local folder"),
        (MINIMAL + "log: {path: 'http://a/b'}\n", "log.path: expected a local path or one of s3://"),
        (MINIMAL + "log: {path: 's3://'}\n", "log.path: expected a bucket"),
        (MINIMAL + "log: {path: 's3://key:secret@a/b'}\n", "log.path: expected a bucket"),
        (MINIMAL + "log: {path: 's3a://acme/shop'}\n", "log.path: expected a local path or one of s3://"),
        (MINIMAL + "log: {path: 's3://acme/a b'}\n", "log.path: a bucket and the path in it have letters"),
        (MINIMAL + "log: {path: 's3://acme/a%20b'}\n", "log.path: a bucket and the path in it have letters"),
        (MINIMAL + "log: {path: 's3://acme/../b'}\n", "log.path: a bucket and the path in it have letters"),
        (MINIMAL + "storage: {region: eu-west-1}\n", "storage: it says how a bucket of S3 is reached"),
        (STORED + "storage: {endpoint: 'far:9000'}\n", "storage.endpoint: expected http://host:port"),
        (STORED + "storage: {endpoint: 'http://me:pass@far'}\n", "storage.endpoint: expected http://host:port"),
        (STORED + "storage: {region: 'eu west'}\n", "storage.region: must have the form"),
        (STORED + "storage: {access_key: AKIA123}\n", "storage.access_key: a key is given by reference only"),
        (STORED + "storage: {secret_key: '${NOWHERE}'}\n", "storage.secret_key: the variable NOWHERE is not set"),
        (
            STORED + "storage: {access_key: '${file:evermark.yaml}'}\n",
            "storage.secret_key: is required beside access_key",
        ),
        (STORED + "storage: {bucket: b}\n", "storage.bucket: unknown key"),
        (MINIMAL + "log: {retention: 30}\n", "log.retention: expected a number with a unit"),
        (MINIMAL + "log: {retention: 1s}\n", "log.retention: must be between 1h and 36500d"),
        (MINIMAL + "log: yes\n", "log: expected a mapping"),
        (MINIMAL + "state: {dsn: 'mysql://x'}\n", "state.dsn: expected a Postgres address"),
        *(
            (MINIMAL + f"state: {{dsn: '{dsn}'}}\n", "state.dsn: this Postgres address names no host or port")
            for dsn in (
                "postgresql://me:pa@ss@127.0.0.1:5432/shop",
                "postgres://me:p@/ss@127.0.0.1/shop",
                "postgresql://me:pa/ss@127.0.0.1:5432/shop",
                "postgresql://127.0.0.1:port/shop",
                "postgresql://a:1,b:x/shop",
            )
        ),
        (MINIMAL + "secrets: {key: written out in the file}\n", "secrets.key: a key is given by reference only"),
        (MINIMAL + "secrets: {key: 12345678901234567890}\n", "secrets.key: a key is given by reference only"),
        (MINIMAL + "server: {listen: '8320'}\n", "server.listen: expected host:port"),
        (MINIMAL + "server: {listen: 'a:70000'}\n", "server.listen: expected host:port"),
        (MINIMAL + "sources: [a]\n", "sources: expected a mapping"),
        (MINIMAL + "sources: {shop: }\n", "sources.shop: expected a mapping"),
        (MINIMAL + "sources: {shop: {}}\n", "sources.shop.type: is required"),
        (MINIMAL + "sources: {Shop: {type: 'a:B'}}\n", "sources.Shop"),
        (MINIMAL + "sources: {shop: {type: postgres}}\n", "sources.shop.dsn: is required"),
        (
            source(type="postgre"),
            "sources.shop.type: expected one of postgres, blocks, mongo, replica, or package.module:Class",
        ),
        (source(mode="outbux"), "sources.shop.mode: expected one of 'outbox' or 'tables'"),
        (source(tables="[a, public.a]"), "sources.shop.tables[1]: this table stands here twice"),
        (
            source(mode="tables", tables="['a.\"b.c\"', '\"a.b\".c']"),
            "sources.shop.tables[1]: its stream would be that of a table before it",
        ),
        (source(mode="tables"), "sources.shop.tables: mode: tables needs tables"),
        (source(mode="tables", tables="[a]", slots="2"), "sources.shop.slots: is for mode: outbox"),
        (source(mode="tables", tables="[a]", schema="x"), "sources.shop.schema: is for mode: outbox"),
        (
            source(mode="tables", tables="[a]", events_retention="2d"),
            "sources.shop.events_retention: is for mode: outbox",
        ),
        (source(tables="[{name: a, columns: [b]}]"), "sources.shop.tables[0].columns: is for mode: tables"),
        (source(tables="[{name: a, where: 'b > 1'}]"), "sources.shop.tables[0].where: is for mode: tables"),
        (
            source(mode="tables", tables="[{name: a, columns: [b], exclude: [c]}]"),
            "sources.shop.tables[0].exclude: either the columns to take are named, or those to leave out",
        ),
        (
            source(mode="tables", tables="[{name: a, columns: [b], hash: [c]}]"),
            "sources.shop.tables[0].hash: a column to hash is not among the columns to take",
        ),
        (source(tables="['a.b.c']"), "sources.shop.tables[0]: expected a table"),
        (source(tables="[public.Orders]"), "sources.shop.tables[0]: capitals without quotes mean small letters"),
        (source(tables="[public.order items]"), "sources.shop.tables[0]: a name like this needs double quotes"),
        (source(tables="[{name: '\"Orders\"'}, 'public.\"Orders\"']"), "tables[1]: this table stands here twice"),
        (source(tables="[{name: a, exclude: [b], hash: [b]}]"), "tables[0].hash: a column cannot be both"),
        (source(slot="Bad-Slot"), "sources.shop.slot: must have the form"),
        (subscription(bundle="0"), "billing.bundle: must be at least 1"),
        (subscription(bundle="1001"), "billing.bundle: must be at most 1000"),
        (subscription(bundle="yes"), "billing.bundle: expected a number"),
        (subscription(bundle="1.5"), "billing.bundle: expected a whole number"),
        (subscription(ordered="maybe"), "billing.ordered: expected true or false"),
        (subscription(streams="public.orders"), "billing.streams: expected a list"),
        (subscription(ops="[upsert]"), "billing.ops[0]: expected one of 'insert'"),
        (subscription(ops="[insert, poison]"), "billing.ops[1]: events of this operation are never delivered"),
        (subscription(from_="yesterday"), "billing.from: expected now, beginning, or a time"),
        (subscription(timeout="0s"), "billing.timeout: must be between 100ms and 5m"),
        (subscription(rate="-1"), "billing.rate: expected a rate between"),
        (subscription(rate="1" + "0" * 400), "billing.rate: expected a rate between"),
        (subscription(rate=".nan"), "billing.rate: expected a rate between"),
        (subscription(rate="10/d"), "billing.rate: expected a number of requests"),
        (subscription(body_limit="1"), "billing.body_limit: must be between"),
        (subscription(body_limit="1 elephant"), "billing.body_limit: expected a number of bytes"),
        (subscription(retry_waits="[5s, 10ms]"), "billing.retry_waits[1]: must be between 1s and 7d"),
        (subscription(retry_waits="[]"), "billing.retry_waits: must have at least 1 entries"),
        (subscription(parked_limit="0"), "billing.parked_limit: must be at least 1"),
        (subscription(allow_networks="[10.0.0.1/8]"), "billing.allow_networks[0]: expected a network"),
        (subscription(headers="{webhook-id: a}"), "billing.headers.webhook-id: this header is set by evermark"),
        (subscription(headers="{Content-Length: '1'}"), "headers.Content-Length: this header is set by evermark"),
        (subscription(headers='{X-A: "a\\r\\nX-B: b"}'), "billing.headers.X-A: a header's value must be one line"),
        (subscription(headers='{X-A: "Müller"}'), "billing.headers.X-A: a header's value must be one line"),
        (subscription(headers='{"X A": b}'), "a header's name has characters"),
        (subscription(headers="{X-A: a, x-a: b}"), "billing.headers.x-a: this header stands here twice"),
        (subscription(secret="whsec_short"), "billing.secret: expected whsec_"),
        (subscription(secret="plain-text-secret-of-some-length"), "billing.secret: expected whsec_"),
        (subscription(secret="no"), "billing.secret: expected text"),
        (subscription(secret="[]"), "billing.secret: is required"),
        (
            MINIMAL + "reliability: {gap_detection: {max_gap: 2h, small_gap: 1h}}\n",
            "reliability.gap_detection.small_gap: must not be less than max_gap",
        ),
        (
            MINIMAL + "reliability: {checkpoint: {backend: zookeeper}}\n",
            "expected one of postgres, etcd, mongo, memory",
        ),
        (etcd("endpoints: ftp://host"), "checkpoint.etcd.endpoints: expected the address of a member"),
        (etcd("endpoints: ['http://me:pw@host:1']"), "checkpoint.etcd.endpoints[0]: expected the address of a member"),
        (etcd("endpoints: []"), "checkpoint.etcd.endpoints: must have at least 1 entries"),
        (etcd("prefix: no-slash"), "checkpoint.etcd.prefix: expected names that end with /"),
        (etcd("user: me"), "checkpoint.etcd.user: user and password come together"),
        (etcd("ca: ca.pem"), "checkpoint.etcd.ca: expected the absolute path of a file"),
        (etcd("cert: /a"), "checkpoint.etcd.cert: cert and key come together"),
        (
            MINIMAL + "reliability: {checkpoint: {mongo: {url: 'http://host'}}}\n",
            "reliability.checkpoint.mongo.url: expected the address of a deployment",
        ),
        (source(start="copy"), "sources.shop.start: copy is for mode: tables"),
    ],
)
def test_a_wrong_value_is_told_with_its_path_and_what_is_expected(folder: Path, text: str, told: str) -> None:
    """Every check of a value, one by one."""
    assert told in refused(folder, text).message


@pytest.mark.parametrize("password", ["pa@ssSECRET", "SECRET/pa", "SECRET/@"])
def test_a_password_that_an_address_cannot_hold_as_it_is_is_not_shown(folder: Path, password: str) -> None:
    """GIVEN a password with a sign that ends it in an address WHEN read THEN it is said how to write it, not what."""
    error = refused(folder, source(dsn=f"'postgresql://me:{password}@127.0.0.1:5432/shop'"))
    assert "SECRET" not in str(error) + error.hint and "%40" in error.hint
    read(folder, source(dsn="'postgresql://me:pa%40ss%2F@[::1]:5432,db.example/shop?sslmode=require'"))


def test_a_missing_or_bad_signing_secret_says_how_to_make_one(folder: Path) -> None:
    """The hint is a command whose output is accepted."""
    without = refused(folder, MINIMAL + "subscriptions: {billing: {url: 'https://a.example/'}}\n")
    assert "subscriptions.billing.secret: is required" in without.message
    for hint in (without.hint, refused(folder, subscription(secret="nonsense")).hint):
        command = re.search(r"make one with: evermark (\w+ \w+)", hint)
        assert command is not None
        printed = CliRunner().invoke(app, command[1].split()).stdout.strip()
        read(folder, subscription(secret=printed))


def test_a_time_to_start_from_is_kept_in_utc(folder: Path) -> None:
    """A date, a local time and a zoned one all mean one instant."""
    for written, kept in (
        ("2026-11-01", "2026-11-01T00:00:00Z"),
        ("2026-11-01T12:00:00", "2026-11-01T12:00:00Z"),
        ("2026-11-01T12:00:00+02:00", "2026-11-01T10:00:00Z"),
        ("beginning", "beginning"),
    ):
        assert read(folder, subscription(from_=written)).subscriptions["billing"].start == kept


@pytest.mark.parametrize(
    ("url", "networks"),
    [
        ("https://billing.example/hooks", "[]"),
        ("https://93.184.216.34/", "[]"),
        ("https://[2606:4700::1111]:8443/", "[]"),
        ("https://10.1.2.3/", "[10.0.0.0/8]"),
        ("http://127.0.0.1:9000/", "[127.0.0.0/8]"),
        ("http://localhost:9000/", "[127.0.0.0/8]"),
        ("http://[::1]:9000/", "['::1']"),
        ("http://[::ffff:127.0.0.1]/", "[127.0.0.0/8]"),
        ("http://receiver.internal/", "[10.0.0.0/8]"),
    ],
)
def test_https_and_allowed_networks_are_accepted(folder: Path, url: str, networks: str) -> None:
    """Public receivers by https, private ones where the operator allowed their network."""
    assert read(folder, subscription(url=f"'{url}'", allow_networks=networks)).subscriptions["billing"].url == url


@pytest.mark.parametrize(
    ("url", "networks", "hint"),
    [
        ("http://127.0.0.1:9000/", "[]", "allow_networks: [127.0.0.1/32]"),
        ("https://127.0.0.1:9000/", "[]", "allow_networks: [127.0.0.1/32]"),
        ("http://127.0.0.1:9000/", "[10.0.0.0/8]", "allow_networks: [127.0.0.1/32]"),
        ("http://localhost/", "[]", "allow_networks: [127.0.0.1/32]"),
        ("https://[::1]/", "[]", "allow_networks: [::1/128]"),
        ("https://169.254.169.254/latest", "[]", "allow_networks: [169.254.169.254/32]"),
        ("https://[::ffff:10.0.0.1]/", "[]", "allow_networks: ["),
        ("https://[64:ff9b::a00:1]/", "[]", "allow_networks: ["),
        ("https://100.64.0.1/", "[]", "allow_networks: [100.64.0.1/32]"),
        ("http://93.184.216.34/", "[]", "use https"),
        ("http://billing.example/", "[]", "use https"),
        ("ftp://billing.example/", "[10.0.0.0/8]", ""),
        ("https:///nohost", "[]", ""),
        ("https://user:hunter2@billing.example/", "[]", "headers"),
        ("https://billing.example/#part", "[]", ""),
        ("https://billing.example/a b", "[]", ""),
        ("https://billing.example:99999/", "[]", ""),
    ],
)
def test_a_refused_address_prints_the_line_to_add(folder: Path, url: str, networks: str, hint: str) -> None:
    """Private addresses and http are refused before anything is sent, with what to do about it."""
    error = refused(folder, subscription(url=f"'{url}'", allow_networks=networks))
    assert "subscriptions.billing.url: " in error.message
    assert hint in error.hint
    assert "hunter2" not in str(error)


@given(host=st.integers(0, 2**32 - 1))
def test_no_wrapped_private_address_counts_as_public(host: int) -> None:
    """IPv4 inside IPv6 is judged as the IPv4 it is; translated prefixes are never public."""
    import ipaddress

    plain = ipaddress.IPv4Address(host)
    assert is_public(ipaddress.IPv6Address(f"::ffff:{plain}")) == is_public(plain)
    assert not is_public(ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + host))


NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,30}", fullmatch=True)
SOURCE_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,40}", fullmatch=True)


@given(first=st.tuples(NAMES, SOURCE_NAMES), second=st.tuples(NAMES, SOURCE_NAMES))
@example(first=("shop", "eu_orders"), second=("shop-eu", "orders"))
@example(first=("shop_eu", "orders"), second=("shop-eu", "orders"))
@example(first=("a" * 31, "b" * 41), second=("a" * 31, "b" * 40 + "c"))
def test_no_two_sources_share_a_slot(first: tuple[str, str], second: tuple[str, str]) -> None:
    """Different deployments or sources have different slots, and every name is one Postgres takes."""
    for name in (derived_name(*first), derived_name(*second)):
        assert re.fullmatch(r"[a-z0-9_]{1,63}", name)
    assert (derived_name(*first) == derived_name(*second)) == (first == second)


def test_a_plain_deployment_has_a_plain_slot_and_a_given_one_wins(folder: Path) -> None:
    """The documented form, and the way around it."""
    assert derived_name("shop", "orders") == "evermark_shop_orders"
    shop = read(folder, source(slot="mine")).sources["shop"]
    assert isinstance(shop, PostgresSettings)
    assert (shop.slot, shop.publication) == ("mine", "evermark_shop_shop")
