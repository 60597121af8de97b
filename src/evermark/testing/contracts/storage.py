"""What every `Storage` promises."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.storage import Place, Storage, storage_of


class StorageContract:
    @pytest.fixture
    def folder(self) -> Place:
        raise NotImplementedError("override this fixture: an empty place of this test's own")

    @pytest.fixture
    def storage(self, folder: Place) -> Storage:
        found = storage_of(folder)
        found.make_folder(folder)
        return found

    def test_what_was_put_is_read_and_listed(self, storage: Storage, folder: Place) -> None:
        """GIVEN files WHEN they are asked for THEN they are as they were put, in the order of their names."""
        storage.put(folder / "b.json", b"two")
        storage.put(folder / "a.json", b"one")
        storage.put(folder / "c.txt", b"")
        storage.put(folder / "below" / "d.json", b"deep")
        assert storage.read(folder / "a.json") == b"one"
        assert [(each.name, each.size) for each in storage.listed(folder, ".json")] == [("a.json", 3), ("b.json", 3)]
        assert [each.name for each in storage.listed(folder)] == ["a.json", "b.json", "c.txt"]
        assert storage.folders(folder) == ["below"]
        assert storage.has_folder(folder / "below")
        assert not storage.has_folder(folder / "belo")
        assert (storage.exists(folder / "c.txt"), storage.exists(folder / "d")) == (True, False)
        assert storage.size(folder / "b.json") == 3

    def test_put_replaces_what_was_there(self, storage: Storage, folder: Place) -> None:
        """GIVEN a file WHEN another is put in its place THEN that is read."""
        storage.put(folder / "a", b"old")
        storage.put(folder / "a", b"new")
        assert storage.read(folder / "a") == b"new"

    def test_what_is_not_there_is_told_so(self, storage: Storage, folder: Place) -> None:
        """GIVEN nothing WHEN it is asked for THEN that is said; to delete it is no error."""
        nothing = folder / "nothing"
        for ask in (storage.read, storage.size):
            with pytest.raises(FileNotFoundError):
                ask(nothing)
        storage.delete(nothing)
        assert storage.listed(nothing) == []
        assert storage.folders(nothing) == []
        assert not storage.has_folder(nothing)

    def test_what_was_deleted_is_gone(self, storage: Storage, folder: Place) -> None:
        """GIVEN a file WHEN it is deleted THEN it is neither read nor listed."""
        storage.put(folder / "a", b"1")
        storage.delete(folder / "a")
        assert not storage.exists(folder / "a")
        assert storage.listed(folder) == []

    def test_a_file_is_put_where_there_is_none_and_only_there(self, storage: Storage, folder: Place) -> None:
        """GIVEN a file WHEN a second writer puts its own in the same place THEN it is told so, and the first stays."""
        assert storage.put_new(folder / "1.json", b"first")
        assert not storage.put_new(folder / "1.json", b"second")
        assert storage.read(folder / "1.json") == b"first"
        assert [each.name for each in storage.listed(folder)] == ["1.json"]

    def test_of_many_writers_of_one_place_one_wins(self, storage: Storage, folder: Place) -> None:
        """GIVEN sixteen writers at once THEN one is told that it won, and what is there is all of what it wrote."""
        won: list[bytes] = []

        def write(number: int) -> None:
            body = b"%d;" % number * 5_000
            if storage.put_new(folder / "7.json", body):
                won.append(body)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [storage.read(folder / "7.json")] == won

    def test_a_draft_is_a_file_when_it_is_finished(self, storage: Storage, folder: Place) -> None:
        """GIVEN a Parquet file in the writing WHEN it is finished THEN it is read by pyarrow, at its size."""
        table = pa.table({"x": list(range(1000))})
        draft = storage.draft(folder / "x.parquet")
        with pq.ParquetWriter(draft.sink, table.schema) as writer:
            writer.write_table(table)
        size = draft.finish()
        assert storage.size(folder / "x.parquet") == size
        assert pq.read_table(storage.readable(folder / "x.parquet")) == table

    def test_a_draft_that_is_discarded_was_never_there(self, storage: Storage, folder: Place) -> None:
        """GIVEN a draft WHEN it is discarded, finished or not THEN there is no file."""
        for finished in (False, True):
            draft = storage.draft(folder / "x.parquet")
            with pq.ParquetWriter(draft.sink, pa.schema([("x", pa.int64())])):
                pass
            if finished:
                draft.finish()
            draft.discard()
            assert storage.listed(folder) == []

    def test_a_large_file_is_read_by_parts(self, storage: Storage, folder: Place) -> None:
        """GIVEN a file of many megabytes in several row groups WHEN one of them is read THEN it is right."""
        words = pa.table({"x": pa.array([f"{number:032}" for number in range(120_000)])})
        draft = storage.draft(folder / "x.parquet")
        with pq.ParquetWriter(draft.sink, words.schema, compression="none", use_dictionary=False) as writer:
            for first in range(0, 480_000, 120_000):
                writer.write_table(words.slice(0, 120_000) if first else words)
        assert draft.finish() > 16 * 1024 * 1024
        with pq.ParquetFile(storage.readable(folder / "x.parquet")) as parquet:
            assert parquet.num_row_groups == 4
            assert parquet.read_row_group(2) == words
        assert pq.read_table(storage.readable(folder / "x.parquet"), columns=["x"]).num_rows == 480_000

    def test_a_file_keeps_its_identity(self, storage: Storage, folder: Place) -> None:
        """GIVEN files that are never replaced THEN two of them are told apart, and one is the same each time."""
        storage.put_new(folder / "1.json", b"1")
        storage.put_new(folder / "2.json", b"2")
        assert storage.identity(folder / "1.json") == storage.identity(folder / "1.json")
        assert storage.identity(folder / "1.json") != storage.identity(folder / "2.json")

    def test_a_file_that_was_just_put_is_young(self, storage: Storage, folder: Place) -> None:
        """GIVEN a new file WHEN its age is judged by the storage's own clock THEN it is seconds at most."""
        storage.put(folder / "a", b"1")
        (found,) = storage.listed(folder)
        assert -2 < storage.now(folder, time.time()) - found.modified < 60

    def test_what_was_put_can_be_synced(self, storage: Storage, folder: Place) -> None:
        """GIVEN files and folders WHEN they are synced THEN that succeeds, and changes nothing."""
        storage.put_new(folder / "1.json", b"1")
        storage.sync(folder / "1.json", folder)
        assert storage.read(folder / "1.json") == b"1"
