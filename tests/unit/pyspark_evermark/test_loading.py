"""What it costs a process of Spark's to have the format."""

from __future__ import annotations

import subprocess
import sys

import pytest

_AS_A_WORKER = "sys.modules['__main__'].__spec__ = importlib.machinery.ModuleSpec('pyspark.daemon', None); "


@pytest.mark.parametrize("worker", [False, True], ids=["a person's own", "a worker"])
def test_what_a_worker_has_loaded_is_no_garbage(worker: bool) -> None:
    """GIVEN a worker, which looks for garbage after each task WHEN it has the format THEN what was loaded is left out
    of that; a person's own process is left as it is."""
    code = f"import gc, importlib.machinery, sys; {_AS_A_WORKER if worker else ''}import pyspark_evermark; "
    code += "print(gc.get_freeze_count() > 10_000)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(worker)]
