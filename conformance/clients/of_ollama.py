"""What people write with Ollama's own package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import ollama
from checks import BASE, CAPITAL, MODEL, PIXEL, QUESTION, TOO_LONG, TURNS, WEATHER, Answer, Person, check, refuses, says

client = ollama.Client(host=BASE)  # the key is in the environment
STILL = {"num_predict": 40, "temperature": 0}
LONG = {"num_predict": 200, "temperature": 0}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


@check("ollama", "`chat`, whole and streamed, with its figures")
def chats() -> None:
    whole = client.chat(MODEL, CAPITAL, options=STILL)
    *parts, last = client.chat(MODEL, CAPITAL, options=STILL, stream=True)
    assert "".join(part.message.content or "" for part in (*parts, last)) == whole.message.content
    for own in (whole, last):
        assert (own.done, own.done_reason) == (True, "stop")
        assert own.eval_count > 0
        assert own.prompt_eval_count > 0
        assert own.total_duration >= own.eval_duration + own.prompt_eval_duration
        assert own.eval_duration > 1e6  # a token takes longer than a millisecond, whole or streamed
    says(whole.message.content, "Paris")


@check("ollama", "`chat`: a system prompt, several turns")
def turns() -> None:
    says(client.chat(MODEL, TURNS, options=STILL).message.content, "Ada")


@check("ollama", "`generate`: as `chat`, streamed, `system`, `raw`, `suffix`")
def generate() -> None:
    prompt = CAPITAL[0]["content"]
    whole = client.generate(MODEL, prompt, options=STILL).response
    assert whole == client.chat(MODEL, CAPITAL, options=STILL).message.content
    assert "".join(own.response for own in client.generate(MODEL, prompt, options=STILL, stream=True)) == whole
    assert client.generate(MODEL, prompt, system="Be brief.", options=STILL).response
    assert client.generate(MODEL, "1, 2, 3,", raw=True, options=STILL).response
    middle = client.generate(MODEL, "def add(a, b):\n    return ", suffix="\n", options=STILL).response
    says(middle, "a + b")


@check("ollama", "`generate` of no prompt loads the model")
def load() -> None:
    own = client.generate(MODEL, "", keep_alive="5m")
    assert (own.response, own.done_reason) == ("", "load")


@check("ollama", "`options`: `seed`, `stop`, `num_predict`, those of memory, those at their neutral values", "usage")
def options() -> None:
    fair = {"num_predict": 12, "temperature": 0.9, "seed": 3}
    one, other = (client.chat(MODEL, ASKED, options=fair).message.content for _ in range(2))
    assert one == other
    count: list[Any] = [{"role": "user", "content": "Count from 1 to 9."}]
    text = client.chat(MODEL, count, options=STILL).message.content or ""
    stopped = client.chat(MODEL, count, options={**STILL, "stop": ["4"]})
    assert (stopped.message.content, stopped.done_reason) == (text.split("4")[0], "stop")
    cut = client.chat(MODEL, count, options={**STILL, "num_predict": 3})
    assert (cut.eval_count, cut.done_reason) == (3, "length")
    neutral = {
        "num_ctx": 2048,
        "num_gpu": 1,
        "typical_p": 1.0,
        "mirostat": 0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
    }
    assert client.chat(MODEL, CAPITAL, options=ollama.Options(**STILL, **neutral)).done


@check("ollama", '`format`: a schema, "json"')
def formats() -> None:
    for kind in (Answer, Person):
        found = client.chat(MODEL, ASKED, options=LONG, format=kind.model_json_schema(), keep_alive="5m")
        kind.model_validate_json(found.message.content or "")
    assert Answer.model_validate_json(
        client.generate(MODEL, "A city.", options=LONG, format=Answer.model_json_schema()).response
    )
    own = client.chat(
        MODEL, [{"role": "user", "content": "The city of Rome and its country, as JSON."}], format="json", options=LONG
    )
    if own.done_reason == "stop":
        json.loads(own.message.content or "")
    else:
        says(own.message.content, "<that it ends>")


@check("ollama", "`tools` of a function and as JSON: a call, or text; streamed")
def tools() -> None:
    def weather(city: str) -> str:  # noqa: ARG001 - the client reads its name
        """The weather of a city.

        Args:
            city: its name
        """
        return "sunny"

    known: list[Any] = [weather, WEATHER]
    for tool in known:
        whole = client.chat(MODEL, ASKED, tools=[tool], options=STILL).message
        parts = [own.message for own in client.chat(MODEL, ASKED, tools=[tool], options=STILL, stream=True)]
        made = [call for part in parts for call in part.tool_calls or ()]
        assert [call.function for call in made] == [call.function for call in whole.tool_calls or ()]
    if not whole.tool_calls:
        says(whole.content, "<a call>")


@check("ollama", "`tools`: call, result, answer")
def loop() -> None:
    made: dict[str, Any] = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    own = client.chat(MODEL, asked, tools=[WEATHER], options=STILL).message
    says(own.content or str(own.tool_calls), "sunny")


@check("ollama", "`think`, off and on, whole and streamed")
def think() -> None:
    assert client.chat(MODEL, CAPITAL, think=False, options=STILL).message.thinking is None
    whole = client.chat(MODEL, CAPITAL, think=True, options=STILL).message
    parts = [own.message for own in client.chat(MODEL, CAPITAL, think=True, options=STILL, stream=True)]
    assert whole.thinking
    assert "".join(own.thinking or "" for own in parts) == whole.thinking
    assert "".join(own.content or "" for own in parts) == whole.content


@check("ollama", "`list`, `show`, `ps`")
def known() -> None:
    [own] = client.list().models
    [running] = client.ps().models
    assert own.model == running.model == MODEL
    for one in (own, running):
        assert one.size > 1e8
        assert one.digest
        assert one.details.format == "gguf"
        assert one.details.parameter_size
    assert running.context_length == 4096
    shown = client.show(MODEL)
    assert {"completion", "tools", "insert"} <= {*shown.capabilities}
    assert shown.modelinfo["general.architecture"] == "qwen2"
    assert shown.template


@check("ollama", "`keep_alive=0` is answered")
def unload() -> None:
    own = client.generate(MODEL, "", keep_alive=0)
    assert (own.done, own.done_reason) == (True, "unload")


@check("ollama", "`embed`: texts, `dimensions`")
def embed() -> None:
    one, other = client.embed(MODEL, ["a stack", "a queue"]).embeddings
    assert client.embed(MODEL, "a stack").embeddings == [one] != [other]
    assert len(client.embed(MODEL, "a stack", dimensions=8).embeddings[0]) == 8


@check("ollama", "`AsyncClient`: a stream that is left, a task that is cancelled, a chat behind them")
def cancelled() -> None:
    story: list[Any] = [{"role": "user", "content": "Write a long story."}]

    async def ask() -> Any:
        own = ollama.AsyncClient(host=BASE)
        async for _ in await own.chat(MODEL, story, stream=True):
            break
        task = asyncio.ensure_future(own.chat(MODEL, story))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await own.chat(MODEL, CAPITAL, options=STILL)

    assert asyncio.run(ask()).done


asked: dict[str, Callable[[], Any]] = {
    "another model: 404": lambda: client.chat("gpt-9", CAPITAL),
    "`show` of another: 404": lambda: client.show("gpt-9"),
    "too long a prompt: maximum context length": lambda: client.chat(MODEL, [{"role": "user", "content": TOO_LONG}]),
    "an image: image": lambda: client.chat(MODEL, [{"role": "user", "content": "?", "images": [PIXEL]}]),
    "an image to `generate`: image": lambda: client.generate(MODEL, "?", images=[PIXEL]),
    "`template`: template": lambda: client.generate(MODEL, "x", template="{{ .Prompt }}"),
    "`context`: context": lambda: client.generate(MODEL, "x", context=[1, 2]),
    "`logprobs`: logprobs": lambda: client.chat(MODEL, CAPITAL, logprobs=True),
    "`mirostat: 2`: mirostat": lambda: client.chat(MODEL, CAPITAL, options={"mirostat": 2}),
    "an unknown option: temprature": lambda: client.chat(MODEL, CAPITAL, options={"temprature": 1}),
    "`pull`: ": lambda: client.pull("gpt-9"),
    "`delete`: ": lambda: client.delete(MODEL),
    "`copy`: ": lambda: client.copy(MODEL, "x"),
    "a wrong key: key": lambda: ollama.Client(host=BASE, headers={"Authorization": "Bearer x"}).chat(MODEL, CAPITAL),
}
for name, ask in asked.items():
    feature, _, word = name.rpartition(": ")
    refuses("ollama", feature, ollama.ResponseError, word)(ask)
