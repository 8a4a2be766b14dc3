"""The page in Chromium, on a toy that repeats its prompt: what only a browser shows. W3C's WebDriver drives it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.serve.aio.toys import PATIENCE
from tests.serve.server.conftest import MakeServer
from tests.serve.server.parrot import save_tokenizer
from tests.serve.server.running import Server

ENTER, UP = "\ue007", "\ue013"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,900")
HELPERS = """const all = (css) => [...document.querySelectorAll(css)], text = (css) => all(css).at(-1)?.textContent;
const ended = () => all('.answering').length === 0 && text('.assistant footer p');
const click = (words) => all('button').findLast((button) => button.textContent === words && button.checkVisibility()).click();
const distance = () => { const [log] = all('#log'); return log.scrollHeight - log.scrollTop - log.clientHeight; };
return """
PROGRAMS = ("chromium", "chromedriver")
pytestmark = pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"needs {' and '.join(PROGRAMS)}")


class Browser:
    """A browser with a window."""

    def __init__(self) -> None:
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        line = next(line for line in self.driver.stdout if "successfully on port" in line)
        self.url = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}/session"
        options = {"goog:chromeOptions": {"args": FLAGS}}
        self.url += "/" + self.does("", capabilities={"alwaysMatch": options})["sessionId"]

    def does(self, command: str, **values: Any) -> Any:
        call = Request(self.url + command, json.dumps(values).encode(), {"content-type": "application/json"})
        with urlopen(call, timeout=PATIENCE) as response:
            return json.load(response)["value"]

    def tells(self, script: str) -> Any:
        return self.does("/execute/sync", script=HELPERS + script, args=[])

    def until(self, script: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := self.tells(script)):
            assert time.monotonic() < end, f"never {script}: {self.tells('document.body.innerText')}"
            time.sleep(0.01)
        return value

    def types(self, keys: str) -> None:
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.does("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def says(self, message: str) -> str:
        """What stands below the answer to a message; an empty one is what the text field holds."""
        if message:
            self.tells(f"document.activeElement.value = {json.dumps(message)}")
        self.types(ENTER)
        return str(self.until("ended()"))

    def opens(self, server: Server) -> None:
        self.does("/url", url=server.url)
        self.until("text('#connection') === 'live' && text('#model') === 'parrot'")

    def commands(self, name: str, **values: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self.does("/goog/cdp/execute", cmd=name, params=values)

    def close(self) -> None:
        with urlopen(Request(self.url, method="DELETE"), timeout=PATIENCE):
            pass
        self.driver.terminate()
        self.driver.communicate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


def begin(browser: Browser, server: Server) -> None:
    """An answer that has begun and waits for its next step, and a view of it."""
    server.gate.shut()
    browser.types("a" * 60 + ENTER)
    while not browser.tells("text('#queue').startsWith('1 ') && text('.answering .text')"):
        server.gate.let()  # the page sees the engine between two steps
        time.sleep(0.05)
    assert browser.tells("text('#requests tr').startsWith('chat-') && all('#nothing')[0].hidden")


def test_an_answer_that_is_stopped(browser: Browser, make_server: MakeServer) -> None:
    server = make_server()
    browser.opens(server)
    begin(browser, server)
    browser.tells("all('#stop')[0].focus()")
    browser.types(ENTER)
    server.gate.open()
    assert browser.until("ended()").startswith("Stopped · ")
    browser.until("text('#queue').startsWith('0 ')")
    browser.until("all('#requests tr').length === 0 && !all('#nothing')[0].hidden")
    assert browser.says("the text field has the focus").startswith("Complete · ")


def test_a_server_that_is_gone(browser: Browser, make_server: MakeServer) -> None:
    server = make_server()
    browser.opens(server)
    begin(browser, server)
    for connection in list(server._server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    assert browser.until("ended()").startswith("The server does not answer · ")
    server.gate.open()
    server.close()
    assert browser.says("still there?") == "The server does not answer"


def test_a_context_that_is_full(browser: Browser, make_server: MakeServer) -> None:
    browser.opens(make_server({"max_model_len": 160}))
    told = [browser.says(f"message {number}") for number in range(3)]
    assert ["no longer read" in own for own in told] == [False, False, True], told
    assert browser.tells("all('#log')[0].scrollHeight > all('#log')[0].clientHeight")
    assert browser.tells("document.documentElement.scrollHeight <= innerHeight"), (
        "the conversation scrolls, not the page"
    )
    too_long = browser.says("b" * 200)
    assert "maximum context length is 160 tokens" in too_long
    assert "no longer read" not in too_long
    browser.types(UP)
    assert browser.tells("all('.replaced').length") == 2
    browser.tells("document.activeElement.value = 'short'")
    assert browser.says("").endswith("the first 4 messages of this chat are no longer read")


def test_a_conversation_is_there_after_a_reload_and_can_be_had_anew(browser: Browser, make_server: MakeServer) -> None:
    server = make_server()
    browser.opens(server)
    browser.says("**one**")
    browser.does("/refresh")
    assert browser.until("ended() && text('.user .text') === '**one**' && text('.assistant .text strong')") == "one"
    browser.tells("click('Regenerate')")
    browser.until("ended() && all('.assistant').length === 1")
    browser.tells("click('New chat')")
    browser.until("all('.message').length === 0 && !all('#welcome')[0].hidden")
    assert browser.says("two").startswith("Complete · ")


def test_a_new_chat_is_undone_until_it_has_a_message(browser: Browser, make_server: MakeServer) -> None:
    browser.opens(make_server())
    browser.says("one")
    browser.tells("click('New chat')")
    browser.tells("click('New chat')")
    browser.does("/refresh")
    browser.until("text('#connection') === 'live'")
    browser.tells("click('Back to the last chat')")
    assert browser.until("text('.user .text')") == "one"
    assert browser.says("two").startswith("Complete · ")
    assert browser.tells("all('.message').length") == 4
    browser.tells("click('New chat')")
    browser.says("three")
    assert browser.tells("all('#old-chat')[0].hidden")
    browser.tells("click('New chat')")
    browser.tells("click('Back to the last chat')")
    assert browser.until("all('.user .text').map((element) => element.textContent).join()") == "three"


def test_the_end_of_the_conversation_stays_in_view(browser: Browser, make_server: MakeServer) -> None:
    server = make_server()
    browser.opens(server)
    for message in ("a long message " * 20, "another " * 30, "too long " * 200):
        browser.says(message)
        browser.until("distance() < 2")
    browser.types(UP)
    browser.until("distance() < 2 && all('.replaced').length === 2")
    browser.tells("document.activeElement.value = 'line\\n'.repeat(30)")
    browser.until("distance() < 2")
    browser.says("")
    browser.until("distance() < 2")
    browser.tells("click('Regenerate')")
    browser.until("ended() && distance() < 2")
    begin(browser, server)
    browser.tells("all('#log')[0].scrollTop = 0")
    server.gate.open()
    browser.until("ended()")
    assert browser.tells("all('#log')[0].scrollTop") == 0, "who reads above stays there"


def test_a_narrow_window_has_room_for_the_name_of_the_model(browser: Browser, make_server: MakeServer) -> None:
    server = make_server(served_model_name=("SmolLM2-135M-Instruct",))
    size = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    browser.commands("Emulation.setDeviceMetricsOverride", **size)
    try:
        browser.does("/url", url=server.url)
        browser.until("text('#connection') === 'live' && text('#model') === 'SmolLM2-135M-Instruct'")
        assert browser.tells("all('#model').every((element) => element.scrollWidth <= element.clientWidth)")
        assert browser.tells("document.documentElement.scrollWidth <= 320")
    finally:
        browser.commands("Emulation.clearDeviceMetricsOverride")


SEVERAL = """
const real = fetch;
const data = [{id: "first", status: {value: "unloaded"}}, {id: "second", status: {value: "loaded"}, max_model_len: 1024}];
window.bodies = [];
window.fetch = (path, options) => {
  if (path === "v1/models") return Promise.resolve(Response.json({data}));
  const isLoaded = data[0].status.value === "loaded";
  const refused = Response.json({message: "not loaded"}, {status: 503});
  if (path === "view?model=first" && !isLoaded) return Promise.resolve(refused);
  if (!options.body) return real(path, options);
  bodies.push(JSON.parse(options.body));
  if (bodies.at(-1).stream) data[0].status.value = "loaded";
  return real(path, {...options, body: JSON.stringify({...bodies.at(-1), model: "parrot"})});
};
"""
"""A script that makes a server of one model look like one of two, the first of which is loaded by its first request."""


def test_a_model_is_picked_where_there_are_several(browser: Browser, make_server: MakeServer) -> None:
    script = browser.commands("Page.addScriptToEvaluateOnNewDocument", source=SEVERAL)
    server = make_server()
    try:
        browser.does("/url", url=server.url)
        browser.until(
            "text('#connection') === 'live' && all('#picker')[0].value === 'second' && all('#model')[0].hidden"
        )
        assert browser.tells("all('#picker option').map((option) => option.textContent)") == [
            "first (unloaded)",
            "second",
        ]
        browser.tells("(all('#picker')[0].value = 'first', all('#picker')[0].dispatchEvent(new Event('change')))")
        browser.until("text('#welcome-words').startsWith('It is loaded when') && text('#connection') === 'not loaded'")
        browser.says("one")
        browser.until("text('#picker option:first-child') === 'first' && text('#connection') === 'live'")
        assert browser.tells("bodies.filter((body) => body.stream).map((body) => body.model)") == ["first"]
        browser.does("/refresh")
        browser.until("all('#picker')[0].value === 'first'")
    finally:
        browser.commands("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_a_text_goes_on_where_there_is_no_chat_template(
    browser: Browser, make_server: MakeServer, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink()
    browser.opens(make_server({"folder": folder}))
    assert browser.says("more than the 16 tokens of the interface").startswith("Complete · ")
