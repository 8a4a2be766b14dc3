"""Commands of a chat: each does what /help says, and none goes to the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.serve.chat.commands import COMMANDS, is_open, reply
from nanoengine.serve.chat.session import ChatError, Session
from tests.serve.chat.toys import answer


def test_a_blank_before_a_slash_makes_it_a_message(session: Session) -> None:
    done = reply(session, " /etc is a folder")
    assert done.answer is not None
    assert "user\n/etc is a folder\n" in answer(done.answer)


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ('"""', True),
        ('"""one\ntwo', True),
        ('/system """Be', True),
        ('"""one\ntwo"""', False),
        ('"""A module."""\nimport os', False),  # a paste that begins like one
        ('say """', False),
        ("/set seed 1", False),
    ],
)
def test_triple_quotes_are_open_until_others_come(text: str, opens: bool) -> None:
    assert is_open(text) is opens


def test_triple_quotes_hold_a_message_or_what_a_command_takes(session: Session) -> None:
    done = reply(session, '"""\n/etc\n\nis a folder\n"""')
    assert done.answer is not None
    assert "user\n/etc\n\nis a folder\n" in answer(done.answer)
    reply(session, '/system """Be brief,\nand kind"""')
    assert session.system == "Be brief,\nand kind"
    done = reply(session, '"""A module."""\nimport os')
    assert done.answer is not None
    assert 'user\n"""A module."""\nimport os\n' in answer(done.answer)
    assert reply(session, '""""""') == reply(session, '"""\n \n"""') == ("", None, False)


@pytest.mark.parametrize("line", ["/help", "?", " ? ", "/?"])
def test_help_names_every_command(session: Session, line: str) -> None:
    words = reply(session, line).words
    assert all(name in words for name in COMMANDS)
    assert session.messages == []


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/hepl", "did you mean /help?"),
        ("/rest all", "did you mean /reset?"),
        ("/xyzzy", "/help lists"),
        ("/", "/help lists"),
    ],
)
def test_an_unknown_command_is_told_and_not_sent(session: Session, line: str, hint: str) -> None:
    with pytest.raises(ChatError, match=r"there is no command /") as caught:
        reply(session, line)
    assert hint in str(caught.value)
    assert (session.messages, session.stats) == ([], [])


def test_set_shows_and_changes(session: Session) -> None:
    assert reply(session, "/set temperature 0.25").words == "temperature is 0.25"
    assert "temperature        0.25" in reply(session, "/set").words
    assert reply(session, "/set temperature default").words == "temperature is 0.0"
    with pytest.raises(ChatError, match="needs a value"):
        reply(session, "/set temperature")


def test_show_tells_what_answers_and_how(tiny: Path) -> None:
    with LLM(str(tiny), dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=40, use_tqdm=False) as llm:
        words = reply(Session(llm, SamplingParams(temperature=0.25), "Be brief"), "/show").words
    for told in (f"{tiny}: Qwen3ForCausalLM", "context            64 tokens", "temperature        0.25", "Be brief"):
        assert told in words


def test_system_shows_and_changes(session: Session) -> None:
    assert reply(session, "/system").words == "there is no system message"
    reply(session, "/system Be brief,\nand kind")
    assert session.system == "Be brief,\nand kind"
    assert "Be brief" in reply(session, "/system").words


@pytest.mark.parametrize("line", ["/reset", "/clear"])
def test_a_conversation_is_forgotten(session: Session, line: str) -> None:
    answer(session.ask("one"))
    assert "forgotten" in reply(session, line).words
    assert session.messages == []


@pytest.mark.parametrize("line", ["/bye", "/quit", "/exit"])
def test_bye_ends_the_chat(session: Session, line: str) -> None:
    assert reply(session, line).is_over
