"""`evermark subscription`: which events each subscription gets, its state and its lag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import EXIT_FAILED, confirm, noun, say, show, show_fields, show_json, warn
from evermark.cli.deployment import as_deliverer, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, Given, JsonOption, YesOption, keys_as_options
from evermark.config.subscriptions import SubscriptionConfig
from evermark.delivery.model import SubscriptionSpec
from evermark.delivery.webhook.signing import new_secret as fresh_secret
from evermark.errors import ConfigError, EvermarkError, NotFoundError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.log.read import FileRange
    from evermark.server.calls import Services
    from evermark.server.subscriptions import SubscriptionAnswer

app = noun("Subscriptions: who gets which events.")

# A secret has options of its own, and only the operator's file may open networks.
NOT_OPTIONS = ("secret", "allow_networks")

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
SecretOption = Annotated[
    str | None,
    typer.Option("--secret", envvar="EVERMARK_SIGNING_SECRET", help="The signing secret, whsec_…", show_default=False),
]
# A variable that a subscription was added with may still be set, and would be taken for the secret to change to.
NextSecretOption = Annotated[str | None, typer.Option("--secret", help="The next secret, whsec_…", show_default=False)]
NewSecretOption = Annotated[bool, typer.Option("--new-secret", help="Make a secret, and print it this once.")]


@app.command("list")
def list_subscriptions(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the subscriptions: what each gets, its state, and its lag."""
    with opened(config) as deployment:
        rows = subscription_rows(deployment)
    columns = ("subscription", "made_by", "url", "streams", "where", "state", "lag_events", "oldest")
    empty = "there is none; add one under `subscriptions:` in the file, or with: evermark subscription add"
    show(rows, (*columns, "waiting", "dead", "reason"), as_json=as_json, empty=empty)


@app.command()
@keys_as_options(SubscriptionConfig, but=NOT_OPTIONS)
def add(
    name: Name,
    given: Given,
    secret: SecretOption = None,
    new_secret: NewSecretOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Add a subscription, beside those of the file. A running instance takes it up by itself."""
    values = with_secret(given, secret, new_secret)
    with services_at(config) as (_, services):
        made = services.subscriptions.add(name, values)
    report(made, f"{name} is there, {made.state.value}; try it with: evermark subscription test {name}", as_json)


@app.command("set")
@keys_as_options(SubscriptionConfig, but=(*NOT_OPTIONS, "from"), optional=True)
def set_subscription(
    name: Name, given: Given, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False
) -> None:
    """Change a subscription. What is not given stays as it is.

    An empty text sets an option back to its default. The subscription keeps its place in the log.
    """
    if not given:
        raise ConfigError("nothing to change was given", hint="for example --url or --where; see --help")
    with services_at(config) as (_, services):
        changed = services.subscriptions.change(name, given)
    report(changed, f"{name} is changed", as_json)


@app.command()
def rotate(
    name: Name,
    secret: NextSecretOption = None,
    overlap: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long the former secrets stay good: 24h. Without it: until --end."),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the overlap: the newest secret alone signs.")] = False,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Replace the signing secret of a subscription.

    Without --secret a new one is made, and printed this once. The former secrets sign too, for as long as --overlap.
    """
    asked = {"secret": secret or None, "overlap": overlap, "end": end or None}
    with services_at(config) as (_, services):
        values = {key: value for key, value in asked.items() if value is not None}
        made = services.subscriptions.rotate(name, values, f"rotating {name}")
    count = len(made.secrets)
    ends = next((s.expires_at for s in made.secrets[1:] if s.expires_at is not None), None)
    until = f"until {ends:%Y-%m-%d %H:%M:%S} UTC" if ends else f"until: evermark subscription rotate {name} --end"
    report(made, f"{name} is signed with {count} secrets, {until}" if count > 1 else f"{name} has one secret", as_json)


@app.command("test")
def fire(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Send a subscription one signed test event, and print the answer.

    The event has the type evermark.test. The exit code is 1 unless the receiver accepted it.
    """
    with services_at(config) as (deployment, services):
        fired = services.subscriptions.test_fire(_spec(deployment, name))
    show_fields(fired.model_dump(mode="json"), as_json=as_json, but=("",))
    if not fired.accepted:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def remove(name: Name, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False) -> None:
    """Remove a subscription and its parked deliveries. The events stay in the log."""
    with services_at(config) as (deployment, services):
        removed(deployment, services, name, yes=yes)


@app.command()
def secret() -> None:
    """Make a fresh signing secret and print it."""
    typer.echo(fresh_secret())


@app.command()
def pause(
    name: Name,
    config: ConfigOption = DEFAULT_CONFIG,
    reason: Annotated[str, typer.Option(help="Shown by `status`.")] = "paused by a person",
) -> None:
    """Stop delivering to a subscription until it is resumed. The events stay in the log."""
    with opened(config) as deployment:
        as_deliverer(deployment, lambda epoch: deployment.delivery.suspend(name, reason[:500], epoch))
    say(f"{name} is paused; go on with: evermark subscription resume {name}")


@app.command()
def resume(name: Name, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Deliver to it again now, from where it was left.

    After a pause, after a 410, or while it waits for its next try after failures.
    """
    with opened(config) as deployment:
        as_deliverer(deployment, lambda epoch: deployment.delivery.resume(name, epoch))
    say(f"{name} is resumed, from where it was left: a running instance tries it now")


@contextmanager
def services_at(config: Path) -> Iterator[tuple[Deployment, Services]]:
    from evermark.app.serving import services_of

    with opened(config) as deployment:
        services = services_of(deployment)
        try:
            yield deployment, services
        finally:
            services.subscriptions.sink.close()


def with_secret(given: Given, secret: str | None, new_secret: bool) -> dict[str, Any]:
    """The keys of a new subscription. Without a secret among them the service makes a secret."""
    if bool(secret) is new_secret:
        raise ConfigError("which secret?", hint="give one with --secret, or have one made with --new-secret")
    return {key: value for key, value in {**given, "secret": secret or None}.items() if value is not None}


def removed(deployment: Deployment, services: Services, name: str, *, yes: bool) -> None:
    """Remove a subscription, once a person has agreed."""
    from evermark.delivery.decide.registration import require_ours

    require_ours(deployment.delivery.subscription(name).spec, "removed")
    found = services.subscriptions.get(name)
    confirm(f"Remove {name}? {found.waiting + found.dead} parked deliveries go with it.", yes=yes)
    services.subscriptions.remove(name)
    say(f"{name} is removed")


def _spec(deployment: Deployment, name: str) -> SubscriptionSpec:
    """The spec of a subscription; a subscription of the file that no instance has seen yet may be tested, too."""
    try:
        return deployment.delivery.subscription(name).spec
    except NotFoundError:
        found = next((spec for spec in deployment.specs if spec.name == name), None)
        if found is None:
            raise
        return found


def report(answer: SubscriptionAnswer, said: str, as_json: bool) -> None:
    """Say what has become of a subscription; a secret that was made goes to stdout, alone."""
    made = getattr(answer, "secret", None)
    for text in getattr(answer, "warnings", ()):
        warn(text)
    if as_json:
        show_json(answer.model_dump(mode="json", by_alias=True, exclude=set() if made else {"secret"}))
        return
    if made:
        typer.echo(made)
        say("this secret is shown this once: give it to the receiver")
    say(said)


def subscription_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """A row per subscription, also of the file's that no instance has seen yet. No row holds a secret."""
    from evermark.delivery.status import accounts, durable_heads, kept_for

    heads = durable_heads(deployment.heads, deployment.sources)
    files, unread = _files(deployment)
    unknown = dict.fromkeys(("lag_events", "oldest", "kept_events")) if unread else {}
    known = accounts(deployment.delivery, heads, lambda source: files[source])
    horizon = datetime.now(UTC) - deployment.config.log.retention
    kept = kept_for(deployment.delivery.cursors_outside(), files, horizon)
    rows = []
    for name, found in known.items():
        numbers = {key: value for key, value in vars(found).items() if key != "subscription"}
        subscription = {key: getattr(found.subscription, key) for key in ("failures", "next_attempt_at", "reason")}
        state = {"state": found.subscription.state.value, "kept_events": kept.get(name, 0)}
        rows.append({**_keys(found.subscription.spec), **state, **numbers, **subscription, **unknown})
    rows += [
        {**_keys(spec), "state": "new", "reason": "begins with the next `evermark up`"}
        for spec in deployment.specs
        if spec.name not in known
    ]
    return sorted(rows, key=lambda row: str(row["subscription"]))


def _files(deployment: Deployment) -> tuple[dict[str, list[FileRange]], bool]:
    """By source, and whether one could not be read: a bucket that is away hides nothing of what State knows."""
    from evermark.log.read import LogReader

    files: dict[str, list[FileRange]] = {}
    unread = False
    for source in deployment.sources:
        try:
            files[source] = LogReader(deployment.log_folder(source)).files_if_any()
        except EvermarkError as error:
            say(f"{source}: how far subscriptions are behind is not known: {error}")
            files[source], unread = [], True
    return files, unread


def _keys(spec: SubscriptionSpec) -> dict[str, Any]:
    """The keys of a subscription. Values of headers may be credentials: only their names are told."""
    from evermark.observe.logging import without_secrets

    return {
        "subscription": spec.name,
        "url": without_secrets(spec.url),
        "streams": list(spec.streams),
        "ops": list(spec.ops),
        "where": spec.where,
        "ordered": spec.ordered,
        "bundle": spec.bundle,
        "headers": sorted(spec.headers),
        "made_by": spec.made_by.value,
    }
