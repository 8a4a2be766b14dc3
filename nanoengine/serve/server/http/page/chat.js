// The chat: a conversation, which this tab keeps, and what is done with it.

import { answer } from "./answer.js";
import { $, setText } from "./elements.js";
import { makeMessage } from "./message.js";
import { model } from "./model.js";
import { followEnd, scrollToEnd } from "./scroll.js";
import { fillSettings } from "./settings.js";

const STORAGE = "nanoengine-chat";
const REST = 100; // milliseconds between two drawings of an answer

const conversation = JSON.parse(sessionStorage.getItem(STORAGE)) ?? { settings: {}, messages: [] };
let shown = []; // of each message: {message, element, show, finish}
let stopping = null; // ends the answer that comes
let onAnswered = () => {};
let edited = null; // the index of the message that the next one replaces, with all behind it

/** `onEnd` is called when an answer has ended. */
export function startChat(onEnd) {
  onAnswered = onEnd;
  conversation.messages.forEach(append);
  fillSettings(conversation.settings, save);
  $("new-chat").addEventListener("click", beginNewChat);
  $("old-chat").addEventListener("click", undoNewChat);
  $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", stop);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !$("message").value) { event.preventDefault(); edit(conversation.messages.findLastIndex(({ role }) => role === "user")); }
  });
  $("chat").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    stop();
    if (edited !== null) $("message").value = "";
    edit(null);
  });
  addEventListener("pagehide", save);
  refresh();
  followEnd();
  scrollToEnd();
}

function beginNewChat() {
  stop();
  const { messages, leftOut } = conversation;
  if (messages.length) conversation.old = { messages: [...messages], leftOut };
  cut(0);
  save();
  refresh();
  $("message").focus();
}

function undoNewChat() {
  Object.assign(conversation, conversation.old);
  delete conversation.old;
  conversation.messages.forEach(append);
  save();
  refresh();
  scrollToEnd();
}

function append(message) {
  const view = { message, ...makeMessage(message) };
  shown.push(view);
  $("said").append(view.element);
}

/** Show what can be done by now. */
export function refresh() {
  const focused = document.activeElement;
  shown.forEach(({ message, element, finish }, i) => {
    const isLast = i === shown.length - 1;
    const actions = message.role === "user" ? [["Edit", () => edit(i)]] : isLast ? [["Regenerate", () => { cut(i); ask(); }]] : [];
    finish(stopping ? [] : actions, Boolean(stopping) && isLast);
    element.classList.toggle("replaced", edited !== null && i >= edited);
  });
  $("send").hidden = Boolean(stopping);
  $("stop").hidden = !stopping;
  $("welcome").hidden = shown.length > 0;
  $("old-chat").hidden = !conversation.old;
  setText($("welcome-words"), !model.isLoaded ? "It is loaded when you write to it." : model.hasTemplate ? "It answers here." : "It has no chat template: it goes on with your text instead of answering it.");
  if (!focused.checkVisibility()) $("message").focus(); // it was on a button that is gone
}

function save() {
  try {
    sessionStorage.setItem(STORAGE, JSON.stringify(conversation));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    setText($("trouble"), "The browser has no room for more: this conversation is lost when the page is left.");
  }
}

function send() {
  const text = $("message").value;
  if (!text.trim() || stopping) return;
  $("message").value = "";
  if (edited !== null) cut(edited);
  delete conversation.old;
  say({ role: "user", content: text });
  ask();
}

const stop = () => stopping?.abort();

function say(message) {
  conversation.messages.push(message);
  append(message);
}

async function ask() {
  const message = { role: "assistant", content: "" };
  say(message);
  stopping = new AbortController();
  setText($("trouble"), "");
  save();
  refresh();
  scrollToEnd();
  $("message").focus();
  let timer = null;
  const draw = () => {
    timer = null;
    const view = shown.find((each) => each.message === message);
    view?.show();
    view?.element.classList.toggle("begun", message.tokens > 0);
  };
  await answer(conversation, message, stopping.signal, () => { timer ??= setTimeout(draw, REST); });
  clearTimeout(timer);
  stopping = null;
  save();
  draw();
  refresh();
  setText($("announced"), `The answer has ended. ${message.error ?? message.content}`);
  onAnswered();
}

function cut(length) {
  conversation.messages.length = length;
  if (conversation.leftOut > length) conversation.leftOut = 0; // the model reads again what is left
  while (shown.length > length) shown.pop().element.remove();
  edited = null;
}

/** Write a message anew, in the place of its first words; null: do not. */
function edit(index) {
  if (stopping || index === -1) return;
  if (index !== null) $("message").value = conversation.messages[index].content;
  edited = index;
  refresh();
  $("message").focus();
}
