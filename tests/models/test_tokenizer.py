"""The tokenizer of a model, from a folder or a GGUF file: text to ids and back, chats, and nothing that is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import AutoTokenizer

from nanoengine.builder import read_config
from nanoengine.errors import InvalidConfig, InvalidPrompt, MissingPackage, ModelNotFound, UnsupportedModel
from nanoengine.features.tool_calls.chats import Chats
from nanoengine.models.capability import Models
from nanoengine.models.gguf.tokenizer import GGUFTokenizer
from nanoengine.models.options import ModelOptions
from nanoengine.models.tokenizer import HFTokenizer
from nanoengine.serve.server.bodies.chat_encoder import ChatEncoder
from tests.models.gguf.test_tokenizer import CONTROL, bpe, sentencepiece
from tests.support import byte_tokenizer

END_OF_TEXT = 256
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'villain' %}{{ raise_exception('no villains here') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "hello"}


def save(folder: Path, template: Any = None) -> Path:
    """A tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def change(folder: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    """The fields of a table in the folder."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def copy(plain_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def plain(plain_folder: Path) -> HFTokenizer:
    return HFTokenizer(plain_folder)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer(save(tmp_path_factory.mktemp("chatting"), TEMPLATE))


def test_a_tokenizer_written_in_python_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: SimpleNamespace(eos_token_id=0))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match="is written in Python: give one with a tokenizer"):
        HFTokenizer(copy)


def test_a_file_too_large_to_be_sound_is_never_read(copy: Path) -> None:
    with open(copy / "added_tokens.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelNotFound, match=r"no tokenizer that can be read: added_tokens\.json has 1,024 GiB"):
        HFTokenizer(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "additional_chat_templates/tool_use.jinja"])
def test_what_is_no_file_is_never_read(copy: Path, name: str) -> None:
    """A pipe is waited for, and /dev/zero fills the memory."""
    (copy / name).parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copy / name).unlink(missing_ok=True)
        make(copy / name)
        with pytest.raises(ModelNotFound, match=rf"{re.escape(name)} is neither a file nor a folder"):
            HFTokenizer(copy)


# ---- chats


def test_a_chat_is_encoded_by_the_models_template(chatting: HFTokenizer) -> None:
    messages = [{"role": "system", "content": "be kind"}, USER]
    assert chatting.decode(chatting.encode_chat(messages)) == "<system>be kind\n<user>hello\n<assistant>"
    assert chatting.encode_chat([{"role": "user", "content": "a<|endoftext|>b"}]).count(END_OF_TEXT) == 1
    answer = {"role": "assistant", "content": "well"}
    assert chatting.render_chat([USER]) == "<user>hello\n<assistant>"
    assert chatting.render_chat([USER], add_generation_prompt=False) == "<user>hello\n"
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert chatting.render_chat([USER, answer], **going_on) == "<user>hello\n<assistant>well"
    assert chatting.encode_chat([USER]) == chatting.encode(chatting.render_chat([USER]), add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "no chat template: complete a plain"),
        (TEMPLATE, [USER, {"role": "villain", "content": "ha"}], "no villains here"),
        *((TEMPLATE, [{"role": "user", "content": text}], "not valid Unicode") for text in ("\ud800", "a\udc80b")),
    ],
)
def test_what_is_no_chat_is_a_named_error(tmp_path: Path, template: str | None, messages: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        HFTokenizer(save(tmp_path, template)).encode_chat(messages)


def test_a_template_gets_what_it_asks_for_and_tools_have_their_own(tmp_path: Path) -> None:
    loaded = HFTokenizer(save(tmp_path, {"default": "{{ thinking }}", "tool_use": "{{ tools[0].name }}"}))
    assert loaded.decode(loaded.encode_chat([USER], {"thinking": "yes"})) == "yes"
    assert loaded.decode(loaded.encode_chat([USER], tools=[{"name": "weather"}])) == "weather"
    assert loaded.decode(loaded.encode_chat([USER], {"tools": [{"name": "sun"}]})) == ""


@pytest.mark.parametrize("form", ["text", "list", "chat_template.jinja", "additional_chat_templates/default.jinja"])
def test_a_template_is_found_where_transformers_finds_it(tmp_path: Path, form: str) -> None:
    template: Any = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ messages[0].content }}"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    if form.endswith("jinja"):
        (tmp_path / form).parent.mkdir(exist_ok=True)
        (tmp_path / form).write_text(template)
        template = "the files come first"
    elif form == "list":
        template = [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]
    change(tmp_path, chat_template=template)
    loaded = HFTokenizer(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert loaded.encode_chat([USER]) == ids
    assert loaded.decode(ids) == "||||hello", "special tokens became their ids; the class has none for what is unknown"


GIVEN = "{% if tools %}<tool_call> {{ tools | tojson }}|{% endif %}{{ messages[-1].content }}!"


def test_a_template_given_as_an_option_is_the_only_one(tmp_path: Path) -> None:
    """Of a model without one too, and in other processes, which may be where its file is not."""
    path = tmp_path / "own.jinja"
    path.write_text(GIVEN)
    assert read_config("demo", {"chat_template": GIVEN}).of(ModelOptions).chat_template == GIVEN
    config = read_config("demo", {"chat_template": path})
    path.unlink()
    template = pickle.loads(pickle.dumps(replace(config.of(ModelOptions)))).chat_template
    folders = [save(tmp_path / name, own) for name, own in (("a", None), ("b", {"default": "x", "tool_use": "y"}))]
    (folders[0] / "chat_template.jinja").write_text("z")
    for own in (*(HFTokenizer(folder, template) for folder in folders), GGUFTokenizer(bpe(), template)):
        assert own.render_chat([USER]) == "hello!"
        assert own.info()["chat_template"] == GIVEN
        tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
        prompt = Chats(own).prompt([USER], tools)
        assert prompt.text.startswith("<tool_call> [{")
        assert own.hf.chat_template == GIVEN
        assert own.render_chat([USER]) == "hello!", "nor of the object of transformers"
    models, startup = Models(), SimpleNamespace(config=config)
    assert models.describe(startup)[1].render_chat([USER]) == "hello!"  # type: ignore[arg-type]


def test_what_is_no_template_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    for text, why in {
        "plain": "it has 5 characters",
        "{" * (1 << 20): "recursion",
        "{" * ((1 << 20) + 1): "no regular file of at most 1048576 bytes",
        "{% for x in y %}" * 30 + "{% endfor %}" * 30: "nested",
        "{{ open": "unexpected end of template",
    }.items():
        path.write_text(text)
        for given in (path, *([text] if len(text) <= 1 << 20 and "{" in text else [])):
            with pytest.raises(InvalidConfig, match=f"(?i)chat_template is .*{why}"):
                read_config("demo", {"chat_template": given})
    with pytest.raises(InvalidConfig, match=r"chat_template is .* it has 1048577 characters"):
        read_config("demo", {"chat_template": "{" * ((1 << 20) + 1)})
    with pytest.raises(InvalidConfig, match="chat_template is '/dev/zero'"):
        read_config("demo", {"chat_template": "/dev/zero"})


# ---- GGUF files


@pytest.fixture(scope="module")
def from_gguf() -> GGUFTokenizer:
    metadata = sentencepiece(("<|im_end|>", CONTROL), **{"tokenizer.chat_template": "{{ bos_token }}" + TEMPLATE})
    return GGUFTokenizer(metadata)


def test_a_gguf_file_has_all_that_a_folder_has(from_gguf: GGUFTokenizer) -> None:
    hf = from_gguf.hf
    ids = from_gguf.encode("ab cd")
    assert ids[0] == 1
    assert from_gguf.decode(ids) == "ab cd"
    assert (from_gguf.eos_token_id, from_gguf.eos_token_ids) == (2, [2, hf.convert_tokens_to_ids("<|im_end|>")])
    chat = from_gguf.encode_chat([USER])
    assert chat.count(1) == 1, "the template has the first-of-text token, and it is not added again"
    assert from_gguf.decode(chat) == "<user>hello\n<assistant>"
    # The same as an object of transformers.
    assert hf("ab cd")["input_ids"] == ids
    assert hf.apply_chat_template([USER], add_generation_prompt=True)["input_ids"] == chat
    assert hf.eos_token_id == 2


def test_a_template_given_to_the_object_of_transformers_counts(chatting: HFTokenizer) -> None:
    for tokenizer in (HFTokenizer(chatting.folder), GGUFTokenizer(bpe())):
        tokenizer.hf.chat_template = "new"
        assert tokenizer.decode(tokenizer.encode_chat([USER])) == "new"


# ---- folders


@pytest.mark.parametrize("with_processor", [True, False])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_first_token_that_the_config_asks_for_is_there_as_in_transformers(
    copy: Path, with_processor: bool, kind: str
) -> None:
    if with_processor:
        tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
        special_tokens = [("<|endoftext|>", END_OF_TEXT)]
        tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=special_tokens)
        tokenizer.save(str(copy / "tokenizer.json"))
    change(copy, add_bos_token=True, bos_token="<|endoftext|>", tokenizer_class=kind)
    assert HFTokenizer(copy).encode("hello") == AutoTokenizer.from_pretrained(copy)("hello")["input_ids"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_in_the_folder_is_never_run(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Whether the tokenizer then loads without the code or is refused: the code stays where it is."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nobody is asked, and nobody agrees
    flag = tmp_path / "flag"
    (copy / "evil.py").write_text(f"open({str(flag)!r}, 'w')\nclass EvilTokenizer: pass\nclass EvilConfig: pass\n")
    own = ["evil.EvilTokenizer", "evil.EvilTokenizer" if file.startswith("tokenizer") else None]
    auto_map = {"AutoTokenizer": own, "AutoConfig": "evil.EvilConfig"}
    change(copy, file, auto_map=auto_map, tokenizer_class="EvilTokenizer", model_type="evil")
    try:
        tokenizer = HFTokenizer(copy)
    except ModelNotFound:
        pass
    else:
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert not flag.exists()


# ---- what clients of a server ask for


@pytest.mark.parametrize("source", ["plain", "from_gguf"])
def test_pieces_are_tokens_as_the_vocabulary_writes_them(source: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(source)
    table = {token: text for text, token in tokenizer.token_ids().items()}
    tokens = [0, 1, 5, len(table) - 1]
    assert tokenizer.pieces(tokens) == [table[token] for token in tokens] == tokenizer.hf.convert_ids_to_tokens(tokens)
    assert tokenizer.pieces([]) == []
    assert tokenizer.pieces([10**6]) == [None]


def test_info_is_what_a_client_needs_to_do_the_same(chatting: HFTokenizer, plain: HFTokenizer) -> None:
    info = chatting.info()
    assert info["chat_template"] == TEMPLATE
    assert info["eos_token"] == "<|endoftext|>"
    assert "chat_template" not in plain.info()
    for value in (info, plain.info()):
        assert json.loads(json.dumps(value)) == value


def test_added_tokens_are_those_that_are_found_in_plain_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False), AddedToken("<changed>", normalized=True)])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<special>", lstrip=True)]})
    tokenizer.save_pretrained(tmp_path)
    tokens = {token.content: token for token in HFTokenizer(tmp_path).added_tokens()}
    assert set(tokens) == {"<|endoftext|>", "<plain>", "<special>"}
    assert tokens["<special>"].lstrip
    assert not tokens["<plain>"].special


FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
WORDS = ["<a>", "<b>", "<a", " ", "  ", "\n", "x", "X", "<|endoftext|>", "1", "é", "<c>"]


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_flags_of_added_tokens_are_those_that_the_config_states(copy: Path, kind: str) -> None:
    """Where tokenizer.json says something else: ids and texts are those of transformers, which need not be installed for it."""
    rng = random.Random(kind)
    for _ in range(12):
        tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
        tokenizer.normalizer = normalizers.Lowercase()

        def drawn(content: str) -> AddedToken:
            return AddedToken(content, **{flag: rng.random() < 0.4 for flag in FLAGS})

        names = ("<|endoftext|>", "<a>", "<b>", "<C>")
        tokenizer.add_tokens([drawn(name) for name in names])
        tokenizer.save(str(copy / "tokenizer.json"))
        stated = {}
        for name in names:
            token = drawn(name)
            stated[str(tokenizer.token_to_id(name))] = {flag: getattr(token, flag) for flag in (*FLAGS, "content")}
        changes = {"bos_token": rng.choice(["<a>", "x", None]), "pad_token": rng.choice(["<b>", "1"])}
        change(copy, added_tokens_decoder=stated, tokenizer_class=kind, **changes)
        ours, theirs = HFTokenizer(copy), AutoTokenizer.from_pretrained(copy)
        for _ in range(20):
            text = "".join(rng.choices(WORDS, k=rng.randrange(8)))
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, (text, stated)
            assert ChatEncoder(ours, 1 << 20).encode(text) == ids
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
        assert "hf" not in vars(ours)
    stated[str(tokenizer.token_to_id("<a>"))]["lstrip"] = "yes"
    change(copy, added_tokens_decoder=stated)
    with pytest.raises(ModelNotFound, match="no tokenizer that can be read"):
        HFTokenizer(copy)


# ---- without transformers


def test_who_needs_transformers_is_told_how_to_get_it(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    change(copy, add_bos_token=True, bos_token="<|endoftext|>", tokenizer_class="LlamaTokenizer")
    with pytest.raises(MissingPackage, match=r"pip install 'nanoengine\[transformers\]'"):
        HFTokenizer(copy)  # its tokenizer.json does not begin prompts as the config asks
    change(copy, add_bos_token=False)
    tokenizer = HFTokenizer(copy)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    with pytest.raises(MissingPackage):
        _ = tokenizer.hf
    with pytest.raises(MissingPackage):
        _ = GGUFTokenizer(bpe()).hf
