"""Templates that take too much end their process and nothing else, and the next text is right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.errors import InvalidPrompt
from nanoengine.models import template_client
from nanoengine.models.names import DEMO
from nanoengine.models.template_client import TemplateClient
from nanoengine.models.tokenizer import HFTokenizer
from tests.drawn import FAST

LARGE = [
    "{{ 'a' * 10 ** 10 }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ ('a' * 10 ** 5) | replace('', 'b' * 10 ** 6) }}",
    "{{ [1] | tojson(indent=10 ** 10) }}",
    "{{ 'a' * (5 * 1024 * 1024) }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endfor %}",
]
LONG = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) %}{% set _ = f(n - 1) %}{% endif %}{% endmacro %}{{ f(100) }}",
    "{{ 10 ** (10 ** 8) }}",
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% endfor %}{{ ns.a == ns.b }}",
]
REFUSED = {
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ range(10 ** 9) | list | length }}": "Range too big",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "recursion",
    "{{ x.__class__ }}{{ cycler.__init__.__globals__ }}": "unsafe",
}
TOO_MUCH = (
    r"takes more than (10 s of a CPU|1024 MiB, or makes more than 64), the limit of a text: send less, or use another"
)
SIZES = st.integers(0, 11).map(lambda power: f"(10 ** {power})")
TEXTS = st.recursive(
    st.sampled_from(["'ab'", "x", "[x]", "x | upper"]),
    lambda own: st.one_of(
        st.builds("({} * {})".format, own, SIZES),
        st.builds("({} | string | center({}))".format, own, SIZES),
        st.builds("({} ~ {})".format, own, own),
        st.builds("([{}] * {} | join({}))".format, own, SIZES, own),
        st.builds("('%{}d' | format(1))".format, st.integers(1, 10**11)),
        st.builds("(range({}) | list | tojson)".format, SIZES),
    ),
    max_leaves=4,
)
LOOPS = st.lists(SIZES, max_size=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateClient]:
    """A client whose process has less time and memory."""
    source = Path(template_client.limits.__file__).read_text()
    path = tmp_path_factory.mktemp("process") / "process.py"
    path.write_text(source.replace("= 10.0, 1 << 30", "= 0.1, 1 << 28").replace("64 << 20", "4 << 20"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_client, "COMMAND", [*template_client.COMMAND[:2], str(path)])
        yield TemplateClient()


@pytest.fixture
def client() -> TemplateClient:
    return TemplateClient()


def check_sound(client: TemplateClient) -> None:
    assert client.render("{{ a }}, {{ b[1] }}", {"a": "ä\ud800", "b": {1: 2.5}}) == "ä\ud800, 2.5"


@pytest.mark.parametrize("template", [*LARGE, *LONG])
def test_a_template_that_takes_too_much_is_refused(small: TemplateClient, template: str) -> None:
    check_sound(small)
    start = time.monotonic()
    with pytest.raises(InvalidPrompt, match=TOO_MUCH):
        small.render(template, {})
    assert time.monotonic() - start < 5
    check_sound(small)


@settings(FAST, max_examples=40)
@given(loops=LOOPS, text=TEXTS)
def test_any_template_ends(small: TemplateClient, loops: list[str], text: str) -> None:
    template = "".join(f"{{% for i in range({size}) %}}" for size in loops)
    template += f"{{{{ {text} }}}}" + "{% endfor %}" * len(loops)
    start = time.monotonic()
    with suppress(InvalidPrompt):
        assert len(small.render(template, {"x": "äöü"})) <= 4 << 20
    assert time.monotonic() - start < 5
    check_sound(small)


@pytest.mark.parametrize("template", REFUSED)
def test_what_python_or_the_sandbox_ends_is_refused_in_their_words(client: TemplateClient, template: str) -> None:
    with pytest.raises(InvalidPrompt, match=REFUSED[template]):
        client.render(template, {"x": 1})
    check_sound(client)


def test_a_process_that_is_gone_is_started_anew_and_one_that_has_forked_has_another(client: TemplateClient) -> None:
    check_sound(client)
    assert client.process.process is not None
    first = client.process.process.pid
    os.kill(first, signal.SIGKILL)
    client.process.process.wait()
    check_sound(client)
    second = client.process.process.pid
    if (pid := os.fork()) == 0:
        check_sound(client)
        os._exit(0 if client.process.process.pid not in (first, second) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    check_sound(client)
    assert client.process.process.pid == second
    with ThreadPoolExecutor(8) as threads:
        texts = [*threads.map(lambda i: client.render("{{ i }}" * 50, {"i": i}), range(200))]
    assert texts == [str(i) * 50 for i in range(200)]


def test_no_process_is_a_named_error(client: TemplateClient) -> None:
    client.process.command = ["/nowhere/python"]
    with pytest.raises(InvalidPrompt, match=r"was not rendered, .*No such file.*: ask again"):
        client.render("a", {})


def test_a_chat_is_refused_and_the_next_one_is_answered() -> None:
    hostile = "{% if messages[0].content == 'x' %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
    tokenizer = HFTokenizer(DEMO, hostile)
    with pytest.raises(InvalidPrompt, match=TOO_MUCH):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "def f("}])) == "def f("
