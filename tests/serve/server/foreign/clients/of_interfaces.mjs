// What people write with Anthropic's, OpenAI's (responses) and Ollama's packages of npm, at $SERVER_URL. Adds rows to TABLE.
// Usage: node of_interfaces.mjs TABLE, where @anthropic-ai/sdk, openai and ollama are installed.
import assert from "node:assert/strict";
import { appendFileSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

const require = createRequire(join(process.cwd(), "x.js"));
const load = async (name) => import(require.resolve(name));
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { default: OpenAI } = await load("openai");
const { Ollama } = await load("ollama");

const url = process.env.SERVER_URL ?? "http://127.0.0.1:8000";
const model = "smollm2";
const messages = [{ role: "user", content: "How is the weather in Rome?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const claude = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ollama = new Ollama({ host: url });

const checks = {
  "@anthropic-ai/sdk: text and a call, streamed": async () => {
    const own = { model, max_tokens: 60, messages, temperature: 0 };
    const whole = await claude.messages.create(own);
    const streamed = await claude.messages.stream(own).finalMessage();
    assert.deepEqual(streamed.content, whole.content);
    const tools = [{ name: "weather", input_schema: parameters }];
    const tool_choice = { type: "tool", name: "weather" };
    const made = await claude.messages.stream({ ...own, tools, tool_choice }).finalMessage();
    assert.equal(made.stop_reason, "tool_use");
    assert.ok(["Rome", "Oslo"].includes(made.content[0].input.city));
  },
  "openai: responses, streamed, and gone on with": async () => {
    const own = { model, input: messages[0].content, temperature: 0, max_output_tokens: 60 };
    const whole = await openai.responses.create(own);
    const streamed = await openai.responses.stream(own).finalResponse();
    assert.equal(streamed.output_text, whole.output_text);
    const tools = [{ type: "function", name: "weather", parameters, strict: true }];
    const input = [{ role: "user", content: own.input }, ...whole.output, { role: "user", content: "Rome?" }];
    const again = { ...own, input, tools, tool_choice: "required", parallel_tool_calls: false };
    const made = await openai.responses.create(again);
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(made.output[0].arguments).city));
  },
  "ollama: chat, streamed; format; list": async () => {
    const own = { model, messages, options: { temperature: 0, num_predict: 60 } };
    const whole = await ollama.chat(own);
    let text = "";
    for await (const part of await ollama.chat({ ...own, stream: true })) text += part.message.content;
    assert.equal(text, whole.message.content);
    const made = await ollama.generate({ model, prompt: "A city.", format: parameters, options: own.options });
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(made.response).city));
    assert.equal((await ollama.list()).models[0].model, model);
  },
  "openai: embeddings": async () => {
    const own = { model, input: ["a stack", "a queue"] };
    const floats = await openai.embeddings.create({ ...own, encoding_format: "float" });
    assert.deepEqual((await openai.embeddings.create(own)).data, floats.data);
  },
  "ollama: embed": async () => {
    const { embeddings } = await ollama.embed({ model, input: ["a stack", "a queue"] });
    assert.deepEqual((await ollama.embed({ model, input: "a queue" })).embeddings, [embeddings[1]]);
  },
};

const installed = (name) => JSON.parse(readFileSync(join("node_modules", name, "package.json"))).version;
for (const [name, run] of Object.entries(checks)) {
  const [packageName, feature] = name.split(": ");
  let result = "passed";
  try {
    await run();
  } catch (error) {
    result = `FAILED, ${String(error).replaceAll(/[\n|]/g, " ").slice(0, 500)}`;
    process.exitCode = 1;
  }
  const row = `| ${packageName} (npm) ${installed(packageName)} | ${feature} | ${result} |`;
  console.log(row);
  appendFileSync(process.argv[2], row + "\n");
}
