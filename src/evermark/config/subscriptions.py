"""The `subscriptions:` section."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from evermark.config.addresses import check_url, network
from evermark.delivery.limits import RETRY_WAITS_S
from evermark.delivery.model import MadeBy, SubscriptionSpec
from evermark.event import UNDELIVERED_OPS, Op
from evermark.secrets import Secret, SecretBox
from evermark.settings.fields import Duration, Model, Rate, Size, Whole, between, refusal

HOW_TO_MAKE_ONE = "make one with: evermark subscription secret"
DELIVERED_OPS = tuple(op.value for op in Op if op not in UNDELIVERED_OPS)

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}", re.ASCII)
_HEADER_CHARS_MAX = 4096
# Set by the delivery itself: another value would break the signature, the framing or the connection.
_OWN_HEADERS = re.compile(
    r"webhook-.*|host|content-(length|type|encoding)|transfer-encoding|connection|te|upgrade|user-agent"
)


def signing_secret(secret: Secret) -> Secret:
    """A Standard Webhooks secret: `whsec_` and the base64 of 24 to 64 bytes."""
    text = secret.reveal()
    try:
        size = len(base64.b64decode(text.removeprefix("whsec_"), validate=True)) if text.startswith("whsec_") else 0
    except (binascii.Error, ValueError):
        size = 0
    if not 24 <= size <= 64:
        raise refusal("expected whsec_ and the base64 of 24 to 64 bytes", hint=HOW_TO_MAKE_ONE)
    return secret


def start_point(text: str) -> str:
    """`now`, `beginning`, or a time, which is returned in UTC; a time without a zone is UTC."""
    if text in ("now", "beginning"):
        return text
    try:
        time = datetime.fromisoformat(text)
        aware = time if time.tzinfo else time.replace(tzinfo=UTC)
        return aware.astimezone(UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError):
        raise refusal("expected now, beginning, or a time such as 2026-11-01T12:00:00Z") from None


def header_map(headers: dict[str, str]) -> dict[str, str]:
    seen: set[str] = set()
    for name, value in headers.items():
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise refusal("a header's name has characters that are not allowed", at=(name,))
        if _OWN_HEADERS.fullmatch(lower):
            raise refusal("this header is set by evermark and cannot be replaced", hint="remove it", at=(name,))
        if lower in seen:
            raise refusal("this header stands here twice", hint="keep one of them", at=(name,))
        if not (value.isascii() and value.isprintable()) or len(value) > _HEADER_CHARS_MAX:
            raise refusal("a header's value must be one line of at most 4096 printable ASCII characters", at=(name,))
        seen.add(lower)
    return headers


def _as_list(value: Any) -> Any:
    """One secret, or several while a receiver changes from one to the next; the first one signs first."""
    return value if isinstance(value, (list, tuple)) else [value]


def _body_bytes(size: int) -> int:
    if not 1024 <= size <= 64 * 1024 * 1024:
        raise refusal("must be between 1KiB and 64MiB")
    return size


def _zero(value: Any) -> Any:
    """Nought needs no unit."""
    return "0s" if value in (0, "0") and not isinstance(value, bool) else value


def _off_or_long(ttl: timedelta) -> timedelta:
    if ttl and not timedelta(minutes=1) <= ttl <= timedelta(days=3650):
        raise refusal("must be 0 (never) or between 1m and 3650d")
    return ttl


_Stream = Annotated[str, Field(min_length=1, max_length=200)]
_SigningSecret = Annotated[Secret, AfterValidator(signing_secret)]


class SubscriptionConfig(Model):
    """Each key is also an option of `evermark subscription add`: its title stands for the value in the help."""

    url: Annotated[str, Field(min_length=1, max_length=2048, description="Where to send the events.")]
    secret: Annotated[tuple[_SigningSecret, ...], BeforeValidator(_as_list), Field(max_length=4)] = ()
    streams: Annotated[tuple[_Stream, ...], Field(max_length=1000, description="Only events of this stream.")] = ()
    ops: Annotated[
        tuple[Op, ...],
        Field(max_length=len(DELIVERED_OPS), description=f"Only these operations: {', '.join(DELIVERED_OPS)}."),
    ] = ()
    where: Annotated[
        Annotated[str, Field(min_length=1, max_length=8192)] | None,
        Field(title="Predicate", description="Only events that match: op = 'insert' and data.total > 100"),
    ] = None
    start: Annotated[
        str,
        Field(alias="from", max_length=64, title="Time", description="Begin at: now, beginning, or 2026-11-01T12:00Z."),
        AfterValidator(start_point),
    ] = "now"
    ordered: Annotated[bool, Field(description="Keep order per key through retries.")] = False
    bundle: Annotated[Whole, Field(ge=1, le=1000, description="Events in one request, at most.")] = 1
    concurrency: Annotated[Whole, Field(ge=1, le=1000, description="Requests at the same time, at most.")] = 20
    timeout: Annotated[
        Duration,
        between(timedelta(milliseconds=100), timedelta(minutes=5)),
        Field(title="Duration", description="How long one request may take: 10s."),
    ] = timedelta(seconds=10)
    rate: Annotated[Rate, Field(description="Requests at most: 50/s or 600/m. 0: no limit.")] = 0.0
    body: Annotated[
        Literal["standard", "cloudevents", "raw"],
        Field(title="Form", description="The form of the body: standard, cloudevents or raw."),
    ] = "standard"
    headers: Annotated[
        dict[str, str],
        Field(max_length=32, description="A header to send with each request."),
        AfterValidator(header_map),
    ] = Field(default_factory=dict)
    allow_networks: Annotated[tuple[Annotated[str, AfterValidator(network)], ...], Field(max_length=64)] = ()
    body_limit: Annotated[
        Size,
        AfterValidator(_body_bytes),
        Field(title="Size", description="An event with a larger body is parked: 1MiB."),
    ] = 1024 * 1024
    parked_limit: Annotated[
        Whole, Field(ge=1, le=10_000_000, description="With so many parked deliveries the subscription stops.")
    ] = 10_000
    retry_waits: Annotated[
        tuple[Annotated[Duration, between(timedelta(seconds=1), timedelta(days=7))], ...],
        Field(
            min_length=1,
            max_length=20,
            title="Durations",
            description="How long a refused event waits before each retry: 5s,5m,30m; then it is dead.",
        ),
    ] = tuple(timedelta(seconds=wait_s) for wait_s in RETRY_WAITS_S)
    ttl: Annotated[
        Duration,
        BeforeValidator(_zero),
        AfterValidator(_off_or_long),
        Field(title="Duration", description="Give up events that could not be delivered for so long: 7d. 0: never."),
    ] = timedelta(days=7)

    @model_validator(mode="after")
    def _whole(self) -> SubscriptionConfig:
        if not self.secret:
            raise refusal(
                "is required: every delivery is signed",
                hint=f'{HOW_TO_MAKE_ONE}, keep it in a variable and write secret: "${{NAME}}"',
                at=("secret",),
            )
        for index, op in enumerate(self.ops):
            if op in UNDELIVERED_OPS:
                text = f"events of this operation are never delivered; there are {', '.join(DELIVERED_OPS)}"
                raise refusal(text, at=("ops", index))
        check_url(self.url, self.allow_networks)
        return self

    def to_spec(self, name: str, box: SecretBox) -> SubscriptionSpec:
        """What delivery keeps in state: the same wishes, with secrets and the values of headers sealed."""
        return SubscriptionSpec(
            name=name,
            url=self.url,
            secrets=tuple(box.seal(secret.reveal()) for secret in self.secret),
            streams=self.streams,
            ops=tuple(op.value for op in self.ops),
            where=self.where,
            start=self.start,
            ordered=self.ordered,
            bundle=self.bundle,
            concurrency=self.concurrency,
            timeout_s=self.timeout.total_seconds(),
            rate_per_s=self.rate,
            body=self.body,
            headers={name: box.seal(value) for name, value in self.headers.items()},
            allow_networks=self.allow_networks,
            body_bytes_max=self.body_limit,
            parked_max=self.parked_limit,
            retry_waits_s=tuple(wait.total_seconds() for wait in self.retry_waits),
            ttl_s=self.ttl.total_seconds(),
            made_by=MadeBy.FILE,
        )
