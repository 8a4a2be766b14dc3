// One answer: what is asked of the model, and what comes of it, noted in the message that the conversation keeps.

import { model } from "./model.js";
import { stream } from "./server.js";

let numAnswers = 0; // of this page: the engine's view shows their names

const TOO_LONG = "context_length_exceeded"; // the server's code

/** The messages as a model takes them: who was not answered and spoke again has spoken once. The first may be left out. */
function turnsOf({ settings, messages, leftOut = 0 }) {
  const turns = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const { role, content } of messages.slice(leftOut)) {
    const last = turns.at(-1);
    if (!content) continue; // stopped before its first word
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  return turns;
}

function request(conversation) {
  const { system, noThinking, ...sampling } = conversation.settings;
  numAnswers += 1;
  const common = {
    model: model.name, ...sampling, request_id: `chat-${numAnswers}`,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (!model.hasTemplate) {
    common.max_tokens ??= model.length; // as many as fit; the interface says 16
    return ["v1/completions", { ...common, prompt: conversation.messages.at(-2).content }];
  }
  if (noThinking) common.chat_template_kwargs = { enable_thinking: false };
  return ["v1/chat/completions", { ...common, messages: turnsOf(conversation) }];
}

/** Leave out the older half of the turns that a model still reads; whether there were any before the last. */
function leaveOutOldest(conversation) {
  const { messages, leftOut = 0 } = conversation;
  const starts = [...messages.keys()].filter((i) => i > leftOut && messages[i].role === "user");
  if (!model.hasTemplate || !starts.length) return false;
  conversation.leftOut = starts[Math.floor((starts.length - 1) / 2)];
  return true;
}

/** The stream of an answer, to as many of the last turns as the model's context holds. */
async function begin(conversation, message, signal) {
  const { leftOut } = conversation;
  for (;;) {
    try {
      const events = await stream(...request(conversation), signal);
      if (conversation.leftOut !== leftOut) message.leftOut = conversation.leftOut;
      return events;
    } catch (error) {
      if (error.code === TOO_LONG && leaveOutOldest(conversation)) continue;
      conversation.leftOut = leftOut; // leaving out did not help
      throw error;
    }
  }
}

/** Have the model answer a conversation; `message` takes what it says, and is the last of it once it says something. */
export async function answer(conversation, message, signal, onNews) {
  const times = { begun: performance.now(), first: null, last: null };
  let before = 0; // tokens that had come with the first piece
  Object.assign(message, { ended: null, error: null, tokens: 0, prompt: null, cached: null, rate: null });
  try {
    for await (const event of await begin(conversation, message, signal)) {
      const { usage, choices: [choice] } = event;
      const text = choice?.delta?.content ?? choice?.text;
      const thought = choice?.delta?.reasoning_content;
      if (usage?.completion_tokens) {
        times.last = performance.now();
        times.first ??= times.last;
        before ||= usage.completion_tokens;
        message.tokens = usage.completion_tokens;
      }
      if (thought) message.thought = (message.thought ?? "") + thought;
      if (text) message.content += text;
      for (const call of choice?.delta?.tool_calls ?? []) message.called = call.function.name ?? message.called;
      if (choice?.finish_reason) message.ended = choice.finish_reason;
      if (usage) message.prompt = usage.prompt_tokens;
      if (usage?.prompt_tokens_details) message.cached = usage.prompt_tokens_details.cached_tokens;
      if (message.tokens > before) message.rate = (1000 * (message.tokens - before)) / (times.last - times.first);
      onNews();
    }
    message.ended ??= "lost";
  } catch (error) {
    message.ended = signal.aborted ? "stopped" : "error";
    if (!signal.aborted) message.error = error.message;
  }
  if (times.first) message.wait = (times.first - times.begun) / 1000;
}
