from __future__ import annotations

import pytest

from nanoengine.engine.sequence import Sequence, Status
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import make_sequence, tell


def test_a_new_sequence_waits_with_everything_to_compute() -> None:
    seq = make_sequence(3, [1, 2, 3])
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (3, 3, 0)
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (0, 3)
    assert (seq.status, seq.finished, seq.finish_reason) == (Status.WAITING, False, None)
    assert seq.block_table == []


def test_output_is_what_follows_the_prompt() -> None:
    seq = make_sequence(0, [1, 2, 3])
    tell(seq, 8, 9)
    assert seq.output_token_ids == [8, 9]
    assert (seq.num_tokens, seq.num_output_tokens) == (5, 2)


def test_what_remains_to_compute_is_a_difference_at_every_stage() -> None:
    seq = make_sequence(0, [1, 2, 3, 4])
    seq.num_computed_tokens = 3  # in the middle of the prompt
    assert seq.num_uncomputed_tokens == 1
    seq.num_computed_tokens = 4
    tell(seq, 9)  # decoding
    assert seq.num_uncomputed_tokens == 1
    seq.num_computed_tokens = 0  # preempted
    assert seq.num_uncomputed_tokens == 5


def test_the_callers_prompt_is_not_touched() -> None:
    prompt = [1, 2]
    seq = Sequence(0, prompt, SamplingParams())
    tell(seq, 3)
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("ignore_eos", "stop_token_ids", "expected"),
    [(False, [], {5, 6}), (False, [9, 5], {5, 6, 9}), (True, [], set()), (True, [9], {9}), (True, [5], {5})],
)
def test_stop_tokens_are_those_of_the_model_and_of_the_params(
    ignore_eos: bool, stop_token_ids: list[int], expected: set[int]
) -> None:
    seq = make_sequence(0, [1], eos=[6, 5], ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    assert seq.stop_token_ids == expected


def test_seeds_differ_by_request_seed_and_by_completion() -> None:
    seeds = [Sequence(0, [1], SamplingParams(), index=index, seed=seed).seed for index in range(4) for seed in range(4)]
    assert len(set(seeds)) == 16


def test_the_seed_does_not_depend_on_the_engines_numbering() -> None:
    assert Sequence(0, [1], SamplingParams(), seed=7).seed == Sequence(99, [1, 2], SamplingParams(), seed=7).seed


def test_sequences_with_equal_content_are_not_equal() -> None:
    """Lists of sequences are searched for the very one."""
    assert make_sequence(0, [1]) != make_sequence(0, [1])


def test_repr_says_where_it_stands() -> None:
    seq = make_sequence(4, [1, 2, 3])
    seq.num_computed_tokens = 2
    assert repr(seq) == "Sequence(4, waiting, 2/3 tokens computed)"


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(AttributeError):
        make_sequence(0, [1]).num_computed_token = 1
