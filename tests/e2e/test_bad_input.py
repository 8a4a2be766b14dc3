"""Every mistake of a user has a name, and the engine is as good afterwards as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.errors import (
    InvalidPrompt,
    InvalidSamplingParams,
    InvalidWeights,
    ModelNotFound,
    NanoEngineError,
    NotFiniteLogits,
    StepFailed,
    UnsupportedModel,
)
from tests.e2e.small_engine import (
    GREEDY,
    MAX_LEN,
    NEW,
    PROMPTS,
    VOCAB_SIZE,
    assert_idle,
    generate,
    open_llm,
    sabotage,
)

# ---- prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([VOCAB_SIZE], "holds 300: .*0 to 299"),
        ([5, -1], "holds -1"),
        ([5, 2**40], f"holds {2**40}"),
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
    with pytest.raises(InvalidSamplingParams, match="the params ask for 2 completions"):
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
    edit_json(broken / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
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
        assert [fetches_weights(patterns) for patterns in fetched] == [False, False, True]
    fetched.clear()
    edit_json(broken / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel):
        open_llm(Path("someone/model"))
    assert [fetches_weights(patterns) for patterns in fetched] == [False, False]


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
