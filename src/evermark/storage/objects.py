"""An object store, by the Rust library `object_store`: S3 and what speaks its protocol; others are not tested.

A successful answer to a put means that the object is durable and that everybody sees it. The library asks again where
an answer is lost: then the second try of a `put_new` meets what the first one wrote, and looks whether it is ours.
"""

from __future__ import annotations

import errno
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import pyarrow as pa

from evermark.errors import ConfigError, DeniedError, DiskFullError, EvermarkError, SetupError, UnreachableError
from evermark.storage.access import Access
from evermark.storage.base import Draft, Found, Place, Url

REQUEST_S_MAX = 30
CONNECT_S_MAX = 5
RETRIES_MAX = 3
RETRY_S_MAX = 30
# A file up to this size is fetched whole, in one request; of larger ones ranges, at least so much at a time.
WHOLE_BYTES_MAX = 8 * 1024 * 1024
RANGE_BYTES = 1024 * 1024
# So much of a file that is being written is held in memory; the rest waits on the local disk for its upload.
DRAFT_BYTES_MAX = 16 * 1024 * 1024
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]{1,64})\s*</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_OF_A_STORE = re.compile(r"Generic \S+ error|Error performing |Object at location|error sending request")
_DENIED = ("403", "401")
_FULL = ("XMinioStorageFull", "QuotaExceeded", "InsufficientStorage")
_CLOCK = ".clock"

T = TypeVar("T")


class ObjectStore:
    """`Storage` over one bucket. Any number of threads."""

    durable_at_once = True

    def __init__(self, root: str, access: Access) -> None:
        self._root, self._access = root, access
        self._library = _library()
        self._replacing = threading.Lock()
        self._keys = access.credentials()
        self._store = _opened(root, access)

    def __repr__(self) -> str:
        return f"ObjectStore({self._root})"

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectStore, (self._root, self._access)  # as the library pickles a store, its secrets would travel

    def read(self, file: Place) -> bytes:
        return bytes(self._ask(file, lambda key: self._library.get(self._store, key).bytes()))

    def readable(self, file: Place) -> pa.NativeFile:
        def whole(key: str) -> tuple[int, Any]:
            answer = self._library.get(self._store, key)
            size = int(answer.meta["size"])
            return size, answer.bytes() if size <= WHOLE_BYTES_MAX else None

        size, body = self._ask(file, whole)
        if body is not None:
            return pa.BufferReader(pa.py_buffer(body))
        return pa.PythonFile(io.BufferedReader(_Ranges(self, file, size), RANGE_BYTES), mode="r")

    def range(self, file: Place, start: int, length: int) -> bytes:
        return bytes(self._ask(file, lambda key: self._library.get_range(self._store, key, start=start, length=length)))

    def size(self, file: Place) -> int:
        return int(self._ask(file, lambda key: self._library.head(self._store, key))["size"])

    def exists(self, file: Place) -> bool:
        try:
            self.size(file)
        except FileNotFoundError:
            return False
        return True

    def identity(self, file: Place) -> Hashable | None:
        """Its name: nothing here is set aside, so a file that was put once is that file. A request less, each time."""
        return str(file)

    def listed(self, folder: Place, suffix: str = "") -> list[Found]:
        found = self._ask(folder, lambda key: self._library.list_with_delimiter(self._store, prefix=f"{key}/"))
        files = (
            Found(each["path"].rpartition("/")[2], each["size"], each["last_modified"].timestamp())
            for each in found["objects"]
        )
        return sorted((file for file in files if file.name.endswith(suffix)), key=lambda file: file.name)

    def has_folder(self, folder: Place) -> bool:
        """A store has names, and no folders: whether a name begins so."""

        def first(key: str) -> Any:
            return next(iter(self._library.list(self._store, prefix=f"{key}/", chunk_size=1)), ())

        return bool(self._ask(folder, first))

    def folders(self, folder: Place) -> list[str]:
        found = self._ask(folder, lambda key: self._library.list_with_delimiter(self._store, prefix=f"{key}/"))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def put_new(self, file: Place, body: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        def put(key: str) -> bool:
            try:
                self._library.put(self._store, key, body, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        if self._ask(file, put):
            return True
        # Perhaps by our own request, whose answer was lost before it was asked again.
        with suppress(FileNotFoundError):
            return self.read(file) == body
        return False

    def put(self, file: Place, body: bytes) -> None:
        self._ask(file, lambda key: self._library.put(self._store, key, body, use_multipart=False))

    def upload(self, file: Place, body: Any) -> None:
        self._ask(file, lambda key: self._library.put(self._store, key, body))

    def draft(self, file: Place) -> Draft:
        return ObjectDraft(self, file)

    def make_folder(self, folder: Place) -> None:
        """There are none to make."""

    def delete(self, file: Place) -> None:
        with suppress(FileNotFoundError):
            self._ask(file, lambda key: self._library.delete(self._store, key))

    def sync(self, *places: Place) -> None:
        """A put that was answered is durable."""

    def now(self, folder: Place, here: float) -> float:
        """The store's own clock, by what it writes beside a file of ours: nobody else's may be compared with it."""
        file = folder / _CLOCK
        self.put(file, b"")
        return float(self._ask(file, lambda key: self._library.head(self._store, key))["last_modified"].timestamp())

    def options(self) -> dict[str, str]:
        return _delta_options(self._root, self._access)

    def trouble(self, error: Exception, where: Place) -> Exception | None:
        """Of what delta-rs raises, and of a full disk here; requests of our own are told by `_ask`. Blocks that are
        judged run other code, too: what it raises is its own."""
        if isinstance(error, EvermarkError):
            return None
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return DiskFullError(
                f"no space left in {tempfile.gettempdir()}, where files wait for their upload to {where}",
                hint="free some space; nothing was lost, work goes on when there is room",
            )
        return _said(error, where) if _OF_A_STORE.search(str(error)) else None

    def _ask(self, place: Place, ask: Callable[[str], T]) -> T:
        """Keys that were replaced where they are kept are used from the first refusal of the old ones on."""
        used = self._keys
        try:
            return self._asked(place, ask)
        except DeniedError:
            with self._replacing:
                if self._keys == used:  # no other thread has replaced them meanwhile
                    keys = self._access.credentials()
                    if keys == used:
                        raise
                    self._store, self._keys = _opened(self._root, self._access), keys
            return self._asked(place, ask)

    def _asked(self, place: Place, ask: Callable[[str], T]) -> T:
        assert isinstance(place, Url)  # noqa: S101 - a path has another adapter
        try:
            return ask(place.key)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise _said(error, place) from None
            raise FileNotFoundError(f"there is no {place}") from None
        except EvermarkError:
            raise
        except Exception as error:  # noqa: BLE001 - the library's errors have no common class; none may pass as it is
            raise _said(error, place) from None


class ObjectDraft:
    """A file that waits here until it is whole: half an upload is nothing that anybody could see."""

    def __init__(self, store: ObjectStore, file: Place) -> None:
        self._store, self._file = store, file
        self.sink = tempfile.SpooledTemporaryFile(DRAFT_BYTES_MAX)  # noqa: SIM115 - closed by both ends
        self._begun = False

    def finish(self) -> int:
        size = self.sink.seek(0, os.SEEK_END)
        self.sink.seek(0)
        self._begun = True
        self._store.upload(self._file, self.sink.read() if size <= DRAFT_BYTES_MAX else self.sink)
        self.sink.close()
        return size

    def discard(self) -> None:
        self.sink.close()
        if self._begun:
            with suppress(EvermarkError):  # if it is there after all, nobody names it, and it goes in a day
                self._store.delete(self._file)


class _Ranges(io.RawIOBase):
    """A large file, read by ranges."""

    def __init__(self, store: ObjectStore, file: Place, size: int) -> None:
        super().__init__()
        self._store, self._file, self._size, self._at = store, file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._store.range(self._file, self._at, length)
        self._at += length
        return length


def _library() -> Any:
    try:
        import obstore
    except ImportError:
        raise ConfigError(
            "log.path: an object store needs the library obstore, which is not installed",
            hint='pip install "evermark[s3]"',
        ) from None
    return obstore


def _opened(root: str, access: Access) -> Any:
    from obstore.store import from_url

    given: dict[str, Any] = {
        "client_options": {
            "timeout": f"{REQUEST_S_MAX}s",
            "connect_timeout": f"{CONNECT_S_MAX}s",
            **({"allow_http": True} if _is_plain(access) else {}),
        },
        "retry_config": {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_S_MAX)},
    }
    if root.startswith("s3://"):
        given |= {name.removeprefix("aws_"): value for name, value in _s3_options(access).items()}
    try:
        return from_url(root, **given)
    except Exception as error:  # noqa: BLE001 - as above
        raise _said(error, Url(root)) from None


def _endpoint(access: Access) -> str | None:
    return access.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _is_plain(access: Access) -> bool:
    """Whether the endpoint was chosen without TLS."""
    return (_endpoint(access) or "").startswith("http://")


def _s3_options(access: Access) -> dict[str, str]:
    """By the names that both libraries know."""
    given: dict[str, str] = {}
    if endpoint := _endpoint(access):
        given["aws_endpoint"] = endpoint
        given["aws_virtual_hosted_style_request"] = str(not access.path_style).lower()
    if access.region:
        given["aws_region"] = access.region
    elif endpoint and not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION"):
        given["aws_region"] = "us-east-1"  # what most servers that are not Amazon's expect
    if (keys := access.credentials()) is not None:
        given |= {"aws_access_key_id": keys[0], "aws_secret_access_key": keys[1]}
    return given


def _delta_options(root: str, access: Access) -> dict[str, str]:
    given = {
        "timeout": f"{REQUEST_S_MAX}s",
        "connect_timeout": f"{CONNECT_S_MAX}s",
        "max_retries": str(RETRIES_MAX),
        "retry_timeout": f"{RETRY_S_MAX}s",
    }
    if root.startswith("s3://"):
        given |= {**_s3_options(access), "aws_conditional_put": "etag"}
        if _is_plain(access):
            given["aws_allow_http"] = "true"
    return given


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _said(error: Exception, where: Place) -> EvermarkError:
    """In our words. The library's text has requests and answers in it, and answers tell key ids and signatures."""
    text = str(error)
    code, status = _code(error), _STATUS.search(text)
    number = status[1] if status else ""
    because = code or (f"HTTP status {number}" if number else _cause(text))
    bucket = where.root if isinstance(where, Url) else str(where)
    if code == "NoSuchBucket":
        return SetupError(f"there is no bucket {bucket}", hint="make it, or correct log.path")
    if code in _FULL or number == "507":
        return DiskFullError(
            f"the store of {where} has no room left ({because})",
            hint="make room or shorten log.retention; nothing was lost, work goes on when there is room",
        )
    if number in _DENIED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return DeniedError(
            f"the store refused {where} ({because})",
            hint="check storage.access_key and storage.secret_key, or the environment's own, and what they may do:"
            " get, put, list and delete",
        )
    return UnreachableError(
        f"the store of {where} does not answer as it should ({because})",
        hint="nothing was lost, and it is tried again; check storage.endpoint, storage.region and the network",
    )


_CAUSES = (
    ("connect", "no connection"),
    ("timed out", "no answer in time"),
    ("timeout", "no answer in time"),
    ("dns", "its name is not known"),
    ("credential", "there are no credentials"),
    ("builder error", "its address is not one"),
)


def _cause(text: str) -> str:
    """A word for what is wrong, never the text itself."""
    lowered = text.lower()
    return next((words for sign, words in _CAUSES if sign in lowered), "the request failed")
