// The conversations, kept in this browser: each under a key of its own, so that two tabs do not write over each other's.

const PREFIX = "nanoengine-chat-";
const SHOWN = "nanoengine-shown"; // in this tab

export const conversations = new Map(); // by id: {id, title, at, settings, messages}

for (const key of Object.keys(localStorage)) read(key);

function read(key) {
  if (!key.startsWith(PREFIX)) return;
  const conversation = JSON.parse(localStorage.getItem(key));
  if (conversation) conversations.set(conversation.id, conversation);
  else conversations.delete(key.slice(PREFIX.length));
}

/** Call back when another tab has changed one; one that is `busy` here stays as it is. */
export function onChanges(isBusy, callback) {
  addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(PREFIX) || isBusy(key.slice(PREFIX.length))) return;
    read(key);
    callback(key.slice(PREFIX.length));
  });
}

export const latestFirst = () => [...conversations.values()].sort((a, b) => b.at - a.at);
export const lastShown = () => conversations.get(sessionStorage.getItem(SHOWN)) ?? latestFirst()[0];
export const noteShown = ({ id }) => sessionStorage.setItem(SHOWN, id);

/** One that is kept once something is said in it. */
export function begin(settings = {}) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "New chat", at: Date.now(), settings: { ...settings }, messages: [] };
}

/** Keep one as it is now. Raises QuotaExceededError if the browser has no room. */
export function keep(conversation) {
  const first = conversation.messages[0]?.content.trim().split("\n")[0];
  if (!first) return;
  Object.assign(conversation, { title: first.slice(0, 80), at: Date.now() });
  conversations.set(conversation.id, conversation);
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function forget({ id }) {
  conversations.delete(id);
  localStorage.removeItem(PREFIX + id);
}
