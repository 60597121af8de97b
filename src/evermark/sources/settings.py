"""What the settings of every source have."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from evermark.secrets import SecretBox
from evermark.settings.fields import Model


class SourceConfig(Model):
    """What all sources have. The settings of a kind are a subclass, which its `SourceKind` names."""

    type: Annotated[str, Field(max_length=400)]

    def named(self, deployment: str, source: str) -> Self:
        """With the defaults that depend on what the deployment and the source are called."""
        return self

    def sealed(self, box: SecretBox) -> Self:
        """With every secret sealed: the only form that may be pickled, put into options or sent to executors."""
        return self

    def streams_named(self) -> frozenset[str]:
        """The streams that the source will have, as far as the settings name them."""
        return frozenset()

    def listed(self) -> dict[str, Any]:
        """What `evermark source list` shows of the settings. Never a secret."""
        return {}
