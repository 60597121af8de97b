"""How etcd is reached: the same keys wherever a file names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from evermark.secrets import HIDDEN, Sealed, Secret, SecretBox
from evermark.settings.fields import Model, refusal, secret_of

_PREFIX = re.compile(r"/?(?:[A-Za-z0-9_.$-]+/)+", re.ASCII)


def _endpoint(text: str) -> str:
    try:
        at = urlsplit(text)
        whole = at.scheme in {"http", "https"} and at.hostname and at.port != 0
    except ValueError:
        whole = False
    if not whole or "@" in text or at.path.strip("/") or at.query:
        raise refusal(
            "expected the address of a member, for example http://127.0.0.1:2379",
            hint="a user and a password have keys of their own: user, password",
        )
    return text


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text) or len(text) > 512:
        raise refusal("expected names that end with /, for example /shop/checkpoints/")
    return text


def _absolute(text: str) -> str:
    if not Path(text).is_absolute() or "\0" in text:
        raise refusal("expected the absolute path of a file")
    return text


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Hidden = PlainSerializer(lambda _: HIDDEN)
_File = Annotated[str, Field(max_length=1024), AfterValidator(_absolute)]


class EtcdConfig(Model):
    """Where etcd is, and under which prefix our keys are there; without one, it names the deployment."""

    endpoints: Annotated[
        tuple[Annotated[str, AfterValidator(_endpoint)], ...],
        BeforeValidator(_one_or_more),
        Field(min_length=1, max_length=100),
    ] = ("http://127.0.0.1:2379",)
    prefix: Annotated[str, AfterValidator(_prefix)] | None = None
    user: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    password: Annotated[Secret | Sealed, PlainValidator(secret_of), _Hidden] | None = None
    ca: _File | None = None
    cert: _File | None = None
    key: _File | None = None

    @model_validator(mode="after")
    def _come_together(self) -> Self:
        for one, other in (("user", "password"), ("cert", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise refusal(f"{one} and {other} come together", at=(one,))
        return self

    def sealed(self, box: SecretBox) -> Self:
        given = self.password
        if not isinstance(given, Secret):
            return self
        return self.model_copy(update={"password": Sealed.seal(given.reveal(), box)})
