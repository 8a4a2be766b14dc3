// A message as it is shown: who speaks, what is said, and below it how it ended and what can be done.

import { make, makeButton, makeCopyButtons, number, plural, setText } from "./elements.js";
import { showMarkdown } from "./markdown.js";
import { model } from "./model.js";

/** An element for a message. `show` shows it as it is by now; `finish` shows what can be done. */
export function makeMessage(message) {
  const isUser = message.role === "user";
  const parts = { name: make("h3", { className: "unseen", textContent: isUser ? "You" : "The model" }), text: make("div", { className: "text" }), foot: make("footer") };
  const element = make("article", { className: `message ${message.role}` }, ...Object.values(parts));
  const show = () => {
    if (isUser) return setText(parts.text, message.content);
    if (message.thought) showThought(element, message);
    return showMarkdown(parts.text, message.content);
  };
  const finish = (actions, isAnswering) => {
    element.classList.toggle("answering", isAnswering);
    const words = isUser ? "" : isAnswering ? (message.tokens ? "" : model.isLoaded ? "Reads …" : `Waits for ${model.name} to load …`) : tellEnd(message);
    const end = make("p", { className: message.error ? "error" : "", textContent: words });
    const copy = message.content ? makeCopyButtons(() => message.content) : [];
    parts.foot.replaceChildren(end, ...(isAnswering ? [] : [...copy, ...actions.map(([name, act]) => makeButton(name, act))]));
  };
  show();
  return { element, show, finish };
}

function showThought(element, { thought, content, ended }) {
  let fold = element.querySelector("details");
  if (!fold) {
    fold = make("details", {}, make("summary"), make("div", { tabIndex: 0, role: "group", ariaLabel: "Thoughts" }));
    element.querySelector(".text").before(fold);
  }
  setText(fold.firstChild, content || ended ? "Thoughts" : "Thinking …");
  setText(fold.lastChild, thought.trim());
}

/** Why an answer ended, and what it took. */
function tellEnd({ content, ended, error, called, tokens = 0, prompt, cached, rate, wait, leftOut }) {
  const isFull = prompt + tokens >= model.length;
  const why = error ?? {
    stop: content ? "Complete" : "Ended without a word",
    length: isFull ? `The context of ${number(model.length)} tokens is full` : "Cut at the limit",
    stopped: content ? "Stopped" : "Stopped before the first word",
    tool_calls: `Calls ${called}, which this page does not have`,
    abort: "Ended by the server",
    lost: "The stream broke off",
  }[ended] ?? ended ?? "Unfinished";
  const facts = [why];
  if (tokens) facts.push(plural(tokens, "token"));
  if (rate) facts.push(`${number(Math.round(rate))} tok/s`);
  if (wait) facts.push(`first after ${wait.toFixed(2)} s`);
  if (prompt && cached !== null) facts.push(`${number(cached)} of ${plural(prompt, "prompt token was", "prompt tokens were")} cached`);
  if (leftOut) facts.push(`the context is full: the first ${plural(leftOut, "message of this chat is", "messages of this chat are")} no longer read`);
  return facts.join(" · ");
}
