// What the page asks of the model: six requests that begin alike, and a conversation.

import { ask, stream } from "./server.js";
import { giveName } from "./words.js";

const $ = (id) => document.getElementById(id);
let model; // its name; a server of one model needs none

export async function findModel() {
  const response = await ask("v1/models");
  if (!response.ok) return;
  model = (await response.json()).data?.[0]?.id;
  $("model").textContent = model ?? "";
}

// ---- six requests that begin alike

const BEGINNING = `"""How a server of language models uses its memory.

Every token that a model has read leaves a key and a value in each layer. They are needed again for each token
that follows, so they are kept. They are kept in blocks of a few tokens, which may lie anywhere, as the pages of a
process do. A table for each request says which block comes when. Two requests that begin with the same tokens
need the same keys and values there, so their tables name the same blocks: they are computed and stored once. When a
request ends, its blocks are free, but what they hold can be found until somebody else needs the room.
"""

from collections import deque


class Pool:
    """Blocks that are handed out and taken back."""

    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.counts = [0] * num_blocks

`;
const ENDS = ["allocate(self, count)", "release(self, blocks)", "share(self, table)", "is_full(self)", "find(self, tokens)", "check(self)"];
const TRY = $("try").textContent;
let trying = null; // ends them

export async function tryOrStop() {
  if (trying) return trying.abort();
  trying = new AbortController();
  $("try").textContent = "Stop them";
  const prompt = ENDS.map((end) => `${BEGINNING}    def ${end}:\n`);
  const body = { model, prompt, max_tokens: 300, temperature: 0.8, ignore_eos: true };
  try {
    // In one call: browsers have six connections to a server, and the page needs one. Nobody reads what comes.
    for await (const event of await stream("v1/completions", body, trying.signal)) giveName(event.id, "try");
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  trying = null;
  $("try").textContent = TRY;
}

// ---- the conversation

const messages = [];
let answering = null; // ends the answer
let hasTemplate = true;

function say(who, text) {
  const element = document.createElement("p");
  element.className = `said ${who}`;
  element.textContent = text;
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
  return element;
}

export async function sendOrStop(event) {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = $("message").value;
  if (!text.trim()) return;
  answering = new AbortController();
  $("send").textContent = "Stop";
  $("message").value = "";
  say("user", text);
  messages.push({ role: "user", content: text });
  const answer = await listen(text, answering.signal);
  if (answer) messages.push({ role: "assistant", content: answer });
  else messages.pop(); // nobody has answered it
  answering = null;
  $("send").textContent = "Send";
}

/** Show an answer while it comes; returns what came of it. */
async function listen(text, signal) {
  const log = $("log");
  let element = null;
  try {
    for await (const event of await answerTo(text, signal)) {
      giveName(event.id, "chat");
      const choice = event.choices?.[0];
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      element ??= say("assistant", "");
      element.append(choice?.delta?.content ?? choice?.text ?? "");
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  if (element && !element.textContent) element.remove();
  return element?.textContent ?? "";
}

async function answerTo(text, signal) {
  const common = { model, max_tokens: 512 };
  if (hasTemplate) {
    try {
      return await stream("v1/chat/completions", { ...common, messages }, signal);
    } catch (error) {
      if (error.status !== 400 || !/template/i.test(error.message)) throw error;
      hasTemplate = false;
      say("note", "This model has no chat template: it goes on with your text instead of answering it.");
    }
  }
  return stream("v1/completions", { ...common, prompt: text }, signal);
}
