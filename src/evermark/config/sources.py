"""The `sources:` section. Each type of source brings its own settings; this module only finds them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo

from evermark.config.fields import Model, refusal
from evermark.config.problems import Problem, nearest
from evermark.secrets import SecretBox

# By name, so that reading a file imports only the sources it uses, and sources may build on this package.
BUILT_IN = {
    "postgres": "evermark.sources.postgres.settings:PostgresSettings",
    "blocks": "evermark.sources.blocks.settings:BlocksSettings",
}

_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class SourceConfig(Model):
    """What all sources have. A type's own settings are a subclass, named in `BUILT_IN`."""

    type: Annotated[str, Field(max_length=400)]

    def named(self, deployment: str, source: str) -> Self:
        """With the defaults that depend on what the deployment and the source are called."""
        return self

    def sealed(self, box: SecretBox) -> Self:
        """With every secret sealed: the only form that may be pickled, put into options or sent to executors."""
        return self

    def unsupported(self) -> Iterator[Problem]:
        """Settings that are understood and cannot be done yet."""
        yield from ()


class CustomSource(SourceConfig):
    """`type: package.module:Class`: the class is called with `options` as keyword arguments."""

    options: Annotated[dict[str, Any], Field(max_length=200)] = Field(default_factory=dict)


def source_config(value: Any, info: ValidationInfo) -> SourceConfig:
    """The settings of one source, by its type."""
    if isinstance(value, SourceConfig):
        return value
    if not isinstance(value, dict):
        raise refusal("expected a mapping of keys to values", hint="begin with: type: postgres")
    kind = value.get("type")
    if kind is None:
        raise refusal("is required", hint=f"one of {', '.join(BUILT_IN)}, or package.module:Class", at=("type",))
    return _model(kind).model_validate(value, context=info.context)


def _model(kind: Any) -> type[SourceConfig]:
    if isinstance(kind, str) and kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        found: type[SourceConfig] = getattr(importlib.import_module(module), name)
        return found
    if isinstance(kind, str) and _CLASS_PATH.fullmatch(kind):
        return CustomSource
    near = nearest(kind, BUILT_IN) if isinstance(kind, str) else None
    raise refusal(
        f"expected one of {', '.join(BUILT_IN)}, or package.module:Class",
        hint_showing_value=f"did you mean {near}?" if near else "",
        at=("type",),
    )
