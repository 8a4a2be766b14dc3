// What people write with the packages of npm, openai and ai, and a table of what came of it; see checks.py.
//
// Usage: launch.py MODEL -- node of_npm.mjs TABLE, where the packages are installed beside this file.

import assert from "node:assert/strict"
import { appendFileSync, readFileSync } from "node:fs"

import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { Output, ToolLoopAgent, embedMany, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai"
import OpenAI from "openai"
import { zodFunction, zodResponseFormat } from "openai/helpers/zod"
import { z } from "zod"

const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
const baseURL = `${process.env.SERVER_URL ?? "http://127.0.0.1:8000"}/v1`
const model = process.env.MODEL ?? "small"
const apiKey = "none"
const short = { max_tokens: 40, temperature: 0 }
const fair = { max_tokens: 200, temperature: 0.7, seed: 1 }
const messages = [{ role: "user", content: "A person, please." }]

const Address = z.object({ zip_code: z.enum(["1010", "1020"]), floor: z.number().int().min(0).max(99).nullable() })
const Person = z.object({ is_adult: z.boolean(), color: z.enum(["red", "green"]), address: Address, friends: z.array(Address).max(2) })
const City = z.object({ city: z.enum(["Rome", "Oslo"]) })

// The model decides which of the two it says; it has seen an example.
const SAID = "It is sunny in Rome."
const CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
const callsOnce = { structured_outputs: { choice: [CALL, SAID] } }
const call = { id: "call_1", type: "function", function: { name: "weather", arguments: '{"city": "Oslo"}' } }
const asked = [
  { role: "user", content: "How is the weather in Oslo?" },
  { role: "assistant", content: null, tool_calls: [call] },
  { role: "tool", tool_call_id: "call_1", content: "snowy" },
  { role: "assistant", content: "It is snowy in Oslo." },
  { role: "user", content: "How is the weather in Rome?" },
]

const checks = []
const check = (client, feature, run) => checks.push({ client, feature, run })

class WeakModel extends Error {}

/** A text is there; it should have a word. */
const says = (text, word) => {
  assert(text, "no text")
  if (!text.toLowerCase().includes(word.toLowerCase())) throw new WeakModel(`${JSON.stringify(text.slice(0, 60))} has no ${word}`)
}

/** The error that something is refused with, which has a status (if one is given) and a word. A check that returns it was refused rightly. */
const refusal = async (ask, status, word) => {
  let found
  try {
    found = await ask()
  } catch (error) {
    if (status) assert.equal(error.statusCode ?? error.lastError?.statusCode, status, String(error))
    const told = `${error} ${error.responseBody ?? ""}`.toLowerCase()
    assert(told.includes(word.toLowerCase()), told)
    return error
  }
  throw new Error(`it is taken: ${JSON.stringify(found.text)}`)
}

// ---- openai

const chat = new OpenAI({ baseURL, apiKey, maxRetries: 0 }).chat.completions
const weather = (made) => ({ name: "weather", description: "The weather of a city.", parameters: City, function: ({ city }) => (made.push(city), "sunny") })

check("openai", "`.parse` of a zod schema", async () => {
  const found = await chat.parse({ model, messages, response_format: zodResponseFormat(Person, "person"), ...fair })
  Person.parse(found.choices[0].message.parsed)
})

check("openai", "`.stream` of a zod schema", async () => {
  const stream = chat.stream({ model, messages, response_format: zodResponseFormat(Person, "person"), ...fair })
  let done
  stream.on("content.done", (event) => (done = event.parsed))
  Person.parse((await stream.finalChatCompletion()).choices[0].message.parsed)
  Person.parse(done)
})

check("openai", "`zodFunction` (strict), `.parse`, `.stream`: required and by name", async () => {
  for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
    const body = { model, messages, tools: [zodFunction({ name: "weather", parameters: City })], tool_choice, parallel_tool_calls: false, ...fair }
    const whole = (await chat.parse(body)).choices[0]
    const stream = chat.stream(body)
    let done
    stream.on("tool_calls.function.arguments.done", (event) => (done = event.parsed_arguments))
    const streamed = (await stream.finalChatCompletion()).choices[0]
    City.parse(done)
    for (const choice of [whole, streamed]) {
      assert.equal(choice.finish_reason, "tool_calls")
      assert.equal(choice.message.tool_calls.length, 1)
      City.parse(choice.message.tool_calls[0].function.parsed_arguments)
    }
  }
})

check("openai", "`runTools`: call, result, answer (grammar), whole and streamed", async () => {
  for (const stream of [false, true]) {
    const made = []
    const parameters = z.toJSONSchema(City)
    const own = { ...weather(made), parameters, parse: JSON.parse }
    const runner = chat.runTools({ model, stream, messages: asked, tools: [{ type: "function", function: own }], ...short, ...callsOnce })
    assert.equal(await runner.finalContent(), SAID)
    if (!made.length) throw new WeakModel("no call")
    assert.deepEqual(made, ["Rome"])
  }
})

check("openai", "`runTools` of a strict tool by its name: one call", async () => {
  const made = []
  const tools = [zodFunction(weather(made))]
  const tool_choice = { type: "function", function: { name: "weather" } }
  const runner = chat.runTools({ model, stream: true, messages: asked, tools, tool_choice, ...fair })
  assert.equal(await runner.finalFunctionToolCallResult(), "sunny")
  assert.equal(made.length, 1)
})

// ---- ai, by each of its providers that this server is one of

const URL_OF_AI = { baseURL, apiKey }
const providers = {
  "openai-compatible": createOpenAICompatible({ name: "own", ...URL_OF_AI, supportsStructuredOutputs: true, includeUsage: true }),
  "openai chat": createOpenAI(URL_OF_AI).chat,
  "openai responses": createOpenAI(URL_OF_AI).responses,
  anthropic: createAnthropic(URL_OF_AI),
}
const turns = [
  { role: "user", content: "My name is Ada." },
  { role: "assistant", content: "Hello Ada." },
  { role: "user", content: "What is my name?" },
]
const capital = "What is the capital of France? Answer with one word."
const question = "How is the weather in Rome?"
const weatherTool = (made) => tool({ description: "The weather of a city.", inputSchema: City, execute: ({ city }) => (made.push(city), "sunny") })
const onError = ({ error }) => { throw error }
const long = { maxOutputTokens: 200 }

for (const [name, provider] of Object.entries(providers)) {
  const still = { model: provider(model), maxOutputTokens: 40, temperature: 0, maxRetries: 0 }
  const own = (feature, run) => check("ai", `${name}: ${feature}`, run)

  own("`generateText`, `streamText`", async () => {
    const whole = await generateText({ ...still, prompt: capital })
    const stream = streamText({ ...still, prompt: capital, onError })
    let text = ""
    for await (const part of stream.textStream) text += part
    assert.equal(text, whole.text)
    assert.equal(await stream.finishReason, "stop")
    assert((await stream.usage).outputTokens > 0 && whole.usage.inputTokens > 0)
    says(text, "Paris")
  })

  own("`system`, several turns", async () => says((await generateText({ ...still, system: "You are brief.", messages: turns })).text, "Ada"))

  own("`maxOutputTokens`, `stopSequences`", async () => {
    assert.equal((await generateText({ ...still, maxOutputTokens: 3, prompt: "Count from 1 to 9." })).finishReason, "length")
    if (name === "openai responses") return // it has none
    assert(!(await generateText({ ...still, stopSequences: ["4"], prompt: "Count from 1 to 9." })).text.includes("4"))
  })

  own("`generateObject`, `streamObject`", async () => {
    Person.parse((await generateObject({ ...still, ...long, schema: Person, prompt: "A person." })).object)
    const stream = streamObject({ ...still, ...long, schema: Person, prompt: "A person.", onError })
    for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object")
    Person.parse(await stream.object)
  })

  own("`generateText` with `Output.object`", async () => {
    Person.parse((await generateText({ ...still, ...long, output: Output.object({ schema: Person }), prompt: "A person." })).output)
  })

  own("`Output.object` beside a tool: a call that fits, or the object", async () => {
    const made = []
    const body = { ...still, output: Output.object({ schema: City }), tools: { weather: weatherTool(made) }, stopWhen: isStepCount(3), prompt: question }
    const found = await generateText(body)
    if (found.finishReason === "tool-calls") throw new WeakModel("it calls the function again and again")
    City.parse(found.output)
  })

  for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
    own(`\`toolChoice\`: ${toolChoice.toolName ?? toolChoice}, \`generateText\`, \`streamText\``, async () => {
      const body = { ...still, ...long, tools: { weather: tool({ inputSchema: City }) }, toolChoice, prompt: question }
      const whole = await generateText(body)
      const stream = streamText({ ...body, onError })
      for (const [calls, reason] of [[whole.toolCalls, whole.finishReason], [await stream.toolCalls, await stream.finishReason]]) {
        assert.equal(reason, "tool-calls")
        assert(calls.length > 0)
        for (const call of calls) City.parse(call.input)
      }
    })
  }

  own("`generateText`, `streamText`: a call that must be, its result, an answer", async () => {
    const made = []
    const first = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" })
    const body = { ...still, tools: { weather: weatherTool(made) }, prepareStep: first, stopWhen: isStepCount(2), prompt: question }
    const whole = await generateText(body)
    const stream = streamText({ ...body, onError })
    const types = new Set()
    for await (const part of stream.fullStream) types.add(part.type)
    for (const type of ["tool-input-start", "tool-call", "tool-result", "text-delta", "finish"]) assert(types.has(type), type)
    assert.equal(await stream.text, whole.text)
    assert.equal(made.length % 2, 0)
    says(whole.text, "sunny")
  })

  own("`ToolLoopAgent` with a tool, as the model likes", async () => {
    const made = []
    const agent = new ToolLoopAgent({ ...still, tools: { weather: weatherTool(made) }, stopWhen: isStepCount(3) })
    assert((await agent.generate({ prompt: question })).steps.length > 0)
    if (!made.length) throw new WeakModel("no call")
  })

  own("a stream that is aborted, and a text behind it", async () => {
    const abort = new AbortController()
    const stream = streamText({ ...still, maxOutputTokens: 2000, prompt: "Write a long story.", abortSignal: abort.signal })
    for await (const _ of stream.textStream) {
      abort.abort()
      break
    }
    assert((await generateText({ ...still, prompt: capital })).text)
  })

  for (const [feature, status, word, body] of [
    ["another model", 404, "gpt-9", { model: provider("gpt-9"), prompt: capital }],
    ["too long a prompt", 400, "too long", { prompt: "one two three ".repeat(3000) }],
    ["an image", 400, "image", { messages: [{ role: "user", content: [{ type: "image", image: PIXEL, mediaType: "image/png" }] }] }],
    ["`abortSignal` of a timeout", 0, "", { maxOutputTokens: 2000, prompt: "Write a long story.", abortSignal: () => AbortSignal.timeout(400) }],
  ])
    own(feature, () => refusal(() => generateText({ ...still, ...body, abortSignal: body.abortSignal?.() }), status, word))
}

check("ai", "a wrong key", () => refusal(() => generateText({ model: createOpenAI({ baseURL, apiKey: "x" }).chat(model), prompt: capital, maxRetries: 0 }), 401, "key"))

check("ai", "`embedMany`", async () => {
  for (const embedding of [providers["openai-compatible"].textEmbeddingModel(model), createOpenAI(URL_OF_AI).textEmbeddingModel(model)]) {
    const { embeddings } = await embedMany({ model: embedding, values: ["a stack", "a queue"] })
    assert.notDeepEqual(embeddings[0], embeddings[1])
  }
})

// ---- the table

const table = process.argv[2]
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version
for (const { client, feature, run } of checks) {
  if (!`${client}: ${feature}`.includes(process.env.ONLY ?? "")) continue
  let result
  try {
    result = (await run()) instanceof Error ? "refused rightly" : "passed"
  } catch (error) {
    const told = String(error instanceof WeakModel ? error.message : error.stack ?? error).replaceAll(/\s+/g, " ").replaceAll("|", "/")
    result = `${error instanceof WeakModel ? "weak model:" : "FAULT,"} ${told.slice(0, 500)}`
  }
  const row = `| ${client} (npm) ${version(client)} | ${feature} | ${result} |`
  console.log(row)
  appendFileSync(table, `${row}\n`)
}
