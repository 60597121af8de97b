"""A store that is down, slow, refuses, or whose answers are lost: nothing is lost, nothing doubled, and it is said."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator

import pyarrow as pa
import pytest

from evermark.error_policy import Action, action_for
from evermark.errors import (
    ConfigError,
    ConflictError,
    DeniedError,
    DiskFullError,
    EvermarkError,
    SetupError,
    UnreachableError,
)
from evermark.log.append import DeltaLog
from evermark.log.commits import read_commit
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef
from evermark.storage import Place, access, objects, place_of, storage_of
from evermark.testing.objects import ACCESS_KEY, SECRET_KEY, Choose, Fault, FaultyProxy, S3Server
from tests.contract.log.log_scene import append, events, expected, fill, ids, write

LOST = Fault(lose=True)


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RETRIES_MAX", 1)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    made = FaultyProxy(s3)
    yield made
    made.close()


@pytest.fixture
def folder(s3: S3Server, s3_place: Place, proxy: FaultyProxy) -> Place:
    """In a bucket that is reached through the proxy alone."""
    access.remember(s3_place.root, s3.access(proxy.endpoint))
    return s3_place / "shop"


def no_pause(_: float) -> None: ...


def is_commit(method: str, path: str) -> bool:
    return method == "PUT" and "_delta_log/" in path


def from_the_commit_on(fault: Fault) -> Choose:
    """Nothing is heard of the commit, whatever is asked after it."""
    begun: list[str] = []

    def choose(method: str, path: str) -> Fault | None:
        if begun or is_commit(method, path):
            begun.append(path)
        return fault if begun else None

    return choose


def said_by(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + str(error)


def test_what_our_own_first_try_put_is_ours(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a lost answer WHEN the library asks again, and meets what it had put THEN the writer is told that it won;
    another writer that comes after it is told that it lost."""
    lost: list[str] = []
    proxy.choose = lambda method, path: (lost.append(path), LOST)[1] if method == "PUT" and not lost else None
    assert storage_of(folder).put_new(folder / "1.json", b"mine")
    assert [method for method, _ in proxy.seen] == ["PUT", "PUT", "GET"]
    assert not storage_of(folder).put_new(folder / "1.json", b"theirs")


def test_an_answer_lost_after_a_put_that_succeeded_is_recognised(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a store that loses the answer to the first try of each commit WHEN batches are committed THEN each is in
    the log once, and the writer knows that it was its own commit."""
    log = DeltaLog(folder, pause=no_pause)
    seen: set[str] = set()

    def lose_first(method: str, path: str) -> Fault | None:
        if is_commit(method, path) and path not in seen:
            seen.add(path)
            return LOST
        return None

    proxy.choose = lose_first
    fill(log, 3)
    proxy.choose = lambda *_: None
    assert len(seen) == 3, "a commit that is taken for another's would be put again, as the next version"
    assert ids(folder) == expected(3)
    assert log.sync() == 3


def test_a_commit_whose_every_answer_is_lost_is_found_by_the_next_try(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a put that succeeded and of which nothing was heard WHEN the owner tries the batch again THEN it is in the
    log once; and an owner that begins anew finds it there."""
    log = DeltaLog(folder, pause=no_pause)
    mine = append([write(folder, 1)], 1)
    proxy.choose = from_the_commit_on(LOST)
    with pytest.raises(UnreachableError) as caught:
        log.commit(mine)
    assert action_for(caught.value) is Action.RETRY
    proxy.choose = lambda *_: None
    log.commit(mine)
    assert DeltaLog(folder, pause=no_pause).tail(0).batch == 1
    fill(log, 2, first=2)
    assert ids(folder) == expected(2)


def test_the_commit_of_another_is_never_taken_for_ours(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN two owners of one epoch, and lost answers WHEN both commit the same batch THEN one is told that it lost."""
    one, other = DeltaLog(folder, pause=no_pause), DeltaLog(folder, pause=no_pause)
    mine, theirs = append([write(folder, 1)], 1), append([write(folder, 1)], 1)
    one.commit(mine)
    lost: list[str] = []
    proxy.choose = lambda method, path: (lost.append(path), LOST)[1] if is_commit(method, path) and not lost else None
    with pytest.raises(ConflictError):
        other.commit(theirs)
    assert ids(folder) == expected(1)


@pytest.mark.parametrize("fault", [Fault(answer=(503, "SlowDown")), LOST])
def test_a_table_that_is_kept_open_says_what_the_store_does(folder: Place, proxy: FaultyProxy, fault: Fault) -> None:
    """GIVEN a table that was opened, and a commit since, which the store does not give WHEN it is read THEN the error
    is one of ours, without the library's text; and the table goes on once the store does."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 1)
    kept = LogReader(folder)
    assert kept.tail_batch(0) == 1
    fill(log, 2, first=2)
    proxy.choose = lambda method, path: fault if method == "GET" and path.endswith(".json") else None
    with pytest.raises(UnreachableError) as caught:
        kept.tail_batch(0)
    assert "http://" not in said_by(caught.value)
    proxy.choose = lambda *_: None
    assert kept.tail_batch(0) == 2


def test_an_owner_of_many_partitions_reads_each_commit_a_few_times(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a log with commits of many partitions WHEN another owner takes all of them THEN it knows their tails, and
    what it asked of the store did not grow with partitions times commits."""
    log, partitions = DeltaLog(folder, pause=no_pause), range(8)
    for partition in partitions:
        fill(log, 2, partition=partition)
    commits = log.sync() + 1
    proxy.seen.clear()
    tails = DeltaLog(folder, pause=no_pause).fence_all(partitions, 2)
    assert {tail.batch for tail in tails.values()} == {2}
    read = [path for method, path in proxy.seen if method == "GET" and path.endswith(".json")]
    assert len(read) < 4 * commits


def test_an_upload_whose_answer_is_lost_leaves_one_file(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a lost answer to the file of a batch WHEN it is written THEN it is there once, at its size."""
    DeltaLog(folder, pause=no_pause)
    lost: list[str] = []
    proxy.choose = lambda method, path: (lost.append(path), LOST)[1] if ".parquet" in path and not lost else None
    file = write(folder, 1)
    assert [(each.name, each.size) for each in storage_of(folder).listed(folder, ".parquet")] == [
        (file.path, file.size)
    ]


def test_a_store_that_is_down_is_unreachable_and_loses_nothing(
    s3: S3Server, folder: Place, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a store that goes away WHEN it is asked for anything THEN that is an error that is tried again, and when it
    is back the log goes on."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 2)
    held = append([write(folder, 3)], 3)
    reader, root = LogReader(folder), place_of(str(folder)).root
    reader.files()
    proxy.close()
    asked = [
        lambda: log.commit(held),
        lambda: write(folder, 3),
        reader.files,
        lambda: LogReader(folder).files(),
        lambda: DeltaLog(folder, pause=no_pause),
        lambda: Maintenance(folder).run(),
    ]
    for ask in asked:
        with pytest.raises(UnreachableError, match=r"no connection|does not answer") as caught:
            ask()
        assert SECRET_KEY not in said_by(caught.value)
    access.remember(root, s3.access())
    log.commit(held)
    assert ids(folder) == expected(3)


@pytest.mark.parametrize(
    ("answer", "kind", "does"),
    [
        ((503, "SlowDown"), UnreachableError, Action.RETRY),
        ((500, "InternalError"), UnreachableError, Action.RETRY),
        ((507, "XMinioStorageFull"), DiskFullError, Action.RETRY),
        ((403, "SignatureDoesNotMatch"), DeniedError, Action.STOP),
        ((403, "AccessDenied"), DeniedError, Action.STOP),
    ],
)
def test_a_store_that_refuses_is_said_with_its_reason_and_without_its_answer(
    folder: Place, proxy: FaultyProxy, answer: tuple[int, str], kind: type[EvermarkError], does: Action
) -> None:
    """GIVEN a store that refuses WHEN it is asked THEN the error has its code, what to do, and no credential."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 1)
    held = append([write(folder, 2)], 2)
    proxy.choose = lambda *_: Fault(answer=answer)
    for ask in (lambda: log.commit(held), lambda: write(folder, 2), lambda: DeltaLog(folder, pause=no_pause)):
        with pytest.raises(kind) as caught:
            ask()
        assert answer[1] in caught.value.message or str(answer[0]) in caught.value.message
        assert caught.value.hint
        assert action_for(caught.value) is does
        assert ACCESS_KEY not in said_by(caught.value)
        assert SECRET_KEY not in said_by(caught.value)
    proxy.choose = lambda *_: None
    log.commit(held)
    assert ids(folder) == expected(2)


def test_a_store_that_does_not_answer_in_time_is_not_waited_for_without_end(
    folder: Place, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a store that takes too long, after it did what it was asked WHEN a batch is committed THEN it ends in an
    error that is tried again, and the batch is in the log once."""
    log = DeltaLog(folder, pause=no_pause)
    mine = append([write(folder, 1)], 1)
    monkeypatch.setattr(objects, "REQUEST_S_MAX", 1)
    access.remember(folder.root, access.Access(**{**vars(access.access_to(folder.root)), "region": "eu-west-1"}))
    proxy.choose = from_the_commit_on(Fault(late_s=3))
    with pytest.raises(UnreachableError, match="no answer in time"):
        log.commit(mine)
    proxy.choose = lambda *_: None
    assert read_commit(folder, 1) is not None
    log.commit(mine)
    assert read_commit(folder, 2) is None
    assert ids(folder) == expected(1)


def test_what_is_no_trouble_of_the_store_stays_what_it_is(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source that fails while its rows are written, and a full temporary folder WHEN a batch is written THEN
    neither is blamed on the store."""

    def failing() -> Iterator[pa.RecordBatch]:
        yield events(0, 1)
        raise ValueError("the source is at fault")

    with pytest.raises(ValueError, match="the source is at fault"):
        BatchWriter(folder, "shop", 0, 1).write_all(failing())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(objects.ObjectDraft, "finish", full)
    with pytest.raises(DiskFullError, match="where files wait for their upload"):
        write(folder, 1)
    assert storage_of(folder).listed(folder, ".parquet") == []


def test_a_bucket_that_is_not_there_is_named(s3: S3Server, s3_place: Place) -> None:
    """GIVEN a bucket that nobody made WHEN a log is opened in it THEN the error says which."""
    access.remember("s3://nobody-made-this", s3.access())
    with pytest.raises(SetupError, match="there is no bucket s3://nobody-made-this"):
        DeltaLog(place_of("s3://nobody-made-this/shop"), pause=no_pause)
    with pytest.raises(SetupError, match="there is no bucket"):
        storage_of(place_of("s3://nobody-made-this")).read(place_of("s3://nobody-made-this/shop/x"))


def test_secrets_are_not_in_what_leaves_the_process(folder: Place) -> None:
    """GIVEN an open store WHEN it is shown, pickled, or its environment is looked at THEN there are names alone."""
    store = storage_of(folder)
    shown = [repr(store), pickle.dumps(store).decode("latin1"), pickle.dumps(folder).decode("latin1")]
    shown += [os.environ[access.VARIABLE], repr(access.access_to(folder.root))]
    assert not any(secret in text for secret in (ACCESS_KEY, SECRET_KEY) for text in shown)
    assert SECRET_KEY in str(store.options()), "or this test looks for nothing"


def test_a_process_that_is_started_reaches_the_same_store(folder: Place, s3: S3Server) -> None:
    """GIVEN a store that was made known here WHEN another process opens its log THEN it finds out how by itself."""
    fill(DeltaLog(folder, pause=no_pause), 2)
    code = (
        "import sys; from evermark.log.read import LogReader; from evermark.storage import place_of;"
        "print(LogReader(place_of(sys.argv[1])).tail_batch(0))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def test_what_is_not_said_comes_from_the_environments_own_chain(
    s3: S3Server, s3_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN nothing but the variables that every S3 client knows WHEN a log is opened THEN it is reached by them."""
    fill(DeltaLog(s3_place / "shop", pause=no_pause), 1)
    monkeypatch.delenv(access.VARIABLE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    fill(DeltaLog(s3_place / "shop", pause=no_pause), 2, first=2)
    assert ids(s3_place / "shop") == expected(2)


def test_a_batch_takes_a_known_number_of_requests(folder: Place, proxy: FaultyProxy) -> None:
    """GIVEN a log that is open WHEN a batch is written, committed and synced THEN docs/storage.md says how often the
    store is asked."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 1)
    log.sync()
    proxy.seen.clear()
    fill(log, 2, first=2)
    log.sync()
    assert len(proxy.seen) == 6, proxy.seen


def test_a_secret_that_is_not_there_is_named_by_its_key(s3: S3Server, s3_place: Place) -> None:
    """GIVEN a reference to a variable that this process lacks WHEN the store is opened THEN the error names both."""
    gone = KeyRef("env", "EVERMARK_TEST_NO_SUCH_SECRET")
    access.remember(s3_place.root, access.Access(s3.endpoint, "us-east-1", gone, gone))
    with pytest.raises(ConfigError, match=r"storage.access_key: the variable EVERMARK_TEST_NO_SUCH_SECRET is not set"):
        storage_of(s3_place)


def test_the_server_of_these_tests_refuses_a_second_put_as_s3_does(s3: S3Server, s3_place: Place) -> None:
    """GIVEN an object WHEN it is put again with If-None-Match THEN the answer is 412: the guarantee rests on it."""
    assert storage_of(s3_place).put_new(s3_place / "x", b"1")
    from obstore.exceptions import AlreadyExistsError

    store = storage_of(s3_place)
    with pytest.raises(AlreadyExistsError, match="412"):
        store._library.put(store._store, "logs/x", b"2", mode="create")
