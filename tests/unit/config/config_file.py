"""Writing small configuration files and reading them back."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from evermark.config import Config, load
from evermark.errors import ConfigError
from evermark.settings.fields import Model
from evermark.sources.kinds import KINDS, kind_named
from evermark.sources.own_class import CustomSource

WHSEC = "whsec_" + "A" * 43 + "="
KEY = "a key that nobody will ever guess"
ENVIRON = {
    "STATE_DSN": "postgresql://state:statepass@db/state",
    "SHOP_DSN": "postgresql://shop:shoppass@db/shop",
    "BILLING_SECRET": WHSEC,
    "EVERMARK_KEY": KEY,
    "OPS_TOKEN": "t" * 32,
    "S3_ACCESS_KEY": "AKIA0123",
    "S3_SECRET_KEY": "s3secret",
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


def models_in(annotation: Any) -> Iterator[type[Model]]:
    """The models that a type is made of: `dict[str, LogConfig] | None` has one."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        yield annotation
    for part in get_args(annotation) if get_origin(annotation) is not None else ():
        yield from models_in(part)


def every_model() -> list[type[Model]]:
    """Every mapping that evermark.yaml may have, whatever the kind of its sources. Derived: none is forgotten."""
    found: dict[type[Model], None] = {}
    kinds = [kind.settings for name in KINDS if (kind := kind_named(name)) is not None]
    waiting: list[type[Model]] = [Config, CustomSource, *kinds]
    while waiting:
        model = waiting.pop()
        if model not in found:
            found[model] = None
            waiting += [each for field in model.model_fields.values() for each in models_in(field.annotation)]
    return list(found)


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
