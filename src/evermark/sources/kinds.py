"""The kinds of source: one line each in `KINDS`, and one folder each beside this module.

A `SourceKind` holds what the rest of the program has to know of a source before there is a `Source`, or beside it: its
settings in the file, how it is made and examined, what has to be installed for it. No code outside the folder of a kind
asks which kind a source is of: the layers above know this module alone.

This module imports no kind. `kind_named` imports one when a file names it, and a kind imports its driver when it is
asked to do something: reading a file stays cheap, and so does `evermark --help`.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from evermark.errors import ConfigError, EvermarkError
from evermark.sources.copies import CopyPlace, CopyStore
from evermark.storage import Place

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.secrets import Hidden, SecretBox
    from evermark.sources.base import Source
    from evermark.sources.settings import SourceConfig
    from evermark.state.connection import State

Settings = TypeVar("Settings", bound="SourceConfig")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Registered:
    """A line of `KINDS`: where the `SourceKind` is, as `module:name`.

    `tasks` is the module that Spark's workers find loaded when they start; for a kind that most deployments have.
    """

    kind: str
    tasks: str | None = None


KINDS = {
    "postgres": Registered("evermark.sources.postgres.kind:KIND", tasks="evermark.sources.postgres.read.source"),
    "blocks": Registered("evermark.sources.blocks.kind:KIND"),
    "mongo": Registered("evermark.sources.mongo.kind:KIND"),
    "replica": Registered("evermark.sources.replica.kind:KIND"),
}
_OWN_CLASS = Registered("evermark.sources.own_class:KIND")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class BotReaders:
    """How the bots of a source are read from State. Functions of a module: they travel to the processes of Spark."""

    users: Callable[[State, str], frozenset[str]]
    inboxes: Callable[[State, str], frozenset[str]]
    version: Callable[[State, str], str]


@dataclass(frozen=True)
class SourceContext:
    """What a deployment gives to a source of its file."""

    source: str  # what the file calls it
    box: SecretBox | None  # seals secrets; None: the source stays in this process, with its secrets open
    state_dsn: Callable[[], Hidden]  # where State is, in a form that may travel as far as the source does
    state_schema: str
    bots: BotReaders
    # How what State has of copies is opened, a function of a module; and the folder for their files. None: no copies.
    copies: Callable[[Hidden, str], CopyStore] | None = None
    copies_folder: Place | None = None

    def copy_place(self, *, all_wanted: bool) -> CopyPlace | None:
        if self.copies is None or self.copies_folder is None:
            return None
        store = partial(self.copies, self.state_dsn(), self.state_schema)
        return CopyPlace(store, self.copies_folder, self.source, all_wanted)


@dataclass(frozen=True)
class SourceState:
    """What State and the log say of a source."""

    owner: str | None  # the process that reads it now
    checkpoints: Mapping[int, str] = field(default_factory=dict)  # by partition: the position where reading goes on
    recovering: frozenset[int] = frozenset()  # partitions of which a repair is under way
    findings: Sequence[Finding] = ()


@dataclass(frozen=True)
class Retained:
    """The events that the place of a source still has, for a person who chooses between repair and skip."""

    oldest: str | None  # times as the place writes them
    newest: str | None
    count: int
    exact: bool
    log_newest: datetime | None  # the time of the newest event in the log
    younger: int | None  # events younger than `log_newest`; None: the log has no event
    younger_exact: bool


class Installation(Protocol):
    """What must be installed at the place of a source before it can be read; for `evermark source install`."""

    keeps_events: bool  # whether the place has the events of a gap, so that it can be repaired

    def table(self, text: str) -> str:
        """The whole name of a table that a person typed. Raises `ValueError` with what is wrong with it."""

    def script(self, tables: Sequence[str], role: str | None) -> str:
        """All of `install` for a person to read and run. Connects to nothing.

        `tables` are captured besides the tables of the file; `role` gets the least rights that reading needs.
        """

    def registered(self) -> bool:
        """Whether the place knows this deployment as a reader."""

    def install(self, tables: Sequence[str], *, wait_s: float, say: Say, goes_on: bool) -> list[str]:
        """Install it, or bring it up to date: all or nothing. Returns what stands there now, a sentence each.

        `wait_s` is how long the transactions of others are waited for, `say` hears whose they are. `goes_on`: this
        deployment has taken events here before.
        """

    def same_place(self, left_at: str, earliest: str) -> bool:
        """Whether a source that can be read from `earliest` on is the place where reading stopped at `left_at`."""

    def release(self, tables: Sequence[str], *, wait_s: float, say: Say) -> list[str]:
        """Stop capturing these tables. Returns what was done, and what is left to do, a sentence each."""

    @property
    def reader(self) -> str:
        """What `uninstall` removes, in two or three words, for the question before it."""

    def left_behind(self, checkpoints: Mapping[int, str]) -> str:
        """A sentence on the events that a deployment with these checkpoints did not take, for the same question."""

    def uninstall(self, *, wait_s: float, say: Say) -> list[str]:
        """Remove what `install` made and no other deployment needs. Returns what is gone, a sentence each."""

    def maintain(self) -> tuple[int, int, int]:
        """Housekeeping: how many partitions were created, how many dropped, and how many cannot be dropped yet."""

    def foreseen(self, found: Sequence[Finding]) -> list[Finding]:
        """`found` by `SourceKind.examine`; where nothing is installed yet, whether `install` will work instead of all
        that is missing. Changes nothing."""


class SourceKind(ABC, Generic[Settings]):
    """One kind of source. Has no state: there is one object of it, called `KIND`, in the folder of the kind."""

    settings: type[Settings]  # the model of the source's section in the file
    installs: bool = False  # whether it has an `Installation`

    @abstractmethod
    def make(self, settings: Settings, context: SourceContext) -> Source:
        """The source that the settings describe. Connects to nothing."""

    def require(self, settings: Settings, source: str) -> None:
        """Raises `ConfigError` where there is no such source, however it is set; for `evermark config check`."""

    def examine(
        self, settings: Settings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        """What `evermark doctor` says of the source. Changes nothing.

        `look` asks State and the log about it, and calls `Source.check`; None: there is no State yet.
        """
        from evermark.observe.finding import ok, wrong

        try:
            source = self.make(settings, context)
        except EvermarkError as error:
            yield wrong("source", error.message, error.hint)
            return
        if look is not None:
            yield from look(source).findings
            return
        try:
            source.check({})
        except EvermarkError as error:
            yield wrong("source", error.message, error.hint)
        else:
            yield ok("source", "it says that it can be read")

    def installation(self, settings: Settings) -> Installation | None:
        """What `evermark source install` makes at the place; None when the source needs nothing installed."""
        return None

    def retained(self, settings: Settings, since: Callable[[], datetime | None]) -> Retained | None:
        """What the place still has; `since` gives the time of the newest event in the log. None: it cannot say."""
        return None


def kind_named(name: Any) -> SourceKind[Any] | None:
    """The kind behind `type: name` of the file; None when there is none, neither built in nor as a class path."""
    if not isinstance(name, str):
        return None
    line = KINDS.get(name) or (_OWN_CLASS if _CLASS_PATH.fullmatch(name) else None)
    if line is None:
        return None
    module, _, attribute = line.kind.partition(":")
    found: SourceKind[Any] = getattr(importlib.import_module(module), attribute)
    return found


def kind_of(settings: SourceConfig, source: str) -> SourceKind[Any]:
    """The kind that these settings belong to; `source` is their name in the file, for the message."""
    found = kind_named(settings.type)
    if found is None or not isinstance(settings, found.settings):
        raise ConfigError(f"sources.{source}: {type(settings).__name__} is not a source this program can build")
    return found


def installed_kinds() -> list[str]:
    """The names of the kinds that have something to install."""
    return [name for name in KINDS if (kind := kind_named(name)) is not None and kind.installs]


def task_modules() -> list[str]:
    """What Spark's workers load before their first task."""
    return [line.tasks for line in KINDS.values() if line.tasks is not None]
