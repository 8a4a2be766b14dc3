"""What users do with `LLM`: generate, chat, stream, stop strings, metrics, progress."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tqdm import tqdm

from nanoengine import LLM, SamplingParams
from nanoengine import progress as module
from nanoengine.errors import InvalidPrompt
from tests.e2e.small_engine import assert_idle
from tests.support import tiny_checkpoint

PROMPT = "def binary_search("
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def llm(demo_llm: LLM) -> Iterator[LLM]:
    """The bundled model; every test must leave no request and no block behind."""
    yield demo_llm
    assert_idle(demo_llm)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["import ", [1, 2, 3], PROMPT, "x"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["import ", None, PROMPT, "x"]
    assert outputs[1].prompt_token_ids == [1, 2, 3]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 3]
    assert all(output.finished for output in outputs)


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    as_text = llm.generate(PROMPT, params, use_tqdm=False)
    as_ids = llm.generate(llm.tokenizer.encode(PROMPT), params, use_tqdm=False)
    assert as_text[0].outputs == as_ids[0].outputs
    assert llm.generate([], use_tqdm=False) == llm.chat([], use_tqdm=False) == []


def test_a_prompt_may_be_a_table(llm: LLM) -> None:
    ids = llm.tokenizer.encode("def f(")
    plain = [output.outputs[0].text for output in llm.generate(["def f(", "x"], GREEDY, use_tqdm=False)]
    for prompts in ([{"prompt": "def f("}, "x"], [{"prompt_token_ids": ids, "prompt": None}, {"prompt": "x"}]):
        assert [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == plain
    assert llm.generate({"prompt": "def f("}, GREEDY, use_tqdm=False)[0].outputs[0].text == plain[0]
    assert "".join(llm.stream({"prompt_token_ids": ids}, GREEDY)) == plain[0]
    for wrong in ({}, {"prompt": "a", "prompt_token_ids": ids}, {"prompt": "a", "multi_modal_data": {}}):
        with pytest.raises(InvalidPrompt, match="a prompt has the keys"):
            llm.generate([wrong], GREEDY, use_tqdm=False)


def test_a_stream_is_the_text_of_generate_in_pieces(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=50, stop=["\n\n", "return"])
    pieces = list(llm.stream(PROMPT, params))
    assert len(pieces) > 1
    assert "".join(pieces) == llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_special_tokens_and_what_ended_the_text_are_in_it_for_those_who_ask(llm: LLM) -> None:
    end = llm.tokenizer.eos_token_id
    assert end is not None
    name = llm.tokenizer.hf.decode([end])
    forced = SamplingParams(allowed_token_ids=[end], max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert "".join(llm.stream(PROMPT, forced)) == 3 * name
    stopped = replace(forced, ignore_eos=False)
    assert "".join(llm.stream(PROMPT, stopped)) == ""
    assert "".join(llm.stream(PROMPT, replace(stopped, include_stop_str_in_output=True))) == name
    assert "".join(llm.stream(PROMPT, replace(forced, skip_special_tokens=True))) == ""


def test_streams_and_generate_may_be_interleaved(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
    alone = [llm.generate(PROMPT, own, use_tqdm=False)[0].outputs[0].text for own in params]
    first, second = llm.stream(PROMPT, params[0]), llm.stream(PROMPT, params[1])
    pieces = [next(first), next(second)]
    between = llm.generate(PROMPT, params[2], use_tqdm=False)[0].outputs[0].text
    assert [pieces[0] + "".join(first), pieces[1] + "".join(second), between] == alone


def test_a_stream_left_early_is_aborted(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished


def test_what_a_chat_template_asks_for_is_passed_to_it(tiny_llm: LLM) -> None:
    tiny_llm.get_tokenizer().chat_template = "{{ mood | default('calm') }}: {{ messages[0].content }}"
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=1)
    for kwargs, expected in (({"mood": "merry"}, "merry: hello"), ({}, "calm: hello"), (None, "calm: hello")):
        for conversations in (messages, [messages, messages]):
            outputs = tiny_llm.chat(conversations, params, chat_template_kwargs=kwargs, use_tqdm=False)
            assert {tiny_llm.tokenizer.decode(output.prompt_token_ids) for output in outputs} == {expected}


def test_metrics_make_sense(llm: LLM) -> None:
    before = llm.metrics
    metrics = llm.generate(PROMPT, SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False)[0].metrics
    assert before != llm.metrics
    assert metrics.ttft is not None
    assert metrics.tpot is not None
    assert metrics.latency is not None
    assert metrics.latency == pytest.approx(metrics.ttft + 9 * metrics.tpot)
    assert metrics.num_preemptions == 0


def test_a_log_gets_no_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=3))
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("terminal")
def test_the_progress_bar_says_what_the_engine_does(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=10, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    for word in ("prefill", "decode", "tok/s", "KV", "running", "waiting"):
        assert word in shown
    llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("terminal")
def test_the_progress_bar_goes_on_while_the_last_request_runs(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "tqdm", partial(tqdm, mininterval=0))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 1, 1, 30)]
    tiny_llm.generate([PROMPT] * 4, params)
    frames = [frame for frame in capsys.readouterr().err.split("\r") if "3/4" in frame]
    assert len(frames) >= 29, "one for each step"
    assert len({re.findall(r"decode (\d+) tok/s", frame)[0] for frame in frames}) > 1


@pytest.mark.usefixtures("terminal")
def test_the_rates_of_the_progress_bar_are_those_of_its_call(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tiny_llm.built.metrics.steps  # what earlier calls did
    steps.record(num_prompt=10**15, num_decode=0, num_generated=0, seconds=1e-9)
    steps.record(num_prompt=0, num_decode=10**6, num_generated=10**6, seconds=1e-9)
    tiny_llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    rates = re.findall(r"(?:prefill|decode) (\d+) tok/s", capsys.readouterr().err)
    assert rates
    assert max(map(int, rates)) < 10**9


def test_unseeded_requests_differ_but_a_fresh_engine_repeats_itself(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint(tmp_path))
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 60, "use_tqdm": False}
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def texts(seed: int) -> list[str]:
        with LLM(folder, seed=seed, **options) as llm:
            return [output.outputs[0].text for output in llm.generate(["a", "a"], params, use_tqdm=False)]

    first = texts(0)
    assert first[0] != first[1]
    assert texts(0) == first
    assert texts(1) != first


def test_a_script_written_for_nano_vllm_runs_as_it_is(tiny: Path) -> None:
    """The calls of its public example and benchmark: positional path, its option names, both kinds of prompts."""
    llm = LLM(str(tiny), enforce_eager=True, max_model_len=512, num_kv_blocks=300)
    outputs = llm.generate(["introduce yourself", "list primes"], SamplingParams(temperature=0.6, max_tokens=12))
    assert all(isinstance(output.outputs[0].text, str) for output in outputs)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=5 + i) for i in range(3)]
    outputs = llm.generate([[7 * i, 5, 9] for i in range(3)], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 6, 7]
    llm.close()
