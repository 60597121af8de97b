"""The kind of `type: package.module:Class`: a source that a user of Evermark wrote."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from evermark.errors import ConfigError
from evermark.sources.base import Source
from evermark.sources.kinds import SourceContext, SourceKind
from evermark.sources.settings import SourceConfig


class CustomSource(SourceConfig):
    """`type: package.module:Class`: the class is called with `options` as keyword arguments."""

    options: Annotated[dict[str, Any], Field(max_length=200)] = Field(default_factory=dict)


class OwnClassKind(SourceKind[CustomSource]):
    settings = CustomSource

    def make(self, settings: CustomSource, context: SourceContext) -> Source:
        with _said(settings, context.source):
            made = _named(settings)(**settings.options)
        if not isinstance(made, Source):
            raise ConfigError(
                f"sources.{context.source}: {settings.type} is not an evermark.Source", hint="subclass evermark.Source"
            )
        return made

    def require(self, settings: CustomSource, source: str) -> None:
        with _said(settings, source):
            _named(settings)


def _named(settings: CustomSource) -> Callable[..., Any]:
    module, _, class_name = settings.type.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), class_name)
    return found


@contextmanager
def _said(settings: CustomSource, source: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"sources.{source}: {settings.type} cannot be made: {error}",
            hint="it must be importable where `evermark up` runs, and take the keys under `options`",
        ) from error


KIND = OwnClassKind()
