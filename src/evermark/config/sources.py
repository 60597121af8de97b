"""The `sources:` section. Each type of source brings its own settings; this module only finds them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo

from evermark.config.fields import Model, refusal
from evermark.config.problems import Problem, nearest
from evermark.secrets import SecretBox

# By name: the settings of a kind build on this package.
_KINDS = "evermark.sources.kinds"


class SourceConfig(Model):
    """What all sources have. The settings of a kind are a subclass, which its `SourceKind` names."""

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

    def without_effect(self) -> Iterator[Problem]:
        """Settings that are understood and change nothing in this version."""
        yield from ()

    def streams_named(self) -> frozenset[str]:
        """The streams that the source will have, as far as the settings name them."""
        return frozenset()

    def listed(self) -> dict[str, Any]:
        """What `evermark source list` shows of the settings. Never a secret."""
        return {}


class CustomSource(SourceConfig):
    """`type: package.module:Class`: the class is called with `options` as keyword arguments."""

    options: Annotated[dict[str, Any], Field(max_length=200)] = Field(default_factory=dict)


def source_config(value: Any, info: ValidationInfo) -> SourceConfig:
    """The settings of one source, by its type."""
    if isinstance(value, SourceConfig):
        return value
    if not isinstance(value, dict):
        raise refusal("expected a mapping of keys to values", hint="begin with: type: postgres")
    kinds = importlib.import_module(_KINDS)
    name, choice = value.get("type"), f"one of {', '.join(kinds.KINDS)}, or package.module:Class"
    if name is None:
        raise refusal("is required", hint=choice, at=("type",))
    kind = kinds.kind_named(name)
    if kind is not None:
        found: SourceConfig = kind.settings.model_validate(value, context=info.context)
        return found
    near = nearest(name, kinds.KINDS) if isinstance(name, str) else None
    raise refusal(
        f"expected {choice}",
        hint_showing_value=f"did you mean {near}?" if near else "",
        at=("type",),
    )
