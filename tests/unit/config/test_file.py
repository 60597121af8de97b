"""evermark.yaml: what is right is understood, what is wrong is named, and no secret is ever told."""

from __future__ import annotations

import os
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evermark.app.build import endpoint_limits, reading_limits
from evermark.breaker import BreakerLimits
from evermark.checkpoints.kinds import CheckpointConfig, backend_of
from evermark.config import CustomSource
from evermark.config.models import ReliabilityConfig
from evermark.ingest.checkpoint_saver import SavePolicy
from evermark.ingest.dedup import RecentLimits
from evermark.ingest.gaps import GapLimits
from evermark.ingest.limits import ReadingLimits
from evermark.secrets import KeyRef
from evermark.sources.postgres.settings import PostgresSettings, derived_name
from evermark.storage.access import Access
from tests.unit.config.config_file import ENVIRON, FULL, KEY, MINIMAL, WHSEC, read, refused, source, subscription


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def test_the_documented_file_is_understood_as_written(folder: Path) -> None:
    """The file of the reference loads, complete: variables filled in, paths absolute, names derived."""
    config = read(folder, FULL)
    assert config.name == "shop-prod"
    assert config.data == folder / "evermark-data"
    assert config.log.path == config.log_path == "s3://acme/shop"
    assert config.log.retention == timedelta(days=30)
    assert config.state.dsn is not None
    assert config.state.dsn.reveal() == ENVIRON["STATE_DSN"]
    assert config.spark.conf == {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "4"}
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8320)
    shop = config.sources["shop"]
    assert isinstance(shop, PostgresSettings)
    assert shop.target().dsn.open() == ENVIRON["SHOP_DSN"]
    assert [table.name for table in shop.tables] == ["public.orders", "public.users"]
    assert shop.tables[1].exclude == ("password",)
    assert shop.tables[1].hash == ("email",)
    assert shop.slot == shop.publication == derived_name("shop-prod", "shop")
    assert config.subscriptions["billing"].start == "now"


def test_what_is_not_said_has_the_documented_default(folder: Path) -> None:
    """GIVEN only version and name THEN every section stands with its default, below the file's folder."""
    config = read(folder, MINIMAL + "log:\nsources:\nsubscriptions:\n")
    assert config.data == folder / "evermark-data"
    assert config.log.path == str(folder / "evermark-data" / "log")
    assert config.state.dsn is None
    assert config.secrets.key is None
    assert config.spark.master == "local[16,4]"
    assert config.server.listen == "127.0.0.1:8320"
    assert config.sources == {}
    assert config.reliability == ReliabilityConfig()


SEED = """
    reliability:
      # Checkpointing
      checkpoint:
        backend: etcd  # etcd, mongo
        interval: 5s
        event_count: 1000

      # Deduplication
      dedup:
        enabled: true
        cache_size: 10000
        ttl: 3m

      # Gap Detection
      gap_detection:
        enabled: true
        max_gap: 5m

      # Circuit Breaker
      circuit_breaker:
        threshold: 5
        timeout: 30s

      # Shutdown
      shutdown:
        flush_timeout: 10s
        checkpoint_timeout: 5s
"""


def test_s12_the_section_as_it_was_asked_for_loads_and_is_what_nobody_need_write(folder: Path) -> None:
    """GIVEN the section as it was asked for THEN it loads as written, and but for the backend it is the default."""
    asked = read(folder, MINIMAL + textwrap.dedent(SEED))
    assert asked.reliability.checkpoint.backend == "etcd"
    assert asked.reliability.model_copy(update={"checkpoint": CheckpointConfig()}) == ReliabilityConfig()
    assert reading_limits(asked).saving == SavePolicy(5.0, 1000, 5.0)


def test_the_storage_section_is_kept_as_references(folder: Path) -> None:
    """GIVEN secrets behind a variable and a file THEN what reaches the store is told where they are, not what."""
    (folder / "secret").write_text("shh\n")
    section = MINIMAL + (
        "log: {path: s3://acme/logs/}\n"
        "storage: {endpoint: 'http://far:9000/', region: eu-west-1, path_style: false,"
        " access_key: '${KEY_ID}', secret_key: '${file:secret}'}\n"
    )
    config = read(folder, section, {"KEY_ID": "me"})
    assert config.log.path == "s3://acme/logs"
    assert config.storage.access() == Access(
        "http://far:9000",
        "eu-west-1",
        KeyRef("env", "KEY_ID"),
        KeyRef("file", str(folder / "secret")),
        path_style=False,
    )


def test_the_reliability_section_works_as_written(folder: Path) -> None:
    """GIVEN every key of the section THEN the part that acts on it gets the value, in the units it needs."""
    section = """
        version: 1
        name: shop
        reliability:
          checkpoint: {backend: mongo, interval: 7s, event_count: 70}
          dedup: {enabled: true, cache_size: 71, ttl: 72s}
          gap_detection: {enabled: false, max_gap: 73s, small_gap: 74m}
          circuit_breaker: {threshold: 6, timeout: 40s, suspend_after: 8}
          shutdown: {flush_timeout: 11s, checkpoint_timeout: 500ms}
    """
    config = read(folder, section)
    limits = endpoint_limits(config)
    assert (limits.threshold, limits.timeout_s, limits.suspend_after) == (6, 40.0, 8)
    assert backend_of(config.reliability.checkpoint).outside
    assert reading_limits(config) == ReadingLimits(
        SavePolicy(7.0, 70, 0.5), BreakerLimits(6, 40.0), RecentLimits(71, 72.0), GapLimits(False, 73.0, 74 * 60.0)
    )
    assert config.reliability.shutdown.flush_timeout == timedelta(seconds=11)


def test_checkpoints_in_state_never_wait_and_a_cache_can_be_left_out(folder: Path) -> None:
    """GIVEN checkpoints in State THEN each is saved with its commit, whatever the policy; `enabled: false` is heard."""
    limits = reading_limits(read(folder, MINIMAL + "reliability: {checkpoint: {interval: 1h}, dedup: {enabled: no}}\n"))
    assert limits.saving == SavePolicy(last_s=5.0)
    assert limits.recent is None


def test_a_source_of_ones_own_takes_free_options(folder: Path) -> None:
    """`package.module:Class` is not limited to keys we know."""
    text = MINIMAL + "sources:\n  tickets:\n    type: acme.tickets:Tickets\n    options: {team: red, deep: {n: 1}}\n"
    tickets = read(folder, text).sources["tickets"]
    assert isinstance(tickets, CustomSource)
    assert tickets.options == {"team": "red", "deep": {"n": 1}}


def test_paths_are_relative_to_the_file_not_to_the_caller(folder: Path) -> None:
    """Where the program was started from does not matter."""
    config = read(folder, MINIMAL + "data: ../elsewhere\nlog: {path: logs/a}\n")
    assert config.data == folder.parent / "elsewhere"
    assert config.log.path == str(folder / "logs" / "a")


@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200))
@example(value="${STATE_DSN}")
@example(value="a: b # c")
@example(value="$${x}")
@example(value=" yes ")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_through_a_variable_unchanged(folder: Path, value: str) -> None:
    """A variable's value is text: not read as YAML, not expanded again, not trimmed."""
    text = MINIMAL + 'sources:\n  own:\n    type: a.b:C\n    options: {whole: "${V}", inside: "<${V}|${V}>"}\n'
    own = read(folder, text, {"V": value}).sources["own"]
    assert isinstance(own, CustomSource)
    assert own.options == {"whole": value, "inside": f"<{value}|{value}>"}


def option(folder: Path, written: str, environ: dict[str, str]) -> Any:
    own = read(
        folder, MINIMAL + f"sources:\n  own:\n    type: a.b:C\n    options: {{v: {written}}}\n", environ
    ).sources["own"]
    assert isinstance(own, CustomSource)
    return own.options["v"]


def test_defaults_files_and_the_plain_form_are_filled_in(folder: Path) -> None:
    """`:-` gives a default for unset and empty, `file:` reads without the line end, `$${` is plain."""
    (folder / "value").write_text("from a file\n")
    assert option(folder, '"${V:-other}"', {}) == "other"
    assert option(folder, '"${V:-other}"', {"V": ""}) == "other"
    assert option(folder, '"${V:-}"', {}) == ""
    assert option(folder, '"${V:-a:-b}"', {"V": "set"}) == "set"
    assert option(folder, f'"${{file:{folder}/value}}"', {}) == "from a file"
    assert option(folder, '"${file:value}"', {}) == "from a file"
    assert option(folder, '"$${V}"', {"V": "set"}) == "${V}"
    assert option(folder, '"$V and $"', {"V": "set"}) == "$V and $"


def test_numbers_and_lists_may_come_from_variables(folder: Path) -> None:
    """A number in a variable is a number where one is expected."""
    config = read(folder, subscription(bundle='"${N}"', streams='["${S}"]'), {"N": "7", "S": "public.orders"})
    assert config.subscriptions["billing"].bundle == 7
    assert config.subscriptions["billing"].streams == ("public.orders",)


def test_a_missing_variable_names_the_variable_and_the_key(folder: Path) -> None:
    """The operator learns what to set and where it is wanted."""
    error = refused(folder, source(dsn='"${SHOP_DSN}"'), {})
    assert "line 6: sources.shop.dsn: the variable SHOP_DSN is not set" in error.message
    assert "export SHOP_DSN" in error.hint


def test_all_missing_variables_and_other_problems_are_told_at_once(folder: Path) -> None:
    """One run shows everything to correct, in the order of the file."""
    error = refused(folder, FULL.replace("start: now", "strat: now").replace("bundle: 1", "bundle: many"), {})
    told = error.message
    wanted = [
        "state.dsn: the variable STATE_DSN is not set",
        "secrets.key: the variable EVERMARK_KEY is not set",
        "sources.shop.dsn: the variable SHOP_DSN is not set",
        "sources.shop.strat: unknown key; did you mean start?",
        "subscriptions.billing.secret: the variable BILLING_SECRET is not set",
        "subscriptions.billing.bundle: expected a whole number",
    ]
    at = [told.index(text) for text in wanted]
    assert at == sorted(at)
    assert "6 problems" in told


@pytest.mark.parametrize("written", ["${", "${}", "${A", "${1A}", "${A B}", "${A-b}", "${file:}", "a ${A:+b}"])
def test_a_malformed_variable_is_an_error_not_a_value(folder: Path, written: str) -> None:
    """Nothing that looks like a variable is passed on as it stands."""
    error = refused(folder, source(dsn=f'"{written}"'), {"A": "x"})
    assert "sources.shop.dsn" in error.message
    assert "${NAME}" in error.hint


def test_a_file_that_cannot_be_read_is_named_with_its_key(folder: Path) -> None:
    """Absent, a folder, a pipe, too large, not text: each is told, none hangs."""
    os.mkfifo(folder / "pipe")
    (folder / "huge").write_bytes(b"x" * 100_000)
    (folder / "binary").write_bytes(b"\xff\xfe\xfd")
    for name in ("absent", "", "pipe", "huge", "binary"):
        error = refused(folder, source(dsn=f'"${{file:{folder}/{name}}}"'))
        assert "sources.shop.dsn" in error.message
        assert f"{folder}/{name}".rstrip("/") in error.message


@pytest.mark.parametrize(
    "text",
    [
        subscription(url='"${V}"'),
        subscription(url='"http://${V}/"'),
        subscription(secret='"${V}"'),
        subscription(from_='"${V}"'),
        subscription(ops='["${V}"]'),
        subscription(bundle='"${V}"'),
        subscription(timeout='"${V}"'),
        subscription(rate='"${V}"'),
        subscription(body='"${V}"'),
        subscription(body_limit='"${V}"'),
        subscription(ordered='"${V}"'),
        subscription(allow_networks='["${V}"]'),
        subscription(headers='{X-A: "${V}\\n"}'),
        source(dsn='"${V}"'),
        source(type='"${V}"'),
        source(mode='"${V}"'),
        source(slot='"${V}"'),
        source(tables='["${V}", "${V}"]'),
        MINIMAL + 'data: "${V}://x"\n',
        MINIMAL + 'log: {path: "${V}://x", retention: "${V}"}\n',
        MINIMAL + 'server: {listen: "${V}"}\n',
        MINIMAL + 'state: {dsn: "${V}"}\n',
        'version: 1\nname: "${V}"\n',
    ],
)
def test_no_error_tells_a_value_that_came_from_a_variable(folder: Path, text: str) -> None:
    """GIVEN any key filled from a variable WHEN its value is wrong THEN neither error nor cause shows it."""
    value = "10.9.8.7:hunter2!!"
    error = refused(folder, text, {"V": value})
    assert "hunter2" not in str(error) + repr(error)
    assert "10.9.8.7" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_a_refused_address_from_a_variable_is_not_told(folder: Path) -> None:
    """The line to add names the address only when the file does."""
    error = refused(folder, subscription(url='"http://${V}/"'), {"V": "10.9.8.7"})
    assert "a private address is refused" in error.message
    assert "allow_networks" in error.hint
    assert "10.9.8.7" not in str(error)


def test_no_model_shows_its_values(folder: Path) -> None:
    """A config in a log line or a traceback tells which keys are set, and nothing else."""
    config = read(folder, FULL)
    shown = f"{config} {config!r} {config.sources} {config.subscriptions} {config.model_dump()['sources']}"
    for secret in ("statepass", "shoppass", WHSEC, KEY):
        assert secret not in shown + repr(config.model_dump()) + config.model_dump_json()
