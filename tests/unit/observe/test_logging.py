"""What a line of the log has of an error."""

from __future__ import annotations

from evermark.errors import SetupError
from evermark.observe.logging import _unfold_errors, without_secrets


def test_the_hint_of_an_error_about_a_source_can_be_run_as_it_is() -> None:
    """GIVEN an error whose hint is a command WHEN it is logged about a source THEN the command names the source."""
    error = SetupError("the outbox is not installed", hint="run `evermark source install`")
    line = _unfold_errors(None, "warning", {"event": "cannot be read", "source": "shop", "error": error})
    assert (line["error"], line["kind"], line["hint"]) == (error.message, "setup", "run `evermark source install shop`")
    assert _unfold_errors(None, "warning", {"event": "cannot be read", "error": error})["hint"] == error.hint


def test_no_part_of_a_password_is_left_in_a_line() -> None:
    """GIVEN addresses whose passwords have signs that an address has WHEN they are logged THEN none is shown."""
    for password in ("plain", "pa@ss", "p:a@s@s", "a/b@c"):
        told = without_secrets(f"cannot reach postgresql://me:{password}@db.example:5432/shop now")
        assert told == "cannot reach postgresql://me:***@db.example:5432/shop now"
