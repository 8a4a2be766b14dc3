// What people write with the packages of npm, openai and ai, and a table of what came of it; see checks.py.
//
// Usage: launch.py smollm2 -- node of_npm.mjs TABLE, where the packages are installed beside this file.

import assert from "node:assert/strict"
import { appendFileSync, readFileSync } from "node:fs"

import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { Output, ToolLoopAgent, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai"
import OpenAI from "openai"
import { zodFunction, zodResponseFormat } from "openai/helpers/zod"
import { z } from "zod"

const baseURL = `${process.env.SERVER_URL ?? "http://127.0.0.1:8000"}/v1`
const model = "smollm2"
const short = { max_tokens: 60, temperature: 0 }
const fair = { max_tokens: 400, temperature: 0.7, seed: 1 }
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

// ---- openai

const chat = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).chat.completions
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

// ---- ai

const withSchemas = { name: "nanoengine", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true }
const language = createOpenAICompatible(withSchemas)(model)
const fairly = { model: language, maxOutputTokens: 400, temperature: 0.7, seed: 1, maxRetries: 0 }
const shortly = { model: language, maxOutputTokens: 60, temperature: 0, maxRetries: 0, providerOptions: { nanoengine: callsOnce } }
const history = [
  { role: "user", content: asked[0].content },
  { role: "assistant", content: [{ type: "tool-call", toolCallId: "call_1", toolName: "weather", input: { city: "Oslo" } }] },
  { role: "tool", content: [{ type: "tool-result", toolCallId: "call_1", toolName: "weather", output: { type: "text", value: "snowy" } }] },
  { role: "assistant", content: asked[3].content },
  { role: "user", content: asked[4].content },
]
const weatherTool = (made) => tool({ description: "The weather of a city.", inputSchema: City, execute: ({ city }) => (made.push(city), "sunny") })

check("ai", "`generateObject`, `streamObject`", async () => {
  Person.parse((await generateObject({ ...fairly, schema: Person, prompt: "A person." })).object)
  const stream = streamObject({ ...fairly, schema: Person, prompt: "A person.", onError: ({ error }) => { throw error } })
  for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object")
  Person.parse(await stream.object)
})

check("ai", "`generateText` with `Output.object`", async () => {
  Person.parse((await generateText({ ...fairly, output: Output.object({ schema: Person }), prompt: "A person." })).output)
})

check("ai", "`toolChoice`: required and by name, `generateText`, `streamText`", async () => {
  for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
    const body = { ...fairly, tools: { weather: tool({ inputSchema: City }) }, toolChoice, prompt: "Rome.", providerOptions: { nanoengine: { parallel_tool_calls: false } } }
    const whole = await generateText(body)
    const stream = streamText({ ...body, onError: ({ error }) => { throw error } })
    for (const [calls, reason] of [[whole.toolCalls, whole.finishReason], [await stream.toolCalls, await stream.finishReason]]) {
      assert.equal(reason, "tool-calls")
      assert.equal(calls.length, 1)
      City.parse(calls[0].input)
    }
  }
})

check("ai", "`generateText`, `streamText`, `ToolLoopAgent` with a tool: call, result, answer (grammar)", async () => {
  const made = []
  const tools = { weather: weatherTool(made) }
  const body = { ...shortly, tools, stopWhen: isStepCount(3), messages: history }
  assert.equal((await generateText(body)).text, SAID)
  const stream = streamText(body)
  const types = new Set()
  for await (const part of stream.fullStream) types.add(part.type)
  for (const type of ["tool-input-start", "tool-call", "tool-result", "text-delta", "finish"]) assert(types.has(type), type)
  assert.equal(await stream.text, SAID)
  assert((await stream.totalUsage).outputTokens > 0)
  const agent = new ToolLoopAgent({ ...shortly, tools })
  assert.equal((await agent.generate({ messages: history })).text, SAID)
  assert.deepEqual(made, ["Rome", "Rome", "Rome"])
})

// ---- the table

const table = process.argv[2]
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version
for (const { client, feature, run } of checks) {
  let result = "passed"
  try {
    await run()
  } catch (error) {
    result = `FAILED, ${String(error.stack ?? error).replaceAll(/\s+/g, " ").replaceAll("|", "/").slice(0, 500)}`
    process.exitCode = 1
  }
  const row = `| ${client} (npm) ${version(client)} | ${feature} | ${result} |`
  console.log(row)
  appendFileSync(table, `${row}\n`)
}
