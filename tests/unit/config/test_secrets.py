"""Secrets of evermark.yaml: what leaves the process is sealed."""

from __future__ import annotations

import pickle
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evermark.secrets import KeyRef, Sealed, SecretBox
from evermark.sources.postgres.settings import PostgresSettings
from tests.unit.config.config_file import ENVIRON, FULL, KEY, MINIMAL, WHSEC, read, refused, subscription


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@pytest.fixture
def box(tmp_path: Path) -> SecretBox:
    path = tmp_path / "key"
    path.write_text(KEY)
    return SecretBox(KeyRef("file", str(path)))


def test_the_key_is_kept_as_a_reference_however_it_was_given(folder: Path) -> None:
    """Variable or file: the config holds where the key is, never what it is."""
    (folder / "key").write_text(KEY)
    by_name = read(folder, MINIMAL + 'secrets: {key: "${EVERMARK_KEY}"}\n')
    by_file = read(folder, MINIMAL + f'secrets: {{key: "${{file:{folder}/key}}"}}\n')
    beside = read(folder, MINIMAL + 'secrets: {key: "${file:key}"}\n')
    assert by_name.secrets.key == KeyRef("env", "EVERMARK_KEY")
    assert by_file.secrets.key == beside.secrets.key == KeyRef("file", str(folder / "key"))
    assert KEY.encode() not in pickle.dumps((by_name, by_file))


def test_a_key_that_is_too_short_is_found_at_loading(folder: Path) -> None:
    """Not only when the first secret is sealed; and the key is not told."""
    error = refused(folder, MINIMAL + 'secrets: {key: "${K}"}\n', {"K": "tooshort"})
    assert "secrets.key: the key in env:K is too short" in error.message
    assert "tooshort" not in str(error)


@given(password=st.text(string.ascii_letters + string.digits, min_size=8, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pickled_settings_never_contain_the_password(folder: Path, box: SecretBox, password: str) -> None:
    """GIVEN a source WHEN sealed THEN its pickle opens elsewhere and holds no password; unsealed it does not pickle."""
    password = "Zq9" + password  # so that it is no word of the settings themselves
    dsn = f"postgresql://shop:{password}@db/shop"
    shop = read(folder, FULL, ENVIRON | {"SHOP_DSN": dsn}).sources["shop"]
    with pytest.raises(TypeError, match="seal it"):
        pickle.dumps(shop)
    sealed = shop.sealed(box)
    pickled = pickle.dumps(sealed)
    assert password.encode() not in pickled
    assert dsn.encode() not in pickled
    arrived = pickle.loads(pickled)
    assert isinstance(arrived, PostgresSettings)
    assert isinstance(arrived.dsn, Sealed)
    assert arrived.target().dsn.open() == dsn
    assert arrived.sealed(box) == arrived
    assert password not in repr(arrived) + repr(arrived.model_dump())


def test_a_subscription_becomes_a_spec_with_its_secrets_sealed(folder: Path, box: SecretBox) -> None:
    """Every wish is carried over; the secrets open only with the key."""
    second = "whsec_" + "B" * 43 + "="
    text = subscription(
        secret=f"['{WHSEC}', '{second}']",
        streams="[public.orders]",
        ops="[insert, delete]",
        where='"data.total > 1"',
        from_="beginning",
        ordered="true",
        bundle="50",
        concurrency="5",
        timeout="2500ms",
        rate="600/m",
        headers="{X-Team: billing}",
        body="cloudevents",
        allow_networks="[10.0.0.0/8, 192.168.1.7]",
        body_limit="64KiB",
        parked_limit="7",
        retry_waits="[1s, 90m]",
    )
    spec = read(folder, text).subscriptions["billing"].to_spec("billing", box)
    assert [box.open(sealed) for sealed in spec.secrets] == [WHSEC, second]
    assert WHSEC not in repr(spec)
    assert (spec.name, spec.url, spec.start, spec.ordered, spec.bundle) == (
        "billing",
        "https://billing.example/hooks",
        "beginning",
        True,
        50,
    )
    assert (spec.streams, spec.ops, spec.where) == (("public.orders",), ("insert", "delete"), "data.total > 1")
    assert (spec.concurrency, spec.timeout_s, spec.rate_per_s) == (5, 2.5, 10.0)
    assert {name: box.open(value) for name, value in spec.headers.items()} == {"X-Team": "billing"}
    assert spec.allow_networks == ("10.0.0.0/8", "192.168.1.7/32")
    assert (spec.body, spec.body_bytes_max, spec.parked_max) == ("cloudevents", 65536, 7)
    assert spec.retry_waits_s == (1.0, 5400.0)
