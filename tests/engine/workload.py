"""Drawn workloads for whole engines: requests that come, fork, stop, are aborted, and get what they would have got alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import UNKNOWN
from nanoengine.engine.request import Request
from tests.engine.engine_toys import assert_idle
from tests.engine.toys import VOCAB_SIZE, continuation

NO_EOS: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wish:
    """One request of a drawn workload."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    stops: frozenset[int]  # it ends at a token whose remainder by 7 is one of these: nobody can foresee it
    arrives: int  # in the engine's step of this number
    abort_at: int | None  # likewise
    priority: int = 0
    client: str = ""
    include_stop: bool = False  # the text of the token at which it ends is in its text

    @property
    def params(self) -> SamplingParams:
        stops = [token for token in range(VOCAB_SIZE) if token % 7 in self.stops]
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            n=self.n,
            stop_token_ids=stops,
            include_stop_str_in_output=self.include_stop,
            seed=0,
        )


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple),
    st.sampled_from([(1,) * 4, (1,) * 8, (1,) * 9, (1,) * 12]),  # prefixes that meet, at block boundaries
)
wishes = st.builds(
    Wish,
    prompt=prompts,
    max_tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stops=st.frozensets(st.integers(0, 6), max_size=2),
    arrives=st.integers(0, 8),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 14)),
    priority=st.sampled_from([0, 0, -1, 1]),
    client=st.sampled_from(["", "", "a", "b"]),
    include_stop=st.booleans(),
)


def serve(engine: LLMEngine, workload: list[Wish], before_step: Callable[[int], None] | None = None) -> list[Request]:
    """Run a workload to its end; the invariants are checked after every step."""
    requests = [
        engine.make_request(list(wish.prompt), wish.params, priority=wish.priority, client=wish.client)
        for wish in workload
    ]
    step = 0
    while step <= 15 or engine.has_unfinished:
        assert step < 3000, "the engine does not come to an end"
        if before_step is not None:
            before_step(step)
        for wish, request in zip(workload, requests, strict=True):
            if wish.arrives == step:
                engine.submit(request)
            if wish.abort_at is not None and wish.abort_at + wish.arrives == step:
                engine.abort(request.request_id)
        engine.step()
        engine.scheduler.check()
        assert all(UNKNOWN not in c.token_ids for r in requests if r.completions for c in r.output().outputs)
        step += 1
    assert_idle(engine)
    assert engine.scheduler.num_in_flight == 0
    return requests


def expected(wish: Wish) -> list[int]:
    """What each completion of a request says, if it is not aborted."""
    tokens = []
    for token in continuation(wish.prompt, wish.max_tokens):
        tokens.append(token)
        if token % 7 in wish.stops:
            break
    return tokens


def assert_as_alone(engine: LLMEngine, workload: list[Wish], requests: list[Request]) -> None:
    """Every request of a workload that was served got what it would have got alone, and as text."""
    for wish, request in zip(workload, requests, strict=True):
        for output in request.output().outputs:
            tokens = expected(wish)
            is_cut = output.finish_reason == "stop" and not wish.include_stop
            said = output.token_ids[:-1] if is_cut else output.token_ids
            assert output.text == engine.tokenizer.decode(said)
            if output.finish_reason == "abort":
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert output.token_ids == tokens
                assert output.finish_reason == ("stop" if tokens[-1] % 7 in wish.stops else "length")
