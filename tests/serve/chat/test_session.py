"""A conversation without a terminal: what the model is given, and what is kept of what it says."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import pytest

from nanoengine import LoRARequest, SamplingParams
from nanoengine.errors import InvalidPrompt, NanoEngineError, PromptTooLong, StepFailed
from nanoengine.serve.chat.answer import Stats
from nanoengine.serve.chat.session import ChatError, Session
from tests.serve.chat.conftest import NewLLM
from tests.serve.chat.toys import HANG, answer
from tests.serve.server.parrot import POISON

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_the_model_is_given_the_whole_conversation(session: Session) -> None:
    session.system = "Be brief"
    first = answer(session.ask("one"))
    assert first == "system\nBe brief\nuser\none\nassistant\n"
    second = answer(session.ask("two"))
    assert second == f"system\nBe brief\nuser\none\nassistant\n{first}\nuser\ntwo\nassistant\n"
    assert [own["role"] for own in session.messages] == ["user", "assistant"] * 2
    assert session.messages[-1]["content"] == second


def test_what_was_said_before_a_stop_stays_and_nothing_goes_on(session: Session) -> None:
    pieces = session.ask("a long message")
    said = answer(islice(pieces, 7))
    pieces.close()
    assert session.messages == [{"role": "user", "content": "a long message"}, {"role": "assistant", "content": said}]
    assert not session.llm.engine.requests
    assert session.stats[-1].reason == "abort"
    assert f"assistant\n{said}\nuser\nnext" in answer(session.ask("next"))


def test_an_answer_that_hangs_can_be_stopped_before_more_is_asked_for(session: Session) -> None:
    assert len(list(islice(session.ask(f"please {HANG}"), 5))) == 5
    session.reset()  # or the word would be in the next prompt, too
    assert answer(session.ask("go on")).endswith("go on\nassistant\n")


def test_retry_answers_the_last_message_anew(session: Session) -> None:
    with pytest.raises(ChatError, match="nothing was asked"):
        session.retry()
    first = answer(session.ask("one"))
    assert answer(session.retry()) == first
    assert [own["content"] for own in session.messages] == ["one", first]
    stopped = session.retry()
    next(stopped)
    stopped.close()
    assert answer(session.retry()) == first


def test_each_retry_has_a_seed_of_its_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.set("seed", str(2**63 - 1))
    seeds, make_requests = [], session.llm.make_requests

    def noted(prompts: Any, params: SamplingParams) -> Any:
        seeds.append(params.seed)
        return make_requests(prompts, params)

    monkeypatch.setattr(session.llm, "make_requests", noted)
    for said in ("one", "", "", "two"):
        answer(session.ask(said) if said else session.retry())
    assert len(set(seeds)) == 3
    assert seeds[0] == seeds[3] == session.params.seed


def test_an_adapter_answers_and_an_engine_without_any_says_so(new_llm: NewLLM) -> None:
    session = Session(new_llm(), SamplingParams(), adapter=LoRARequest("poet", lora_path="a/folder"))
    with pytest.raises(NanoEngineError, match="enable_lora"):
        session.ask("one")


def test_a_retry_finds_the_prompt_in_the_cache(session: Session) -> None:
    answer(session.ask("some words that fill blocks"))
    answer(session.retry())
    first, second = session.stats
    assert first.num_cached == 0
    assert second.num_prompt == first.num_prompt
    assert second.num_prompt - 4 <= second.num_cached < second.num_prompt


def test_reset_forgets_what_was_said_and_not_the_system_message(session: Session) -> None:
    session.system = "Be brief"
    answer(session.ask("one"))
    session.reset()
    assert answer(session.ask("two")) == "system\nBe brief\nuser\ntwo\nassistant\n"


def test_a_message_that_cannot_be_answered_is_no_part_of_the_conversation(session: Session) -> None:
    answer(session.ask("one"))
    before = list(session.messages)
    with pytest.raises(InvalidPrompt):
        session.ask("too long " * 500)
    assert session.messages == before


def test_a_step_that_fails_takes_the_message_with_it(new_llm: NewLLM) -> None:
    session = Session(new_llm(PLAIN), SamplingParams(max_tokens=None))
    with pytest.raises(StepFailed):
        answer(session.ask(f"{POISON} bad"))
    assert session.messages == []
    assert answer(session.ask("good")) == "good"


def test_thoughts_are_told_apart_and_not_kept(new_llm: NewLLM) -> None:
    session = Session(new_llm("{# </think> #}" + PLAIN), SamplingParams(max_tokens=None))
    pieces = list(session.ask("<think>hm</think>yes"))
    assert "".join(piece.text for piece in pieces if piece.is_thought) == "hm"
    assert "".join(piece.text for piece in pieces if not piece.is_thought) == "yes"
    assert session.messages[-1]["content"] == "yes"


def test_parameters_are_set_one_by_one_and_given_back(session: Session) -> None:
    session.set("max_tokens", "5")
    assert len(session.llm.tokenizer.encode(answer(session.ask("a long message")))) <= 5
    assert (session.stats[-1].num_tokens, session.stats[-1].reason) == (5, "length")
    session.set("temperature", "0.5")
    session.set("stop", "END")
    session.set("seed", "none")
    assert (session.params.temperature, session.params.stop, session.params.seed) == (0.5, ("END",), None)
    for name in ("max_tokens", "temperature", "stop"):
        session.set(name, "default")
    assert session.params == SamplingParams(temperature=0, max_tokens=None)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("heat", "1", "heat cannot be set: temperature, "),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("temperature", "-1", "temperature is -1"),
        ("top_k", "1.5", "top_k is 1.5: it must be an integer"),
        ("n", "2", "n cannot be set"),
    ],
)
def test_a_parameter_that_cannot_work_changes_nothing(session: Session, name: str, value: str, said: str) -> None:
    before = session.params
    with pytest.raises(ChatError, match=re.escape(said)):
        session.set(name, value)
    assert session.params == before


def test_numbers_of_an_answer(session: Session) -> None:
    answer(session.ask("one"))
    [stats] = session.stats
    assert (stats.num_tokens, stats.reason) == (stats.num_prompt + 1, "stop"), "the parrot's end is a token too"
    assert stats.first is not None
    assert 0 < stats.first <= stats.seconds


def test_numbers_in_words() -> None:
    assert str(Stats(50, 48, 11, 0.5, 2.5, "stop")) == (
        "5 tok/s, 500 ms to the first token, 48 of 50 prompt tokens were cached"
    )
    assert str(Stats(50, 0, 0, None, 2.5, "abort")) == "0 of 50 prompt tokens were cached"
    assert "cut off" in str(Stats(50, 0, 3, 1.0, 2.0, "length"))


def test_a_full_context_loses_its_oldest_turns_and_says_how_many(new_llm: NewLLM) -> None:
    """The model's context has 1,024 tokens, one for each byte; its answer repeats all that it reads."""
    session = Session(new_llm(PLAIN), SamplingParams(max_tokens=40), "S")
    lost, read = [], []
    for number in range(30):
        said = answer(session.ask(f"{number:04}" + "." * 96))
        lost.append(session.num_left_out)
        read.append(said)
        first, numbers = session.num_left_out, [own["content"][:4] for own in session.messages if own["role"] == "user"]
        assert said.startswith("S" + session.messages[first]["content"][:30])
        assert session.messages[first]["role"] == "user"
        assert numbers == [f"{own:04}" for own in range(number + 1)]  # all of it is kept
    assert lost == sorted(lost)
    assert lost[-1] > 0
    assert len(set(lost)) < len(lost) / 2  # several turns go at once: the prefix cache has the rest
    session.reset()
    assert session.num_left_out == 0
    with pytest.raises(PromptTooLong, match="context length is 1024 tokens"):
        session.ask("." * 1200)
    assert session.messages == []
