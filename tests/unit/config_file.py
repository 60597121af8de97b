"""Writing small configuration files and reading them back."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from evermark.config import Config, load
from evermark.errors import ConfigError

WHSEC = "whsec_" + "A" * 43 + "="
KEY = "a key that nobody will ever guess"
ENVIRON = {
    "STATE_DSN": "postgresql://state:statepass@db/state",
    "SHOP_DSN": "postgresql://shop:shoppass@db/shop",
    "BILLING_SECRET": WHSEC,
    "EVERMARK_KEY": KEY,
    "OPS_TOKEN": "t" * 32,
}
MINIMAL = "version: 1\nname: shop\n"
FULL = """
    version: 1
    name: shop-prod
    data: ./evermark-data
    log:   {path: s3://acme/shop, retention: 30d}
    state: {dsn: "${STATE_DSN}"}
    secrets: {key: "${EVERMARK_KEY}"}
    spark: {master: "local[16,4]", conf: {spark.ui.enabled: false, spark.sql.shuffle.partitions: 4}}
    server: {listen: "127.0.0.1:8320"}
    sources:
      shop:
        type: postgres
        dsn: "${SHOP_DSN}"
        mode: outbox
        start: now
        tables: [public.orders, {name: public.users, exclude: [password], hash: [email]}]
    subscriptions:
      billing:
        url: https://billing.example/hooks
        secret: "${BILLING_SECRET}"
        streams: [public.orders]
        where: "op = 'insert' and data.total > 100"
        from: now
        ordered: false
        bundle: 1
        allow_networks: []
"""


def read(folder: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    path = folder / "evermark.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load(path, ENVIRON if environ is None else environ)


def refused(folder: Path, text: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, environ)
    return caught.value


def subscription(**keys: str) -> str:
    given_keys = {"url": "https://billing.example/hooks", "secret": f'"{WHSEC}"'} | {
        key.removesuffix("_"): value for key, value in keys.items()
    }
    return (
        MINIMAL + "subscriptions:\n  billing:\n" + "".join(f"    {key}: {value}\n" for key, value in given_keys.items())
    )


def source(**keys: str) -> str:
    given_keys = {"type": "postgres", "dsn": "postgresql://db/shop"} | keys
    return MINIMAL + "sources:\n  shop:\n" + "".join(f"    {key}: {value}\n" for key, value in given_keys.items())
