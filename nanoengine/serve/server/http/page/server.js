// What the page says to the server, and how it reads the answers.

const storage = "nanoengine-key";

/** The API key: of this tab only. */
export const key = {
  get value() { return sessionStorage.getItem(storage) ?? ""; },
  set value(text) { sessionStorage.setItem(storage, text); },
};

export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  return reached(fetch(path, { ...options, headers }));
}

/** What a server sends, or an Error in plain words: each browser has its own for a server that is gone, all in a TypeError. */
async function reached(sent) {
  try {
    return await sent;
  } catch (error) {
    throw error instanceof TypeError ? new Error("The server does not answer") : error;
  }
}

export function post(path, body, signal) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
}

/** Ask for a stream of events; an answer that is none is an Error, with the server's words. */
export async function stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true }, signal);
  if (!response.ok) throw await problemOf(response);
  return events(response);
}

/** What a response that is none says, as an Error with the server's code. */
export async function problemOf(response) {
  const text = await reached(response.text());
  try {
    const { error, message } = JSON.parse(text);
    return Object.assign(new Error(error?.message ?? error ?? message ?? text), { code: error?.code });
  } catch {
    return new Error(text || `the server answers ${response.status}`);
  }
}

/** The JSON of each server-sent event, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? "the server reports an error");
      yield event;
    }
  }
}
