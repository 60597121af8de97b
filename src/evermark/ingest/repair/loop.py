"""The loop that closes the gaps of one source, beside its reading: partitions without a gap go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evermark.error_policy import Action, action_for, backoff_s
from evermark.errors import EvermarkError
from evermark.ingest.repair.steps import Repairer
from evermark.runtime import Log, Runtime, Wake


@dataclass(eq=False)
class RepairLoop:
    """Looks for gaps until stopped, and at once when one is found; the steps are those of `Repairer`."""

    repairer: Repairer
    runtime: Runtime
    log: Log
    on_step_down: Callable[[], None]
    stopped: Wake
    look_every_s: float

    def __post_init__(self) -> None:
        self._wake = self.runtime.wake()

    def found(self, partition: int, error: EvermarkError, left_at: str) -> EvermarkError | None:
        """Reading met `error`. None: it is a gap, and is being closed; else the error to report."""
        said = self.repairer.found(partition, error, left_at)
        if said is None:
            self._wake.set()
        return said

    def run(self) -> None:
        failures = 0
        while not self.stopped.is_set():
            wait_s = self.look_every_s
            self._wake.clear()
            try:
                self.repairer.carry_out_all()
                failures = 0
            except Exception as error:  # noqa: BLE001 - tried again; an unknown failure must not end the loop
                if action_for(error) is Action.STEP_DOWN:
                    self.log.warning("stepping down", part="repair", error=error)
                    self.on_step_down()
                    return
                self.log.warning(
                    "looking for gaps, or closing one, failed; it is tried again", part="repair", error=error
                )
                wait_s = backoff_s(failures, base_s=self.look_every_s)
                failures += 1
            self.runtime.wait(wait_s, self._wake, self.stopped)
