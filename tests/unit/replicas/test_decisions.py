"""The decisions of replicas, without a database."""

from __future__ import annotations

import bisect
import hashlib
import random
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import ConflictError, FormatError, SetupError
from evermark.replicas import clock
from evermark.replicas.digests import Digest, RowDigest, Span, compared, differing, digest_of
from evermark.replicas.event import (
    Event,
    Operation,
    Version,
    beats,
    born_ms,
    member_of,
    new_origin,
    winners,
)
from evermark.replicas.members import Member, Said, floors, heard, may_give_up, settled, silent
from evermark.replicas.paging import SnapshotRequired, coverage, stretches, wanted
from evermark.replicas.ranges import Ranges, gaps, held_as_json, held_from, lacking, ranges_from, union
from evermark.replicas.values import Kind, Table, canonical, record_id, split_record_id

numbers = st.sets(st.integers(1, 60), max_size=40)
versions = st.builds(Version, st.integers(1, 5), st.sampled_from("xyz"), st.integers(1, 4))


def members_of(ranges: Ranges) -> set[int]:
    return {number for start, end in ranges for number in range(start, end + 1)}


@given(numbers, numbers)
def test_r4_ranges_are_sets(one: set[int], other: set[int]) -> None:
    """GIVEN two sets THEN union, difference, covering and membership of their ranges are those of the sets."""
    a, b = Ranges.of(one), Ranges.of(other)
    assert members_of(a | b) == one | other and members_of(a - b) == one - other
    assert a.covers(b) == (other <= one)
    assert all((number in a) == (number in one) for number in range(62))
    assert ranges_from([list(part) for part in a]) == a
    assert all(end + 1 < start for (_, end), (start, _) in zip(a.parts, a.parts[1:], strict=False))


@given(numbers)
def test_r4_the_checkpoint_never_passes_a_missing_number(held: set[int]) -> None:
    """GIVEN any set THEN all up to the checkpoint is there, the next is not, and what is missing lies between."""
    ranges = Ranges.of(held)
    at = ranges.contiguous
    assert set(range(1, at + 1)) <= held and at + 1 not in held
    assert members_of(ranges.missing) == set(range(1, ranges.highest + 1)) - held


@pytest.mark.parametrize("wrong", [None, {}, [[2, 1]], [[0, 3]], [["1", 2]], [[1, 2**63]], [[1]], [[1, 2]] * 2000])
def test_ranges_of_a_peer_are_checked(wrong: object) -> None:
    """GIVEN ranges that are none WHEN a peer sends them THEN they are refused."""
    with pytest.raises(FormatError):
        ranges_from(wrong)


@given(
    st.dictionaries(st.sampled_from("xyz"), numbers),
    st.dictionaries(st.sampled_from("xyz"), numbers),
    st.integers(1, 9),
)
def test_r5_pages_bring_all_that_is_lacking_once(
    mine: dict[str, set[int]], theirs: dict[str, set[int]], limit: int
) -> None:
    """GIVEN what two nodes hold WHEN one asks page by page THEN it gets what it lacks, each once, by (origin, seq)."""
    here = {origin: Ranges.of(held) for origin, held in mine.items()}
    there = {origin: Ranges.of(held) for origin, held in theirs.items()}
    got: list[tuple[str, int]] = []
    asked = there
    while True:
        found = wanted("t", here, {}, asked)
        page = stretches(found, limit)
        told = coverage(found, page, here)
        got += [(stretch.origin, seq) for stretch in page for seq in range(stretch.start, stretch.end + 1)]
        asked = union(asked, told.covered)
        if not told.more:
            break
    lacked = [(o, seq) for o in sorted(mine) for seq in sorted(mine[o] - theirs.get(o, set()))]
    assert got == lacked and not lacking(asked, here)


@given(numbers.filter(bool), st.integers(0, 60), numbers)
def test_r10_nothing_below_the_floor_is_skipped(mine: set[int], floor: int, theirs: set[int]) -> None:
    """GIVEN a floor WHEN a peer lacks something at or below it THEN a snapshot is required, and only then."""
    below = {seq for seq in mine - theirs if seq <= floor}
    with pytest.raises(SnapshotRequired, match="snapshot required") if below else nullcontext():
        wanted("t", {"x": Ranges.of(mine)}, {"x": floor}, {"x": Ranges.of(theirs)})


@given(st.lists(versions, min_size=1, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_r7_the_winner_does_not_depend_on_the_order(found: list[Version], rng: random.Random) -> None:
    """GIVEN versions in any order WHEN each takes the row if it beats the one there THEN the highest has it."""
    current: Version | None = None
    for version in rng.sample(found, len(found)):
        if beats(version, current):
            current = version
    assert current == max(found)
    events = [Event(str(v), "t", Operation.DELETE, "1", None, 0, v) for v in rng.sample(found, len(found))]
    assert winners(events)["1"].version == max(found)


def test_r7_a_clock_that_is_too_far_ahead_is_told() -> None:
    """GIVEN readings around the bound THEN only those beyond it are ahead."""
    assert not clock.is_ahead(clock.at_ms(1500) + 65535, 1000, 500)
    assert clock.is_ahead(clock.at_ms(1501), 1000, 500)
    assert clock.ms_of(clock.at_ms(77) + 3) == 77


def test_r2_origins_name_their_node_and_their_birth() -> None:
    """GIVEN an origin THEN its node and its birth are known; two clones born at once are still two."""
    one, other = new_origin("north-1", 77, "0000000a"), new_origin("north-1", 77, "0000000b")
    assert one != other and member_of(one) == member_of(other) == "north-1" and born_ms(one) == 77


def said(origin: str, held: int, clock_at: int = 0, tick: int = 1, evicted: frozenset[str] = frozenset()) -> Said:
    return Said(origin, tick, {"t": {X: Ranges.through(held)}}, {"t": clock_at}, evicted)


X, B, C = (new_origin(name, 5, "00000000") for name in ("x", "b", "c"))
MINE = {X: Ranges.through(9)}


def test_r9_the_floor_is_the_least_that_any_member_holds() -> None:
    """GIVEN members with 7 and 4 of 9 THEN the floor is 4; one that was never heard, or is unknown, holds all back."""
    known = [Member("b", said(B, 7), {"t": 50}), Member("c", said(C, 4), {"t": 40})]
    found = floors("t", "x", MINE, 99, known, frozenset())
    assert (found.by_origin, found.clock) == ({X: 4}, 40)
    assert floors("t", "x", MINE, 99, [*known, Member("d")], frozenset()).holding == ("d",)
    stranger = {**MINE, new_origin("e", 5, "00000000"): Ranges.through(1)}
    assert floors("t", "x", stranger, 99, known, frozenset()).holding == ("e",)


def test_r9_an_evicted_member_counts_until_all_others_know() -> None:
    """GIVEN an evicted member THEN it holds collection back until every other member has said that it knows."""
    known = [Member("b", said(B, 7), {"t": 50}), Member("c", said(C, 4), {"t": 40})]
    assert floors("t", "x", MINE, 99, known, frozenset({C})).holding == ("b",)
    known[0] = Member("b", said(B, 7, evicted=frozenset({C})), {"t": 50})
    assert floors("t", "x", MINE, 99, known, frozenset({C})).by_origin == {X: 7}
    assert silent([Member("b", said(B, 1), heard_ms=900), Member("d")], 1000, 50) == {B}


def test_r9_a_clock_counts_only_when_all_that_its_member_held_is_here() -> None:
    """GIVEN a member that holds more than we do WHEN it tells its clock THEN that counts once we hold the same."""
    member = heard(Member("b"), said(B, 12, clock_at=80), 1)
    assert settled(member, {"t": MINE}).settled == {}
    assert settled(member, {"t": {X: Ranges.through(12)}}).settled == {"t": 80}
    assert heard(member, said(B, 3, tick=1), 2) is member, "nothing new"
    later = new_origin("b", 6, "00000000")
    assert heard(settled(member, {"t": {X: Ranges.through(12)}}), said(later, 3), 2).settled == {}


@given(st.lists(st.text(max_size=6), min_size=2, max_size=4))
def test_keys_of_several_columns_come_apart_again(texts: list[str]) -> None:
    """GIVEN any texts WHEN they are made one record id THEN it gives them back."""
    assert split_record_id(record_id(texts)) == texts


@pytest.mark.parametrize(
    ("kind", "text", "same"),
    [
        (Kind.INTEGER, "+007", "7"),
        (Kind.REAL, "0.10000000000000001", "0.1"),
        (Kind.REAL, "1e2", "100.0"),
        (Kind.BOOLEAN, "1", "true"),
        (Kind.BYTES, "00FF", "00ff"),
        (Kind.NUMERIC, "1.500", "1.5"),
        (Kind.NUMERIC, "-0", "0"),
        (Kind.NUMERIC, "-1200", "-1200"),
        (Kind.NUMERIC, "1e3", "1000"),
        (Kind.NUMERIC, f"{'7' * 31}.00", "7" * 31),
        (Kind.NUMERIC, f"-{'1' * 30}.{'2' * 30}0", f"-{'1' * 30}.{'2' * 30}"),
        (Kind.TEXT, " x ", " x "),
    ],
)
def test_values_have_one_text(kind: Kind, text: str, same: str) -> None:
    """GIVEN a value as a database writes it THEN its canonical text is the same everywhere, and stays so."""
    assert canonical(kind, text) == same and canonical(kind, same) == same and canonical(kind, None) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.INTEGER, "1_0"),
        (Kind.INTEGER, str(2**63)),
        (Kind.REAL, "nan"),
        (Kind.BOOLEAN, "yes"),
        (Kind.BYTES, "0"),
        (Kind.NUMERIC, "1e5000"),
        (Kind.NUMERIC, "NaN"),
    ],
)
def test_values_that_are_none_are_refused(kind: Kind, text: str) -> None:
    """GIVEN a text that is no value of its kind THEN it is refused."""
    with pytest.raises(ValueError, match=r"a value|a number|NaN|hex"):
        canonical(kind, text)


def test_r8_tables_and_images_are_checked() -> None:
    """GIVEN names, keys and images that do not fit THEN each is refused."""
    table = Table("t", {"id": Kind.INTEGER, "a": Kind.TEXT}, ("id",))
    assert Table.from_json("t", table.as_json()) == table
    assert table.checked({"id": "01", "a": None}, "1") == {"id": "1", "a": None}
    for image in ({"id": "1"}, {"id": "1", "a": 5}, {"id": "2", "a": ""}, {"id": None, "a": ""}, {"id": "1", "b": ""}):
        with pytest.raises(FormatError):
            table.checked(image, "1")
    for name, columns, key in (("t;", {"id": Kind.INTEGER}, ("id",)), ("t", {"id": Kind.REAL}, ("id",)), ("t", {}, ())):
        with pytest.raises(SetupError):
            Table(name, columns, key)  # type: ignore[arg-type]


class _Rows:
    """A side whose rows are in memory; counts the bytes that would be moved."""

    def __init__(self, rows: dict[str, bytes]) -> None:
        self._rows, self._keys, self.moved = rows, sorted(rows), 0

    def _of(self, span: Span) -> list[RowDigest]:
        start, end = span
        low = 0 if start is None else bisect.bisect_left(self._keys, start)
        high = len(self._keys) if end is None else bisect.bisect_left(self._keys, end)
        return [(key, self._rows[key]) for key in self._keys[low:high]]

    def digests(self, spans: list[Span]) -> list[Digest]:
        self.moved += sum(24 + len(a or "") + len(b or "") for a, b in spans)
        return [digest_of(self._of(span)) for span in spans]

    def rows(self, spans: list[Span]) -> list[list[RowDigest]]:
        found = [self._of(span) for span in spans]
        self.moved += sum(len(key) + 8 for rows in found for key, _ in rows)
        return found

    def cuts(self, spans: list[Span], pieces: int) -> list[list[str]]:
        found = []
        for span in spans:
            keys = [key for key, _ in self._of(span)]
            step = max(1, -(-len(keys) // pieces))
            found.append(keys[step::step])
        return found


@given(st.sets(st.integers(0, 3000), min_size=0, max_size=400), st.integers(0, 2**32))
def test_r14_digests_find_exactly_the_rows_that_differ(keys: set[int], seed: int) -> None:
    """GIVEN two tables that differ in some rows THEN the descent names exactly those, whichever side has more."""
    rng = random.Random(seed)
    mine = {str(key): hashlib.sha256(str(key).encode()).digest()[:8] for key in keys}
    theirs = dict(mine)
    for key in rng.sample(range(3000), rng.choice((0, 1, 5, 150))):
        if rng.random() < 0.5:
            theirs[str(key)] = b"other"
        else:
            theirs.pop(str(key), None)
    found, whole = differing(_Rows(mine), _Rows(theirs), 10_000)
    assert whole and sorted(found, key=lambda each: each.record_id) == compared(mine, theirs)


@pytest.mark.parametrize("keys", [[], [""], ["a"], ["z"], ["n", "m"], ["m", "m"]])
def test_r14_a_range_that_is_not_cut_ends_the_comparison(keys: list[str]) -> None:
    """GIVEN a side that says again and again that it has more rows, and cuts a range into none that are smaller THEN
    that is an error, and not gone on with."""

    class Here(_Rows):
        def digests(self, spans: list[Span]) -> list[Digest]:
            return [Digest(1, b"alike" if None in span else b"here") for span in spans]

        def cuts(self, spans: list[Span], pieces: int) -> list[list[str]]:
            return [["a", "z"]]

    class There(_Rows):
        def digests(self, spans: list[Span]) -> list[Digest]:
            return [Digest(1, b"alike") if None in span else Digest(1000, b"there") for span in spans]

        def cuts(self, spans: list[Span], pieces: int) -> list[list[str]]:
            assert spans == [("a", "z")], "it was gone on with"
            return [keys]

    with pytest.raises(FormatError, match="into smaller ones"):
        differing(Here({}), There({}), 10)


def test_r14_few_differences_in_many_rows_move_little() -> None:
    """GIVEN ten rows of 100 000 that differ WHEN compared THEN less than a hundredth of a row each is moved."""
    mine = {f"{key:06d}": b"12345678" for key in range(100_000)}
    there = _Rows(mine | {f"{key:06d}": b"other" for key in range(0, 100_000, 10_000)})
    found, whole = differing(_Rows(mine), there, 100)
    assert whole and len(found) == 10
    assert there.moved < 100_000


@given(st.dictionaries(st.sampled_from("xyz"), numbers))
def test_what_is_held_survives_the_wire(held: dict[str, set[int]]) -> None:
    """GIVEN what a node holds WHEN written as JSON and read again THEN it is the same, without what is empty."""
    ranges = {origin: Ranges.of(each) for origin, each in held.items() if each}
    assert held_from(held_as_json(ranges)) == ranges


def _member(name: str, held: dict[str, Ranges] | None, origin: str | None = None) -> Member:
    said = None if held is None else Said(origin or f"{name}.000000000001aaaaaaaa", 1, {"t": held}, {"t": 1})
    return Member(name, said)


def test_r9_what_was_given_up_is_missing_no_more() -> None:
    """GIVEN gaps of two origins, and numbers of one that were given up THEN the others are what is missing."""
    held = {"a": Ranges(((1, 1), (4, 4), (9, 9))), "b": Ranges(((2, 2),)), "c": Ranges.through(7)}
    assert gaps(held, {}) == {"a": Ranges(((2, 3), (5, 8))), "b": Ranges(((1, 1),))}
    assert gaps(held, {"a": Ranges(((2, 5),)), "c": Ranges(((9, 9),))}) == {
        "a": Ranges(((6, 8),)),
        "b": Ranges(((1, 1),)),
    }


def test_r9_numbers_are_given_up_only_when_no_member_may_have_them() -> None:
    """GIVEN a gap that is left after a restore THEN it is given up if every live member was heard and none has any of
    it, nor writes under that origin; collection then passes it, on this node's word alone."""
    old, me = "b.000000000001bbbbbbbb", "a.000000000001aaaaaaaa"
    mine = {old: Ranges(((1, 5), (9, 12)))}
    gap = Ranges(((6, 8),))
    fine, none = _member("c", mine), frozenset[str]()
    assert may_give_up("t", me, old, gap, mine, [fine], none) == gap
    assert may_give_up("t", me, old, Ranges.through(12), mine, [_member("c", {})], none) == gap
    assert may_give_up("t", me, old, Ranges(((6, 10**12),)), mine, [_member("c", {})], none) == gap
    assert not may_give_up("t", me, "x.000000000001bbbbbbbb", gap, mine, [fine], none)
    has = _member("d", {old: Ranges.of([7])})
    for member in (_member("d", None), has, _member("b", mine, old)):
        with pytest.raises(ConflictError, match=member.name):
            may_give_up("t", me, old, gap, mine, [fine, member], none)
    assert may_give_up("t", me, old, gap, mine, [fine, has], frozenset({str(has.origin)})) == gap
    with pytest.raises(ConflictError, match="own origin"):
        may_give_up("t", me, me, gap, mine, [fine], none)
    members = [fine, _member("b", mine)]
    assert floors("t", "a", mine, 9, members, none).by_origin == {old: 5}
    assert floors("t", "a", mine, 9, members, none, {old: gap}).by_origin == {old: 12}
