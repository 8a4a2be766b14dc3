// The chat: the conversation that is shown, and what is done with it.

import { answer } from "./answer.js";
import { begin, conversations, forget, keep, lastShown, latestFirst, noteShown, onChanges } from "./conversations.js";
import { $, make, makeButton, setText } from "./elements.js";
import { isEnter, makeEditor, makeMessage } from "./message.js";
import { model } from "./model.js";
import { fillSettings } from "./settings.js";

const SLOWEST = 5; // an answer is drawn again after as much rest as it takes to draw, times this

let current; // the conversation that is shown
let shown = []; // its messages: {message, element, show, finish}
let deleted = null; // the last one: it can come back
const answering = new Map(); // by conversation's id: who stops its answer

export function startChat() {
  show(lastShown() ?? begin());
  onChanges((id) => answering.has(id), (id) => {
    if (id === current.id && conversations.has(id)) show(conversations.get(id));
    else listChats();
  });
  $("new-chat").addEventListener("click", () => open(begin(current.settings)));
  $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", stop);
  $("message").addEventListener("keydown", (event) => {
    if (isEnter(event)) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !$("message").value) editLast(event);
  });
  $("chat").addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
  $("latest").addEventListener("click", () => { scrollToEnd(true); $("log").focus(); }); // the button is gone then
  $("log").addEventListener("scroll", tellPlace);
  addEventListener("pagehide", () => { for (const id of answering.keys()) if (conversations.has(id)) save(conversations.get(id)); });
}

// ---- what is shown

function show(conversation) {
  current = conversation;
  noteShown(conversation);
  shown = [];
  $("said").replaceChildren();
  conversation.messages.forEach(append);
  fillSettings(conversation.settings, save);
  refresh();
  scrollToEnd(true);
}

function open(conversation) {
  $("chats").hidePopover();
  show(conversation);
  $("message").focus();
}

function append(message) {
  const view = { message, ...makeMessage(message) };
  shown.push(view);
  $("said").append(view.element);
  return view;
}

/** Show what can be done by now. */
export function refresh() {
  const focused = document.activeElement;
  const isBusy = answering.has(current.id);
  shown.forEach((view, i) => {
    const isLast = i === shown.length - 1;
    view.finish(isBusy ? [] : actionsOf(view, isLast), isBusy && isLast);
  });
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("welcome").hidden = shown.length > 0;
  setText($("welcome-words"), model.hasTemplate ? "It answers here. Conversations are kept in this browser." : "It has no chat template: it goes on with your text instead of answering it.");
  listChats();
  if (!focused.checkVisibility()) $("message").focus(); // it was on a button that is gone
}

function actionsOf({ message }, isLast) {
  if (message.role === "user") return [["Edit", () => edit(message)], ...(isLast ? [["Ask again", () => ask()]] : [])];
  if (!isLast) return [];
  const canContinue = message.content && message.ended !== "stop" && message.prompt + message.tokens < model.length;
  return [["Regenerate", regenerate], ...(canContinue ? [["Continue", () => ask(message)]] : [])];
}

function listChats() {
  const rows = latestFirst().map((conversation) => {
    const title = makeButton(conversation.title, () => open(conversation));
    if (conversation.id === current.id) title.ariaCurrent = "true";
    const remove = Object.assign(makeButton("×", () => drop(conversation)), { className: "remove", ariaLabel: `Delete ${conversation.title}` });
    return make("li", {}, title, remove);
  });
  if (deleted) rows.unshift(make("li", {}, makeButton("Deleted. Undo", () => { const back = deleted; deleted = null; keep(back); open(back); })));
  $("chat-list").replaceChildren(...rows);
}

function drop(conversation) {
  answering.get(conversation.id)?.abort();
  deleted = conversation;
  forget(conversation);
  if (conversation === current) show(lastShown() ?? begin(conversation.settings));
  else listChats();
  $("new-chat").focus();
}

function save(conversation = current) {
  try {
    keep(conversation);
    setText($("trouble"), "");
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    setText($("trouble"), "This browser has no room for more: delete a conversation, or this one is lost when the page closes.");
  }
}

// ---- what is done

function send() {
  const text = $("message").value;
  if (!text.trim() || answering.has(current.id)) return;
  $("message").value = "";
  deleted = null;
  say(text);
}

function say(text) {
  const message = { role: "user", content: text };
  current.messages.push(message);
  append(message);
  ask();
}

const stop = () => answering.get(current.id)?.abort();

/** Have the model answer, or go on with an answer of its own. */
async function ask(begun = null) {
  const conversation = current;
  const message = begun ?? { role: "assistant", content: "" };
  if (!begun) {
    conversation.messages.push(message);
    append(message);
  }
  const stopping = new AbortController();
  answering.set(conversation.id, stopping);
  save(conversation);
  refresh();
  scrollToEnd(true);
  $("message").focus();
  setText($("told"), "The model answers.");
  const draw = drawer(message);
  await answer(conversation, message, { isContinued: Boolean(begun), signal: stopping.signal, onNews: draw.soon });
  answering.delete(conversation.id);
  if (conversations.has(conversation.id)) save(conversation);
  const isAtEnd = atEnd();
  draw.now();
  refresh();
  scrollToEnd(isAtEnd);
  setText($("told"), `The answer has ended. ${message.error ?? message.content}`);
}

/** Draws a message that grows, as often as the browser can without being busy with it. */
function drawer(message) {
  let timer = null;
  let rest = 0;
  const now = () => {
    clearTimeout(timer);
    timer = null;
    const view = shown.find((view) => view.message === message);
    if (!view) return; // another conversation is shown
    const begun = performance.now();
    const isAtEnd = atEnd();
    view.show();
    if (message.tokens) view.element.classList.add("begun");
    if (isAtEnd) scrollToEnd(true);
    rest = SLOWEST * (performance.now() - begun);
  };
  return { now, soon: () => { timer ??= setTimeout(now, rest); } };
}

function regenerate() {
  cut(current.messages.length - 1);
  ask();
}

function cut(length) {
  current.messages.length = length;
  if (current.leftOut > length) current.leftOut = 0; // the model reads again what is left
  while (shown.length > length) shown.pop().element.remove();
}

function edit(message) {
  const index = current.messages.indexOf(message);
  const { element } = shown[index];
  const cancel = () => { form.replaceWith(element); $("message").focus(); };
  const { form, box } = makeEditor(message.content, { onCancel: cancel, onSend: (text) => { if (!answering.has(current.id)) { form.remove(); cut(index); say(text); } } });
  element.replaceWith(form);
  box.focus();
}

function editLast(event) {
  const last = current.messages.findLast(({ role }) => role === "user");
  if (!last || answering.has(current.id)) return;
  event.preventDefault();
  edit(last);
}

// ---- where the reader is

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 48;
const tellPlace = () => { $("latest").hidden = atEnd(); };

function scrollToEnd(isWanted) {
  if (isWanted) $("log").scrollTop = $("log").scrollHeight;
  tellPlace();
}
