"""`evermark up`: the deployment, running."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Annotated

import typer

from evermark.cli.console import EXIT_FAILED, show_error
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption


def up(
    config: ConfigOption = DEFAULT_CONFIG,
    log_json: Annotated[
        bool | None,
        typer.Option("--log-json/--log-text", show_default=False, help="By default text on a terminal, else JSON."),
    ] = None,
) -> None:
    """Run the deployment until told to stop.

    SIGTERM or Ctrl-C stops it in order; a second one does not wait for what is under way. SIGUSR1 writes the stack of
    every thread to stderr.
    """
    if hasattr(faulthandler, "register") and sys.__stderr__ is not None:  # not everywhere
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    from evermark.observe.logging import set_up_logging

    set_up_logging(json=log_json)
    from evermark.app.run import Pipeline, StuckError

    try:
        Pipeline.from_file(config).run()
    except StuckError as error:
        # The interpreter would wait for the stuck thread, and the supervisor would wait for the interpreter.
        show_error(error)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
