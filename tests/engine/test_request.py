from __future__ import annotations

import pytest

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.engine.request import Completion, Request
from nanoengine.engine.sequence import Status
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import ByteTokenizer, make_sequence, tell


def make_request(n: int = 1, *, logprobs: int | None = None) -> Request:
    """A request that arrived at time 10."""
    completions = [
        Completion(make_sequence(index, b"ab", logprobs=logprobs), Detokenizer(ByteTokenizer().decode))
        for index in range(n)
    ]
    return Request("r", "ab", [*b"ab"], SamplingParams(n=n, logprobs=logprobs), 10.0, completions)


def say(completion: Completion, text: str, times: list[float]) -> None:
    """Tokens of a completion, one for each time."""
    for token, time in zip(text.encode(), times, strict=True):
        tell(completion.seq, token)
        completion.detokenizer.push(token)
        completion.first_token_time = time if completion.first_token_time is None else completion.first_token_time
        completion.last_token_time = time


def test_a_request_is_finished_with_its_last_completion() -> None:
    request = make_request(2)
    assert not request.finished
    request.completions[1].seq.status = Status.FINISHED
    assert not request.finished
    request.completions[0].seq.status = Status.FINISHED
    assert request.finished


def test_the_output_of_a_request_that_has_not_begun() -> None:
    output = make_request().output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ab", [97, 98])
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.num_cached_tokens) == ("", [], 0)
    assert (output.metrics.ttft, output.metrics.tpot, output.metrics.latency) == (None, None, None)


def test_an_output_is_a_value_that_later_tokens_do_not_change() -> None:
    request = make_request()
    say(request.completions[0], "x", [11.0])
    output = request.output()
    say(request.completions[0], "y", [12.0])
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("x", [*b"x"])


def test_metrics_of_one_completion() -> None:
    request = make_request()
    say(request.completions[0], "xyz", [11.0, 13.0, 16.0])
    metrics = request.output().metrics
    assert (metrics.ttft, metrics.tpot, metrics.latency) == (1.0, 2.5, None)
    request.completions[0].seq.status = Status.FINISHED
    assert request.output().metrics.latency == 6.0


def test_one_token_has_no_time_per_token() -> None:
    request = make_request()
    say(request.completions[0], "x", [11.0])
    assert request.output().metrics.tpot is None


def test_metrics_of_several_completions_take_the_earliest_token_and_the_longest_run() -> None:
    request = make_request(3)
    say(request.completions[0], "x", [12.0])
    say(request.completions[1], "xyz", [11.0, 13.0, 15.0])
    request.completions[0].seq.num_preemptions = 2
    request.completions[2].seq.num_preemptions = 1
    metrics = request.output().metrics
    assert (metrics.ttft, metrics.tpot, metrics.num_preemptions) == (1.0, 2.0, 3)


def test_a_request_aborted_before_its_first_token_has_no_times() -> None:
    request = make_request()
    request.completions[0].seq.status = Status.FINISHED
    assert request.output().metrics.latency is None


@pytest.mark.parametrize("asked", [None, 0])
def test_logprobs_are_reported_if_they_were_asked_for(asked: int | None) -> None:
    request = make_request(logprobs=asked)
    say(request.completions[0], "xy", [11.0, 12.0])
    request.completions[0].seq.logprobs = [
        {ord("x"): TokenLogprob(-1.0, 1), 5: TokenLogprob(-3.0, 2)},
        {ord("y"): TokenLogprob(-0.5, 1)},
    ]
    [output] = request.output().outputs
    assert output.cumulative_logprob == (None if asked is None else -1.5)
    assert (output.logprobs is None) == (asked is None)
