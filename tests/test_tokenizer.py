"""The tokenizer of a model folder: text to ids and back, chats, and nothing that is executed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nanoengine.errors import InvalidPrompt, ModelNotFound
from nanoengine.tokenizer import HFTokenizer
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


def test_special_tokens_have_no_text(plain: HFTokenizer) -> None:
    ids = plain.encode("ab")
    assert plain.decode([END_OF_TEXT, ids[0], END_OF_TEXT, ids[1], END_OF_TEXT]) == "ab"


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
    slow.hf, slow._fast = Wrapper(), None
    ids = [*plain.encode("x , y ."), END_OF_TEXT]
    assert slow.decode(ids) == plain.decode(ids) == "x , y ."


def test_text_that_a_tokenizer_has_no_tokens_for_is_a_named_error(tmp_path: Path) -> None:
    """This one knows a single word, and none that stands for the others."""
    tokenizer = Tokenizer(WordLevel(vocab={"hello": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="hello").save_pretrained(tmp_path)
    loaded = HFTokenizer(tmp_path)
    assert loaded.encode("hello") == [0]
    with pytest.raises(InvalidPrompt, match=r"cannot encode the prompt: .*Missing"):
        loaded.encode("goodbye")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
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


@pytest.mark.parametrize("text", ["\ud800", "a\udc80b"])
def test_text_that_is_not_unicode_is_a_named_error(chatting: HFTokenizer, text: str) -> None:
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        chatting.encode(text)
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        chatting.encode_chat([{"role": "user", "content": text}])


# ---- folders


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
