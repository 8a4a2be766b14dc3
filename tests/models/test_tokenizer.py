"""The tokenizer of a model, from a folder or a GGUF file: text to ids and back, chats, and nothing that is executed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.errors import InvalidPrompt, ModelNotFound, UnsupportedModel
from nanoengine.models.tokenizer import GGUFTokenizer, HFTokenizer
from tests.drawn import FAST
from tests.gguf.test_tokenizer import CONTROL, bpe, sentencepiece
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


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(plain_folder: Path) -> HFTokenizer:
    return HFTokenizer(plain_folder)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    folder = tmp_path_factory.mktemp("chatting")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return HFTokenizer(folder)


@pytest.mark.parametrize(
    "text", ["hello", " two  spaces ", "Grüße, 你好 🎉", "a\nb\tc\x00d", "'s n't .", "def f(x) :\n\treturn x ,"]
)
def test_decode_gives_the_encoded_text_back(plain: HFTokenizer, text: str) -> None:
    assert plain.decode(plain.encode(text)) == text


def test_encode_gives_plain_python_integers(plain: HFTokenizer) -> None:
    ids = plain.encode("hé")
    assert isinstance(ids, list)
    assert len(ids) == 3
    assert all(type(token) is int for token in ids)


def test_the_empty_text_has_no_tokens(plain: HFTokenizer) -> None:
    assert plain.encode("") == []
    assert plain.decode([]) == ""


def test_special_tokens_have_no_text_or_their_own(plain: HFTokenizer) -> None:
    ids = plain.encode("ab")
    ids = [END_OF_TEXT, ids[0], END_OF_TEXT, ids[1], END_OF_TEXT]
    assert plain.decode(ids) == "ab"
    assert plain.decode(ids, skip_special_tokens=False) == "<|endoftext|>a<|endoftext|>b<|endoftext|>"


def test_a_character_cut_in_two_is_marked_as_incomplete(plain: HFTokenizer) -> None:
    assert plain.decode(plain.encode("aé")[:-1]) == "a\ufffd"


def test_ids_beyond_the_tokenizers_vocabulary_have_no_text(plain: HFTokenizer) -> None:
    """Models pad their vocabularies: such an id can be sampled."""
    assert plain.decode([*plain.encode("ab"), 299]) == "ab"


def test_the_end_of_text_is_that_of_the_files(plain: HFTokenizer) -> None:
    assert plain.eos_token_id == END_OF_TEXT


def test_a_slow_tokenizer_decodes_the_same(plain_folder: Path, plain: HFTokenizer) -> None:
    """One without a Rust backend, whose wrapper would tidy spaces if it were let."""

    class Wrapper:
        def decode(self, token_ids: Any, *, clean_up_tokenization_spaces: bool = True, **options: Any) -> str:
            text = str(plain.hf.decode(token_ids, **options))
            return text.replace(" ,", ",").replace(" .", ".") if clean_up_tokenization_spaces else text

    slow = HFTokenizer(plain_folder)
    slow.hf, slow.fast = Wrapper(), None
    ids = [*plain.encode("x , y ."), END_OF_TEXT]
    assert slow.decode(ids) == plain.decode(ids) == "x , y ."
    assert slow.decode(ids, skip_special_tokens=False) == plain.decode(ids, skip_special_tokens=False)
    assert slow.decode(ids, skip_special_tokens=False) == "x , y .<|endoftext|>"


def test_text_that_a_tokenizer_has_no_tokens_for_is_a_named_error(tmp_path: Path) -> None:
    """This one knows a single word, and none that stands for the others."""
    tokenizer = Tokenizer(WordLevel(vocab={"hello": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="hello").save_pretrained(tmp_path)
    loaded = HFTokenizer(tmp_path)
    assert loaded.encode("hello") == [0]
    with pytest.raises(InvalidPrompt, match=r"cannot encode the prompt: .*Missing"):
        loaded.encode("goodbye")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"]
)
def test_a_file_too_large_to_be_sound_is_never_read(tmp_path: Path, plain_folder: Path, name: str) -> None:
    folder = Path(shutil.copytree(plain_folder, tmp_path / "copy"))
    with open(folder / name, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelNotFound, match=f"no tokenizer that can be read: {name} has {2**40} bytes"):
        HFTokenizer(folder)


# ---- chats


def test_a_chat_is_encoded_by_the_models_template(chatting: HFTokenizer) -> None:
    messages = [{"role": "system", "content": "be kind"}, USER]
    assert chatting.decode(chatting.encode_chat(messages)) == "<system>be kind\n<user>hello\n<assistant>"


def test_special_tokens_of_a_template_become_their_ids(chatting: HFTokenizer) -> None:
    ids = chatting.encode_chat([{"role": "user", "content": "a<|endoftext|>b"}])
    assert ids.count(END_OF_TEXT) == 1


def test_a_tokenizer_without_a_template_says_what_to_do(plain: HFTokenizer) -> None:
    with pytest.raises(InvalidPrompt, match="no chat template: use generate"):
        plain.encode_chat([USER])


def test_what_a_template_refuses_is_told_in_its_own_words(chatting: HFTokenizer) -> None:
    with pytest.raises(InvalidPrompt, match="no villains here"):
        chatting.encode_chat([USER, {"role": "villain", "content": "ha"}])


def test_a_broken_template_is_a_named_error(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidPrompt, match="chat template"):
        HFTokenizer(tmp_path).encode_chat([USER])


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidPrompt, match="chat template"):
        HFTokenizer(tmp_path).encode_chat([USER])


@pytest.mark.parametrize(
    "messages", [["hello"], [{"content": "hello"}], [{"role": "user"}], [None], [USER, 3], [["user", "hello"]], "hello"]
)
def test_messages_without_role_and_content_are_refused(chatting: HFTokenizer, messages: Any) -> None:
    with pytest.raises(InvalidPrompt, match="role and a content"):
        chatting.encode_chat(messages)


def test_what_a_template_asks_for_is_passed_to_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if thinking %}think: {% endif %}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = HFTokenizer(tmp_path)
    assert loaded.decode(loaded.encode_chat([USER])) == "hello"
    assert loaded.decode(loaded.encode_chat([USER], {"thinking": True})) == "think: hello"


def test_tools_are_passed_to_the_template_made_for_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    tokenizer.save_pretrained(tmp_path)
    loaded = HFTokenizer(tmp_path)
    assert loaded.decode(loaded.encode_chat([USER])) == "plain"
    assert loaded.decode(loaded.encode_chat([USER], tools=[{"name": "weather"}])) == "weather"
    assert loaded.decode(loaded.encode_chat([USER], {"tools": [{"name": "sun"}]})) == "plain"


@pytest.mark.parametrize("form", ["text", "list", "file", "folder"])
def test_a_template_is_found_where_transformers_finds_it(tmp_path: Path, form: str) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages[0].content }}"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if form == "text":
        config["chat_template"] = template
    elif form == "list":
        config["chat_template"] = [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]
    else:
        config["chat_template"] = "the files come first"
        at = (
            tmp_path / "chat_template.jinja"
            if form == "file"
            else tmp_path / "additional_chat_templates" / "default.jinja"
        )
        at.parent.mkdir(exist_ok=True)
        at.write_text(template)
    path.write_text(json.dumps(config))
    loaded = HFTokenizer(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert loaded.encode_chat([USER]) == ids
    assert loaded.decode(ids) == "|||hello", "special tokens became their ids"


def test_special_tokens_that_only_the_class_has_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ unk_token }}{{ cls_token is defined }}"
    tokenizer.save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([USER], tokenize=False)
    loaded = HFTokenizer(tmp_path)
    assert loaded.decode(loaded.encode_chat([USER])) == expected


@pytest.mark.parametrize("text", ["\ud800", "a\udc80b"])
def test_text_that_is_not_unicode_is_a_named_error(chatting: HFTokenizer, text: str) -> None:
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        chatting.encode(text)
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        chatting.encode_chat([{"role": "user", "content": text}])


# ---- GGUF files


@pytest.fixture(scope="module")
def from_gguf() -> GGUFTokenizer:
    metadata = sentencepiece(("<|im_end|>", CONTROL), **{"tokenizer.chat_template": "{{ bos_token }}" + TEMPLATE})
    return GGUFTokenizer(metadata)


def test_a_gguf_file_has_all_that_a_folder_has(from_gguf: GGUFTokenizer) -> None:
    ids = from_gguf.encode("ab cd")
    assert ids[0] == 1
    assert from_gguf.decode(ids) == "ab cd"
    assert (from_gguf.eos_token_id, from_gguf.eos_token_ids) == (2, [2, ids_of(from_gguf, "<|im_end|>")])
    chat = from_gguf.encode_chat([USER])
    assert chat.count(1) == 1, "the template has the first-of-text token, and it is not added again"
    assert from_gguf.decode(chat) == "<user>hello\n<assistant>"


def ids_of(tokenizer: GGUFTokenizer, token: str) -> int:
    return int(tokenizer.hf.convert_tokens_to_ids(token))


def test_the_same_gguf_tokenizer_as_an_object_of_transformers(from_gguf: GGUFTokenizer) -> None:
    assert from_gguf.hf("ab cd")["input_ids"] == from_gguf.encode("ab cd")
    assert from_gguf.hf.apply_chat_template([USER], add_generation_prompt=True)["input_ids"] == from_gguf.encode_chat(
        [USER]
    )
    assert from_gguf.hf.eos_token_id == 2


def test_a_template_given_to_the_object_of_transformers_counts(chatting: HFTokenizer) -> None:
    for tokenizer in (HFTokenizer(chatting.folder), GGUFTokenizer(bpe())):
        tokenizer.hf.chat_template = "new"
        assert tokenizer.decode(tokenizer.encode_chat([USER])) == "new"


def test_a_gguf_file_without_a_template_says_what_to_do() -> None:
    with pytest.raises(InvalidPrompt, match="the tokenizer in the GGUF file has no chat template: use generate"):
        GGUFTokenizer(bpe()).encode_chat([USER])


def test_a_gguf_file_of_an_unknown_kind_is_a_named_error() -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        GGUFTokenizer(bpe(**{"tokenizer.ggml.model": "rwkv"}))


@FAST
@given(
    text=st.one_of(st.text(max_size=30), st.text(alphabet="ab é\n你", max_size=30)),
    add_space=st.booleans(),
    skip=st.booleans(),
    specials=st.integers(0, 2),
)
def test_text_that_comes_token_by_token_is_the_text_of_all_tokens(
    text: str, add_space: bool, skip: bool, specials: int
) -> None:
    """SentencePiece drops the first space of a text, and only that, wherever the window of the stream begins."""
    metadata = sentencepiece(**{"tokenizer.ggml.add_space_prefix": add_space})
    for tokenizer in (GGUFTokenizer(metadata), GGUFTokenizer(bpe())):
        assert tokenizer.eos_token_id is not None
        ids = tokenizer.encode(text)
        # Around the text: within it, they would cut characters into bytes that are none, and what was "0" is then "\ufffd".
        ids = [*[tokenizer.eos_token_id] * specials, *ids, *[tokenizer.eos_token_id] * specials]
        decode = partial(tokenizer.decode, skip_special_tokens=skip)
        detokenizer = Detokenizer(decode)
        for i in ids:
            detokenizer.push(i)
        detokenizer.finish()
        assert detokenizer.text == decode(ids)


def test_chats_and_prompts_need_no_transformers(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path; from nanoengine.models.tokenizer import HFTokenizer\n"
        f"tokenizer = HFTokenizer(Path({str(tmp_path)!r}))\n"
        f"tokenizer.decode(tokenizer.encode('a') + tokenizer.encode_chat([{USER!r}]))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- folders


@pytest.mark.parametrize("with_processor", [True, False])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_first_token_that_the_config_asks_for_is_there_as_in_transformers(
    tmp_path: Path, plain_folder: Path, with_processor: bool, kind: str
) -> None:
    folder = Path(shutil.copytree(plain_folder, tmp_path / "copy"))
    if with_processor:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special_tokens = [("<|endoftext|>", END_OF_TEXT)]
        tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=special_tokens)
        tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = {"add_bos_token": True, "bos_token": "<|endoftext|>", "tokenizer_class": kind}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert HFTokenizer(folder).encode("hello") == AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}', "[]"])
def test_a_tokenizer_that_cannot_be_read_is_a_named_error(
    tmp_path: Path, plain_folder: Path, content: str | None
) -> None:
    folder = Path(shutil.copytree(plain_folder, tmp_path / "copy"))
    if content is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelNotFound, match="no tokenizer that can be read"):
        HFTokenizer(folder)


def test_an_empty_folder_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no tokenizer that can be read"):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_in_the_folder_is_never_run(
    tmp_path: Path, plain_folder: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Whether the tokenizer then loads without the code or is refused: the code stays where it is."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nobody is asked, and nobody agrees
    folder = Path(shutil.copytree(plain_folder, tmp_path / "copy"))
    flag = tmp_path / "flag"
    code = f"open({str(flag)!r}, 'w')\nclass EvilTokenizer: pass\nclass EvilConfig: pass\n"
    (folder / "evil.py").write_text(code)
    auto_map = {
        "tokenizer_config.json": {
            "tokenizer_class": "EvilTokenizer",
            "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
        },
        "config.json": {
            "model_type": "evil",
            "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoTokenizer": ["evil.EvilTokenizer", None]},
        },
    }[file]
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | auto_map))
    try:
        tokenizer = HFTokenizer(folder)
    except ModelNotFound:
        pass
    else:
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert not flag.exists()


# ---- what clients of a server ask for


def test_chats_are_rendered_as_they_are_asked_for(chatting: HFTokenizer) -> None:
    answer = {"role": "assistant", "content": "well"}
    assert chatting.render_chat([USER]) == "<user>hello\n<assistant>"
    assert chatting.render_chat([USER], add_generation_prompt=False) == "<user>hello\n"
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert chatting.render_chat([USER, answer], **going_on) == "<user>hello\n<assistant>well"
    assert chatting.encode_chat([USER]) == chatting.encode(chatting.render_chat([USER]), add_special_tokens=False)


@pytest.mark.parametrize("source", ["plain", "from_gguf"])
def test_pieces_are_tokens_as_the_vocabulary_writes_them(source: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(source)
    table = {token: text for text, token in tokenizer.token_ids().items()}
    tokens = [0, 1, 5, len(table) - 1]
    assert tokenizer.pieces(tokens) == [table[token] for token in tokens] == tokenizer.hf.convert_ids_to_tokens(tokens)
    assert tokenizer.pieces([]) == []
    assert tokenizer.pieces([10**6]) == [None]


def test_a_slow_tokenizer_has_pieces_and_tells_no_added_tokens(plain_folder: Path, plain: HFTokenizer) -> None:
    slow = HFTokenizer(plain_folder)
    assert slow.hf is not None
    slow.fast = None
    assert slow.pieces([3, END_OF_TEXT]) == plain.pieces([3, END_OF_TEXT])
    assert slow.added_tokens() == []
    assert slow.decode([END_OF_TEXT], skip_special_tokens=False) == "<|endoftext|>"


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


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>"])
def test_special_tokens_are_text_if_they_are_asked_for(plain: HFTokenizer, text: str) -> None:
    tokens = plain.encode(text)
    assert END_OF_TEXT in tokens
    assert plain.decode(tokens, skip_special_tokens=False) == text
    assert plain.decode(tokens) == plain.decode(tokens, skip_special_tokens=True) == text.replace("<|endoftext|>", "")
