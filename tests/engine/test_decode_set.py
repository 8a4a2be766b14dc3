"""Sequences in columns: a step moves a clock on, and what it says of each is what the sequence says of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.decode_set import DecodeSet
from nanoengine.engine.messages import Decodes
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import FAST, make_sequence, tell


def decoding(seq_id: int, length: int, row: int | None = None, priority: int = 0) -> Sequence:
    """A sequence of which all tokens but the last are computed."""
    seq = make_sequence(seq_id, [1] * (length - 1), priority=priority)
    seq.num_computed_tokens = length - 1
    tell(seq, 5)
    seq.row = seq_id if row is None else row
    return seq


def runs(decodes: Decodes) -> list[tuple[int, int]]:
    return list(zip(decodes.rows.tolist(), decodes.num_computed.tolist(), strict=True))


def look_at_nobody(decodes: DecodeSet) -> None:
    """Whoever is due need not be looked at for a long time."""
    for place, _ in decodes.due():
        decodes.check_again([place], [10**6])


def test_every_step_computes_one_token_of_each() -> None:
    decodes = DecodeSet()
    a, b = decoding(0, 4), decoding(1, 9)
    for seq in (a, b):
        decodes.add(seq)
    look_at_nobody(decodes)
    assert runs(decodes.advance()) == [(0, 3), (1, 8)]
    assert runs(decodes.advance()) == [(0, 4), (1, 9)]
    assert (a.num_tokens, a.num_computed_tokens) == (6, 5)
    assert (b.num_tokens, b.num_computed_tokens) == (11, 10)
    assert (a.num_known_tokens, a.num_uncomputed_tokens) == (4, 1), "what is known comes from results"
    decodes.check()


def test_whoever_leaves_takes_its_counts_along_and_the_others_go_on() -> None:
    decodes = DecodeSet()
    a, b, c = (decoding(i, 3 + i) for i in range(3))
    for seq in (a, b, c):
        decodes.add(seq)
    look_at_nobody(decodes)
    decodes.advance()
    decodes.remove(b)
    decodes.remove(b)
    assert len(decodes) == 2
    decodes.check()
    assert not b.decoding
    assert runs(decodes.advance()) == [(0, 3), (2, 5)]
    assert (b.num_tokens, b.num_computed_tokens) == (5, 4)
    b.num_tokens += 1  # its own again
    assert b.num_tokens == 6


def test_whoever_comes_and_goes_before_a_step_was_never_there() -> None:
    decodes = DecodeSet()
    a, b = decoding(0, 3), decoding(1, 3)
    decodes.add(a)
    decodes.add(b)
    decodes.remove(b)
    assert [seq for _, seq in decodes.due()] == [a]
    assert runs(decodes.advance()) == [(0, 2)]
    decodes.check()


def test_whoever_goes_and_comes_back_between_two_steps_is_there_once_and_is_looked_at() -> None:
    decodes = DecodeSet()
    a, b = decoding(0, 3), decoding(1, 3)
    for seq in (a, b):
        decodes.add(seq)
    look_at_nobody(decodes)
    decodes.advance()
    decodes.remove(a)
    a.row = 7
    decodes.add(a)
    decodes.check()
    assert len(decodes) == 2
    assert [seq for _, seq in decodes.due()] == [a]
    assert runs(decodes.advance()) == [(1, 3), (7, 3)]


def test_the_columns_of_earlier_steps_do_not_change() -> None:
    decodes = DecodeSet()
    a, b = decoding(0, 3), decoding(1, 3)
    decodes.add(a)
    look_at_nobody(decodes)
    first, who = decodes.advance(), decodes.seqs
    decodes.add(b)
    decodes.remove(a)
    look_at_nobody(decodes)
    second = decodes.advance()
    assert (runs(first), who) == ([(0, 2)], [a])
    assert (runs(second), decodes.seqs) == ([(1, 2)], [b])


def test_newcomers_are_looked_at_before_their_first_step_in_the_order_of_sequences() -> None:
    decodes = DecodeSet()
    for seq_id, priority in ((5, 0), (2, 0), (9, 0), (1, 3), (7, -3)):
        decodes.add(decoding(seq_id, 4, priority=priority))
    assert [seq.seq_id for _, seq in decodes.due()] == [7, 2, 5, 9, 1]


def test_each_is_looked_at_before_the_step_that_was_asked_for() -> None:
    decodes = DecodeSet()
    seqs = [decoding(i, 4) for i in range(3)]
    for seq in seqs:
        decodes.add(seq)
    for place, seq in decodes.due():
        decodes.check_again([place], [3 + [2, 5, 2][seq.seq_id]])
    seen = []
    for _ in range(7):
        decodes.advance()
        due = decodes.due()
        seen.append([seq.seq_id for _, seq in due])
        for place, _ in due:
            decodes.check_again([place], [1000])
    assert seen == [[], [0, 2], [], [], [1], [], []]


def test_whoever_was_not_asked_for_again_is_looked_at_before_every_step() -> None:
    decodes = DecodeSet()
    decodes.add(decoding(0, 4))
    for _ in range(3):
        assert len(decodes.due()) == 1
        decodes.advance()


def test_an_empty_set_has_nobody_to_look_at() -> None:
    decodes = DecodeSet()
    assert (len(decodes), decodes.due()) == (0, [])
    seq = decoding(0, 4)
    decodes.add(seq)
    decodes.due()
    decodes.remove(seq)
    assert (len(decodes), decodes.due()) == (0, [])


@FAST
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "step", "step"]), st.integers(0, 5), st.integers(1, 6)), max_size=60
    )
)
def test_it_is_a_list_of_counters_that_all_grow(moves: list[tuple[str, int, int]]) -> None:
    """Against the obvious: a counter for each sequence, and a time for its next check."""
    decodes = DecodeSet()
    lengths = {decoding(i, 3 + 2 * i, priority=i % 3): 2 + 2 * i for i in range(6)}  # computed tokens
    checks: dict[Sequence, int] = {}  # of those that are in the set
    for move, which, wait in moves:
        seq = list(lengths)[which]
        if move == "add" and seq not in checks:
            decodes.add(seq)
            checks[seq] = lengths[seq]
        elif move == "remove" and seq in checks:
            decodes.remove(seq)
            del checks[seq]
        elif move == "step":
            due = decodes.due()
            wanted = [other for other, at in checks.items() if lengths[other] >= at]
            assert [other for _, other in due] == sorted(wanted, key=lambda other: (other.seq_id % 3, other.seq_id))
            for place, other in due:
                decodes.check_again([place], [lengths[other] + wait])
                checks[other] = lengths[other] + wait
            if checks:
                assert sorted(runs(decodes.advance())) == sorted((other.row, lengths[other]) for other in checks)
            for other in checks:
                lengths[other] += 1
        decodes.check()
        assert len(decodes) == len(checks)
        assert all(
            (other.num_computed_tokens, other.decoding) == (lengths[other], other in checks) for other in lengths
        )
