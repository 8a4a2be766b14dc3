from __future__ import annotations

import pytest

from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import make_sequence, tell


def test_a_new_sequence_waits_with_everything_to_compute() -> None:
    seq = make_sequence(3, [1, 2, 3])
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (3, 3, 0)
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (0, 3)
    assert (seq.status, seq.finished, seq.finish_reason) == (Status.WAITING, False, None)
    assert seq.block_tables == []


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


# ---- what is computed, known and written


def test_tokens_on_their_way_count_and_are_not_known() -> None:
    seq = make_sequence(0, [1, 2, 3])
    seq.num_computed_tokens = 3
    seq.num_tokens = 4
    assert (seq.num_tokens, seq.num_known_tokens, seq.num_output_tokens) == (4, 3, 0)
    assert (seq.token_ids, seq.output_token_ids) == ([1, 2, 3], [])
    assert seq.num_uncomputed_tokens == 1


def test_the_kv_of_the_last_known_token_is_not_written_for_certain() -> None:
    seq = make_sequence(0, [1, 2, 3, 4])
    seq.num_computed_tokens = 2
    assert seq.num_written_tokens == 2
    seq.num_computed_tokens = 4  # on their way: nothing that they sample has come
    assert seq.num_written_tokens == 3
    tell(seq, 5)
    assert seq.num_written_tokens == 4


def test_it_ends_at_the_models_length_or_with_its_own_most_tokens() -> None:
    for max_tokens, end in ((None, 10), (2, 5), (7, 10), (100, 10)):
        seq = make_sequence(0, [1, 2, 3], max_tokens=max_tokens)
        seq.limit_length(10)
        assert seq.max_num_tokens == end


# ---- how it is sampled


def test_the_executor_is_told_of_stop_tokens_only_where_they_may_be_banned() -> None:
    assert make_sequence(0, [1], eos=[6], stop_token_ids=[9]).sampling.stop_token_ids == ()
    sampling = make_sequence(0, [1], eos=[6], stop_token_ids=[9], min_tokens=2).sampling
    assert set(sampling.stop_token_ids) == {6, 9}


def test_sampling_is_that_of_the_request_and_the_completion() -> None:
    seq = Sequence(0, [1, 2], SamplingParams(top_k=3), index=1, seed=7, bad_words=((4, 5),))
    assert (seq.sampling.params.top_k, seq.sampling.seed, seq.sampling.num_prompt_tokens) == (3, seq.seed, 2)
    assert seq.sampling.bad_words == ((4, 5),)


# ---- log probabilities of the prompt


def entry(token: int) -> dict[int, TokenLogprob]:
    return {token: TokenLogprob(-1.0, 1)}


@pytest.mark.parametrize(
    ("prompt", "index", "asked", "wanted"),
    [([1, 2], 0, None, None), ([1, 2], 0, 0, 0), ([1, 2], 0, 3, 3), ([1, 2], 1, 3, None), ([1], 0, 3, None)],
)
def test_log_probabilities_of_a_prompt_are_computed_once_for_all_completions_and_never_for_one_token(
    prompt: list[int], index: int, asked: int | None, wanted: int | None
) -> None:
    seq = Sequence(0, prompt, SamplingParams(prompt_logprobs=asked), index=index)
    assert seq.sampling.prompt_logprobs == wanted
    assert seq.reads_cache == (wanted is None)


def test_once_all_are_there_the_cache_is_of_use_again() -> None:
    seq = make_sequence(0, [1, 2, 3, 4], prompt_logprobs=0)
    seq.take_prompt_logprobs(1, [entry(2)])
    assert not seq.reads_cache
    seq.take_prompt_logprobs(2, [entry(3), entry(4)])
    assert seq.reads_cache
    assert seq.prompt_logprobs == [entry(2), entry(3), entry(4)]


def test_a_sequence_that_was_preempted_takes_them_from_the_start_again() -> None:
    seq = make_sequence(0, [1, 2, 3, 4], prompt_logprobs=0)
    seq.take_prompt_logprobs(1, [entry(8), entry(8)])
    seq.take_prompt_logprobs(1, [entry(2)])
    assert seq.prompt_logprobs == [entry(2)]
    seq.take_prompt_logprobs(2, [entry(3), entry(4)])
    assert seq.prompt_logprobs == [entry(2), entry(3), entry(4)]
