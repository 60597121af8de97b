"""What makes Spark start quickly: a home without the zipped copy of PySpark, and an archive of the JVM's classes.

Spark puts `python/lib/pyspark.zip` first on the path of every Python process it starts. What is imported from a zip is
compiled each time, and half a dozen such processes come one after the other before the first event is read: half of
the time to start. Through a home that lacks the zip they import the package that is installed.

Loading Spark's classes from an archive takes about half of the time. `evermark.spark.archive` makes the archive;
without one, a JVM before Java 25 that ends properly leaves one behind for the next start. From Java 25 on the archive
holds linked classes, too, and needs no archive of the JDK's own, which the bundled runtime lacks; but making it takes a
minute, so no JVM that works leaves one behind. The archive is a cache: safe to delete, made anew for another Java,
Spark or class path, and ignored by the JVM when it does not fit.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

import psutil
import pyspark

from evermark.embedded.java import cache_folder

_PARTS = ("bin", "jars", "sbin")
_LINKED = ".aot"
_LINKED_FROM = 25  # of Java: the first that makes such an archive by itself (JEP 514)
_VERSION = re.compile(r'^JAVA_VERSION="(\d+)', re.MULTILINE)
# What a JVM says of an archive that does not fit helps nobody: it is left out, and made anew.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
_QUIET_LINKED = "-Xlog:aot*=off -Xlog:cds*=off"
_HEAD = 4  # bytes by which a JVM tells that a file is an archive


def spark_home(master: str) -> Path:
    """The SPARK_HOME to start with: the user's own, PySpark's own when others share it, else one that is quick."""
    installed = Path(pyspark.__file__).resolve().parent
    if given := os.environ.get("SPARK_HOME"):
        return Path(given)
    if not master.startswith(("local", "spark://")):
        return installed  # what goes to YARN and Kubernetes is sent from there, the zip included
    home = cache_folder() / f"spark-home-{hashlib.sha256(str(installed).encode()).hexdigest()[:12]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        for part in _PARTS:  # two processes may link it at once, and it may be there from another time
            link, target = home / part, installed / part
            if not link.is_symlink() or link.readlink() != target:
                fresh = link.with_name(f"{part}.{os.getpid()}")
                fresh.symlink_to(target)
                fresh.replace(link)
    except OSError:
        return installed  # a home that cannot be written to costs seconds at each start, nothing else
    return home


def java_options(java_home: str, home: Path) -> str:
    """The JVM's options for using the archive, or for leaving one behind at its end where that is quick."""
    try:
        archive = archive_of(java_home, home)
        archive.parent.mkdir(parents=True, exist_ok=True)
        adopt(archive)
        if is_linked(archive):
            return f"-XX:AOTCache={archive} {_QUIET_LINKED}" if is_whole(archive) else ""
        if is_whole(archive):
            return f"-XX:SharedArchiveFile={archive} {_QUIET}"
        return f"-XX:ArchiveClassesAtExit={archive}.{os.getpid()} {_QUIET}"
    except OSError:
        return ""  # a home that cannot be written to costs a few seconds at each start, nothing else


def making_options(archive: Path) -> str:
    """The JVM's options for making this archive, whatever that takes."""
    if is_linked(archive):
        return f"-XX:AOTCacheOutput={archive} {_QUIET_LINKED}"
    return f"-XX:ArchiveClassesAtExit={archive} {_QUIET}"


def archive_of(java_home: str, home: Path) -> Path:
    # A conda or virtual environment moved to another place has another class path: its archive would be refused.
    # The bundled Java is used through a folder of each deployment's own, whose parts are links: the runtime counts.
    runtime = (Path(java_home) / "lib").resolve().parent
    what = f"{runtime}|{pyspark.__version__}|{home}"
    kind = _LINKED if (java_major(runtime) or 0) >= _LINKED_FROM else ".jsa"
    return cache_folder() / f"spark-{hashlib.sha256(what.encode()).hexdigest()[:12]}{kind}"


def java_major(runtime: Path) -> int | None:
    """What the runtime says of itself in its `release`; None: nothing."""
    try:
        told = _VERSION.search((runtime / "release").read_text(errors="replace"))
    except OSError:
        return None
    return int(told[1]) if told else None


def is_linked(archive: Path) -> bool:
    return archive.suffix == _LINKED


def is_whole(archive: Path) -> bool:
    """Whether the JVM that wrote it came to an end of it: the first bytes are written last."""
    try:
        with archive.open("rb") as file:
            return any(file.read(_HEAD))
    except FileNotFoundError:
        return False


def adopt(archive: Path) -> None:
    """Take over the archive of an earlier JVM if there is none; a JVM that still runs may still be writing.

    What a JVM left that was killed at it is deleted. As an archive it would never be mended: each start from then on
    would go without, which is twice the processor for the JVM.
    """
    for left in archive.parent.glob(f"{archive.name}.*"):
        pid = left.suffix[1:]
        if not pid.isdigit() or psutil.pid_exists(int(pid)):
            continue
        with suppress(FileNotFoundError):  # another process takes it over at the same time
            if is_whole(left) and not is_whole(archive):
                left.replace(archive)
            else:
                left.unlink()
