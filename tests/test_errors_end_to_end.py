"""What goes wrong, through the front door: every mistake has a name, and the engine is as good afterwards as before."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.engine.messages import Phase
from nanoengine.errors import (
    EngineClosed,
    InvalidConfig,
    InvalidPrompt,
    InvalidSamplingParams,
    InvalidWeights,
    ModelNotFound,
    NanoEngineError,
    NotFiniteLogits,
    StepFailed,
    UnsupportedModel,
)
from tests.support import model_runner, reference_greedy, reference_model, tiny_checkpoint

VOCAB_SIZE = 300
MAX_LEN = 64
POISON = 222  # a prompt with it makes the model raise, in the tests that say so
NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
PROMPTS = [[(37 * i + 11 * j) % 200 for j in range(16)] for i in range(4)]


class Broken(Exception):
    """What the sabotaged model raises."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def right(folder: Path) -> list[list[int]]:
    """The greedy continuations of PROMPTS."""
    return reference_greedy(reference_model(folder), PROMPTS, NEW)


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    engines = []

    def make_llm(**options: Any) -> LLM:
        engines.append(open_llm(folder, **options))
        return engines[-1]

    yield make_llm
    for llm in engines:
        llm.close()


@pytest.fixture
def llm(make: Callable[..., LLM]) -> LLM:
    return make()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal, and is handled so again afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    now = signal.signal(signal.SIGINT, before)
    assert now is signal.default_int_handler


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"max_model_len": MAX_LEN, "num_kv_blocks": 40, "dtype": "float32", "device": "cpu"}
    return LLM(str(folder), use_tqdm=False, **defaults | options)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, and every block is back."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished
    scheduler.check()
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks


def sabotage(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[torch.Tensor, Phase], None]) -> None:
    """Call `act` with the token ids and the phase of every step before the model computes it."""
    model = model_runner(llm).model
    forward = model.forward

    def sabotaged(input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        act(input_ids, metadata.phase)
        return forward(input_ids, positions, metadata)

    monkeypatch.setattr(model, "forward", sabotaged)


def raise_on_poison(input_ids: torch.Tensor, phase: Phase) -> None:
    if POISON in input_ids.tolist():
        raise Broken(f"{POISON} is in the {phase.value}")


def raise_at(call: int, error: BaseException, only: Phase | None = None) -> Callable[[torch.Tensor, Phase], None]:
    """Raise at the n-th step (of one phase), once."""
    calls = 0

    def act(input_ids: torch.Tensor, phase: Phase) -> None:  # noqa: ARG001
        nonlocal calls
        calls += only in (None, phase)
        if calls == call and only in (None, phase):
            raise error

    return act


# ---- prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([VOCAB_SIZE], "token id 300.*0 to 299"),
        ([5, -1], "token id -1"),
        ([5, 2**40], f"token id {2**40}"),
        ([5, True], "True"),
        ([5, 1.0], "1.0"),
        ([5, "a"], "'a'"),
        ([5, None], "None"),
        ([[5, [6]]], r"\[6\]"),
        ([1] * MAX_LEN, "64 tokens, but max_model_len is 64.*at most 63"),
        ("x" * (MAX_LEN + 30), "94 tokens, but max_model_len is 64"),
        ("half a pair: \ud800", "not valid Unicode"),
        (["fine", "\udfff"], "not valid Unicode"),
        (["fine", 5], "int"),
        (["fine", None], "NoneType"),
        (["fine", b"bytes"], "bytes"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (5, "int"),
        ({"prompt": "hello"}, "dict"),
        (iter(["a"]), "iterator"),
        (np.array([1, 2]), "ndarray"),
        (torch.tensor([1, 2]), "Tensor"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_and_limit(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize("bad", ["", [VOCAB_SIZE], [1] * MAX_LEN, None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_prompt_is_refused_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, bad: Any, place: int
) -> None:
    sabotage(llm, monkeypatch, lambda *_: pytest.fail("something ran"))
    prompts: list[Any] = ["first", "second"]
    prompts.insert(place, bad)
    with pytest.raises(InvalidPrompt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_a_refused_call_leaves_the_draws_of_later_ones_alone(make: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=NEW)
    with make() as fresh:
        expected = generate(fresh, PROMPTS, params)
    llm = make()
    with pytest.raises(InvalidPrompt):
        llm.generate(["fine", ""], params, use_tqdm=False)
    assert generate(llm, PROMPTS, params) == expected


@pytest.mark.parametrize("empty", [[], ()])
def test_no_prompts_give_no_results(llm: LLM, empty: Any) -> None:
    assert llm.generate(empty, use_tqdm=False) == []
    assert llm.generate(empty, [], use_tqdm=False) == []
    assert llm.chat(empty, use_tqdm=False) == []


def test_one_prompt_may_stand_alone_in_either_form(llm: LLM) -> None:
    as_text, as_ids = generate(llm, "hello"), generate(llm, llm.tokenizer.encode("hello"))
    assert len(as_text) == 1
    assert as_text == as_ids == generate(llm, ["hello"]) == generate(llm, [llm.tokenizer.encode("hello")])


def test_a_prompt_of_one_token_and_the_longest_prompt_run(llm: LLM) -> None:
    short, long = llm.generate([[7], [7] * (MAX_LEN - 1)], GREEDY, use_tqdm=False)
    assert len(short.outputs[0].token_ids) == NEW
    assert len(long.outputs[0].token_ids) == 1
    assert long.outputs[0].finish_reason == "length"
    assert_idle(llm)


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 60])
@pytest.mark.parametrize("max_tokens", [MAX_LEN, 1000, None])
def test_generation_ends_at_max_model_len(llm: LLM, prompt_len: int, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = llm.generate([[9] * prompt_len], params, use_tqdm=False)[0]
    assert prompt_len + len(output.outputs[0].token_ids) == MAX_LEN
    assert output.outputs[0].finish_reason == "length"


# ---- params


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_params_as_prompts(llm: LLM, count: int) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"{count} entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * count, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize("params", [[GREEDY, {"temperature": 0}], [GREEDY, 5], {"temperature": 0}, [None, "greedy"], 5])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="sampling_params"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert_idle(llm)


def test_a_stop_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids holds 300"):
        llm.generate("a", SamplingParams(stop_token_ids=[VOCAB_SIZE]), use_tqdm=False)


def test_a_stream_of_several_completions_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidSamplingParams, match="n is 2"):
        llm.stream("a", SamplingParams(n=2))
    assert_idle(llm)


@pytest.mark.parametrize(
    "messages", ["hello", [{"role": "user", "content": "x"}], [[{"role": "user", "content": "x"}]], {"role": "user"}]
)
def test_a_chat_that_cannot_be_is_a_named_error(llm: LLM, messages: Any) -> None:
    """The tiny tokenizer has no chat template; some of these are no conversations either."""
    with pytest.raises(InvalidPrompt):
        llm.chat(messages, use_tqdm=False)
    assert_idle(llm)


def test_a_chat_of_text_that_is_not_unicode_is_a_named_error(llm: LLM) -> None:
    llm.get_tokenizer().chat_template = "{{ messages[0].content }}"
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        llm.chat([{"role": "user", "content": "\ud800"}], use_tqdm=False)
    assert_idle(llm)


# ---- models


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_is_not_there_is_a_named_error() -> None:
    with pytest.raises(ModelNotFound, match="/no/such/folder"):
        open_llm(Path("/no/such/folder"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_is_a_named_error(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(ModelNotFound):
        open_llm(broken)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", UnsupportedModel),
        ("generation_config.json", UnsupportedModel),
        ("model.safetensors", InvalidWeights),
        ("tokenizer.json", ModelNotFound),
    ],
)
def test_a_file_that_is_broken_is_a_named_error(broken: Path, name: str, error: type[NanoEngineError]) -> None:
    (broken / name).write_text("{ broken")
    with pytest.raises(error):
        open_llm(broken)


def test_an_architecture_that_is_not_supported_is_a_named_error(broken: Path) -> None:
    edit_json(broken / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        open_llm(broken)


def test_the_weights_of_an_unsupported_model_are_never_fetched(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be hundreds of gigabytes."""
    fetched: list[list[str]] = []

    def snapshot_download(_: str, *, allow_patterns: list[str]) -> str:
        fetched.append(allow_patterns)
        return str(broken)

    def fetches_weights(patterns: list[str]) -> bool:
        return any(Path("model.safetensors").match(pattern) for pattern in patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with open_llm(Path("someone/model")):
        assert [fetches_weights(patterns) for patterns in fetched] == [False, True]
    fetched.clear()
    edit_json(broken / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModel):
        open_llm(Path("someone/model"))
    assert [fetches_weights(patterns) for patterns in fetched] == [False]


@pytest.mark.parametrize("eos", [VOCAB_SIZE, [256, VOCAB_SIZE + 5], -1])
def test_an_end_of_text_outside_the_vocabulary_is_ignored(broken: Path, eos: object) -> None:
    """The tokenizer may know more tokens than the model can say; those cannot be banned either."""
    edit_json(broken / "generation_config.json", eos_token_id=eos)
    with open_llm(broken) as llm:
        params = SamplingParams(temperature=0, min_tokens=NEW, max_tokens=NEW)
        assert len(generate(llm, "hello", params)[0]) == NEW
        assert llm.engine.eos_token_ids == (256,)


@pytest.mark.parametrize("eos", ["x", [256, "x"], 1.5, True, {}])
def test_an_end_of_text_that_is_no_token_id_is_a_named_error(broken: Path, eos: object) -> None:
    edit_json(broken / "generation_config.json", eos_token_id=eos)
    with pytest.raises(UnsupportedModel, match="eos_token_id is "):
        open_llm(broken)


def test_code_in_a_model_folder_is_never_run(broken: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (broken / "evil.py").write_text(f"open({str(flag)!r}, 'w')\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    edit_json(broken / "config.json", auto_map=dict.fromkeys(names, "evil.Evil"))
    try:
        with open_llm(broken) as llm:
            assert len(generate(llm, PROMPTS[:1])[0]) == NEW
    finally:
        assert not flag.exists()


def test_a_tokenizer_of_its_own_may_come_from_another_folder(broken: Path, folder: Path) -> None:
    (broken / "tokenizer.json").unlink()
    with open_llm(broken, tokenizer=str(folder)) as llm:
        assert len(generate(llm, "hello")[0]) == NEW
    with pytest.raises(ModelNotFound):
        open_llm(broken, tokenizer="/no/such/folder")


def test_a_model_of_nan_is_a_named_error_for_its_requests(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with open_llm(broken) as llm:
        with pytest.raises(StepFailed) as raised:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert isinstance(raised.value.__cause__, NotFiniteLogits)
        assert_idle(llm)


# ---- a step that raises


def test_a_failed_step_ends_its_own_requests_only(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    llm = make(max_num_batched_tokens=16)  # each prompt is a step
    sabotage(llm, monkeypatch, raise_on_poison)
    prompts = [PROMPTS[0], [POISON] * 16, PROMPTS[1], [3] * 15 + [POISON], PROMPTS[2]]
    with pytest.raises(StepFailed, match=r"2 of 5 requests failed.*222") as raised:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert isinstance(raised.value.__cause__, Broken)
    outputs = raised.value.outputs
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error", "length"]
    assert [output.outputs[0].token_ids for output in outputs] == [right[0], [], right[1], [], right[2]]
    assert_idle(llm)


def test_a_failed_step_of_many_fails_all_that_were_in_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    sabotage(llm, monkeypatch, raise_on_poison)
    with pytest.raises(StepFailed, match="3 of 3") as raised:
        llm.generate([PROMPTS[0], [POISON], PROMPTS[1]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in raised.value.outputs] == ["error"] * 3
    assert_idle(llm)
    assert generate(llm, PROMPTS) == right


def test_a_failed_decode_keeps_the_tokens_so_far_and_spares_who_waits(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    llm = make(max_num_seqs=2)
    sabotage(llm, monkeypatch, raise_at(3, Broken("third decode"), only=Phase.DECODE))
    with pytest.raises(StepFailed, match="2 of 4 requests failed: third decode") as raised:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in raised.value.outputs]
    assert tokens == [right[0][:3], right[1][:3], right[2], right[3]]
    assert_idle(llm)


def test_a_chunk_that_fails_ends_its_request(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(max_num_batched_tokens=8)
    sabotage(llm, monkeypatch, raise_on_poison)
    with pytest.raises(StepFailed):
        llm.generate([[5] * 20 + [POISON] + [5] * 20], GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_what_a_failed_step_should_have_written_is_never_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    """The failed prompt begins like a good one, whose blocks it would have written."""
    with monkeypatch.context() as patch:
        sabotage(llm, patch, raise_on_poison)
        with pytest.raises(StepFailed):
            llm.generate([[*PROMPTS[0], POISON, 1, 2]], GREEDY, use_tqdm=False)
    model_runner(llm).kv_cache.fill(float("nan"))  # type: ignore[union-attr]
    output = llm.generate([[*PROMPTS[0], 5]], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    assert generate(llm, PROMPTS) == right


def test_the_engine_is_usable_after_a_failed_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    sabotage(llm, monkeypatch, raise_on_poison)
    for _ in range(3):
        with pytest.raises(StepFailed):
            llm.generate([POISON], GREEDY, use_tqdm=False)
        assert generate(llm, PROMPTS) == right
        assert_idle(llm)


def test_an_error_that_is_kept_does_not_keep_the_kv_pool(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_cache = model_runner(llm).kv_cache
    assert kv_cache is not None
    pool = [weakref.ref(tensor) for layer in kv_cache.layers for tensor in layer]
    del kv_cache
    with monkeypatch.context() as patch:
        sabotage(llm, patch, raise_on_poison)
        with pytest.raises(StepFailed) as raised:
            llm.generate([POISON], GREEDY, use_tqdm=False)
    llm.close()
    gc.collect()
    assert isinstance(raised.value.__cause__, Broken)
    assert [tensor() for tensor in pool] == [None] * len(pool)


def test_completions_of_one_request_may_end_in_the_same_step(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=NEW, ignore_eos=True)
    output = llm.generate("hello", params, use_tqdm=False)[0]
    assert [len(completion.token_ids) for completion in output.outputs] == [NEW] * 3
    assert_idle(llm)


def test_all_completions_of_a_failed_request_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(2, Broken("second step")))
    params = SamplingParams(n=3, max_tokens=NEW, ignore_eos=True)
    with pytest.raises(StepFailed, match="1 of 1") as raised:
        llm.generate("hello", params, use_tqdm=False)
    assert raised.value.outputs[0].finished
    assert [output.finish_reason for output in raised.value.outputs[0].outputs] == ["error"] * 3
    assert_idle(llm)


def test_a_stream_whose_step_fails_says_so_after_what_it_had(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(4, Broken("fourth step")))
    pieces: list[str] = []
    with pytest.raises(StepFailed, match="fourth step") as raised:
        pieces.extend(llm.stream("hello", GREEDY))
    output = raised.value.outputs[0].outputs[0]
    assert len(output.token_ids) == 3
    assert output.text == "".join(pieces)
    assert_idle(llm)


# ---- aborts


@pytest.mark.parametrize("aborted", [[0], [1], [0, 1, 2]])
def test_generate_ends_when_its_requests_are_aborted_elsewhere(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, aborted: list[int], right: list[list[int]]
) -> None:
    executor, calls = model_runner(llm), 0
    execute, step = executor.execute, llm.engine.step

    def counted_step() -> object:
        nonlocal calls
        calls += 1
        assert calls < 100, "it waits for requests that are gone"
        return step()

    def aborting(batch: Any) -> Any:
        if calls == 3:
            for i in aborted:
                assert llm.engine.abort(f"request-{i}")
        return execute(batch)

    monkeypatch.setattr(llm.engine, "step", counted_step)
    monkeypatch.setattr(executor, "execute", aborting)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        assert completion.finish_reason == ("abort" if i in aborted else "length")
        assert completion.token_ids == (right[i][:2] if i in aborted else right[i])
    assert_idle(llm)


def test_a_stream_that_was_never_started_leaves_nothing_queued(llm: LLM, right: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert_idle(llm)
    assert generate(llm, PROMPTS) == right
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


# ---- the end of an engine


def test_closing_twice_is_allowed(llm: LLM) -> None:
    llm.close()
    llm.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("hello", use_tqdm=False),
        lambda llm: llm.stream("hello"),
        lambda llm: llm.engine.add_request("hello"),
        lambda llm: llm.engine.step(),
    ],
)
def test_a_closed_engine_says_so(llm: LLM, use: Callable[[LLM], object]) -> None:
    llm.close()
    with pytest.raises(EngineClosed, match="closed"):
        use(llm)


def test_leaving_the_context_closes_also_after_an_error(folder: Path) -> None:
    with pytest.raises(KeyError), open_llm(folder) as llm:
        raise KeyError
    with pytest.raises(EngineClosed):
        llm.generate("hello", use_tqdm=False)


def test_closing_ends_what_runs(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    request = llm.engine.add_request("other", GREEDY)
    llm.close()
    assert request.finished
    assert request.output().outputs[0].finish_reason == "abort"
    assert_idle(llm)


def test_a_stream_that_is_dropped_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_two_engines_live_side_by_side(make: Callable[..., LLM], right: list[list[int]]) -> None:
    one, two = make(), make(block_size=4, num_kv_blocks=100)
    streams = [llm.stream(PROMPTS[i], GREEDY) for i, llm in enumerate((one, two))]
    texts = [next(stream) for stream in streams]
    for i, stream in enumerate(streams):
        texts[i] += "".join(stream)
    assert texts == [one.tokenizer.decode(right[0]), two.tokenizer.decode(right[1])]
    one.close()
    assert generate(two, PROMPTS) == right


def test_an_engine_can_be_made_again_and_again(folder: Path, right: list[list[int]]) -> None:
    for _ in range(2):
        with open_llm(folder) as llm:
            assert generate(llm, PROMPTS) == right


def test_a_refused_engine_leaves_room_for_a_right_one(folder: Path, right: list[list[int]]) -> None:
    with pytest.raises(InvalidConfig):
        open_llm(folder, num_kv_blocks=1)
    with open_llm(folder) as llm:
        assert generate(llm, PROMPTS) == right


# ---- Ctrl-C


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["forward", "schedule", "update", "submit", "decode"])
def test_ctrl_c_frees_everything_wherever_it_comes(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]], where: str
) -> None:
    llm = make(max_num_seqs=2)  # two run, two wait
    owner, name = {
        "forward": (model_runner(llm).model, "forward"),
        "schedule": (llm.engine.scheduler.block_manager, "admit"),
        "update": (llm.engine.scheduler, "update"),
        "submit": (llm.engine.scheduler, "add"),
        "decode": (llm.tokenizer, "decode"),
    }[where]
    original, calls = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert calls >= 2
    assert_idle(llm)
    model_runner(llm).kv_cache.fill(float("nan"))  # type: ignore[union-attr]
    llm.engine.scheduler.block_manager.pool.reset_prefix_cache()
    assert generate(llm, PROMPTS) == right
    assert_idle(llm)


@pytest.mark.usefixtures("ctrl_c")
def test_what_an_interrupted_step_should_have_written_is_never_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    with monkeypatch.context() as patch:
        sabotage(llm, patch, raise_at(1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    model_runner(llm).kv_cache.fill(float("nan"))  # type: ignore[union-attr]
    assert generate(llm, PROMPTS) == right


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["finish", "close"])
def test_ctrl_c_while_closing_waits_until_all_is_gone(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    requests = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    owner = llm.engine.scheduler if where == "finish" else model_runner(llm)
    original = getattr(owner, where)

    def interrupted(*args: Any) -> None:
        original(*args)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert [request.output().outputs[0].finish_reason for request in requests] == ["abort"] * len(requests)
    assert model_runner(llm).kv_cache is None
    assert_idle(llm)
    llm.close()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_stream_and_frees_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("hello", GREEDY))
    assert_idle(llm)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself: its end of text, and what has no text, have no chance against the others."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("talkative"), max_position_embeddings=100_000)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][256:] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "nanoengine", "generate", "--model", str(folder), "--temperature", "0", *arguments]


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("prompts", [["hello"], ["hello", "world"]], ids=["stream", "batch"])
def test_ctrl_c_ends_the_command_quickly_and_quietly(talkative: Path, prompts: list[str]) -> None:
    process = subprocess.Popen(
        command(talkative, "--max-tokens", "90000", *prompts),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that starts pytest in the background ignores SIGINT for it and its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if len(prompts) == 1:
                assert process.stdout.read(5)  # it is generating
            else:
                started = b""
                while b"Generating" not in started:
                    started += process.stderr.read(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=5)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"nanoengine: interrupted" in errors
    assert b"Traceback" not in errors


@pytest.mark.skipif(os.name != "posix", reason="pipes are those of POSIX")
@pytest.mark.parametrize("prompts", [["hello"], ["hello", "world"]], ids=["stream", "batch"])
def test_a_reader_that_has_enough_ends_the_command_quietly(talkative: Path, prompts: list[str]) -> None:
    """As in `nanoengine generate ... | head -c 5`. A batch is printed at its end, when the reader may be gone already."""
    max_tokens = "90000" if len(prompts) == 1 else "5"
    arguments = command(talkative, "--max-tokens", max_tokens, *prompts)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        try:
            assert process.stdout is not None
            if len(prompts) == 1:
                assert process.stdout.read(5)
            process.stdout.close()
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


def test_a_mistake_of_the_users_ends_the_command_with_one_line(tmp_path: Path) -> None:
    result = subprocess.run(command(tmp_path / "nothing", "hello"), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("nanoengine: ModelNotFound: ")
    assert "Traceback" not in result.stderr
