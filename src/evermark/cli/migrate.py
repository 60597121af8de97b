"""`evermark migrate`: the state database, brought up to date on purpose. `evermark up` does it, too."""

from __future__ import annotations

from evermark.cli.console import say, show_json
from evermark.cli.deployment import config_at
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption


def migrate(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Upgrade the state database to this version. `evermark up` does it, too."""
    from evermark.app.build import open_state
    from evermark.state.migrate import migrate as apply
    from evermark.state.migrate import migrations

    found = config_at(config)
    embedded, state = open_state(found)
    try:
        done = apply(state)
    finally:
        state.close()
        if embedded is not None:
            embedded.stop()
    now = len(migrations())
    if as_json:
        show_json({"from": now - len(done), "to": now, "schema": state.schema})
    elif done:
        say(f"state of {found.name}: from version {now - len(done)} to {now}")
    else:
        say(f"state of {found.name} is at version {now}: nothing to do")
