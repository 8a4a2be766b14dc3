// What the page says to the server, and how it reads the answers.

const storage = "nanoengine-key";

/** The API key: of this tab only. `onWanted` is called when the server wants one, or another. */
export const key = {
  onWanted: () => {},
  get value() { return sessionStorage.getItem(storage) ?? ""; },
  set value(text) { sessionStorage.setItem(storage, text); },
};

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) key.onWanted();
  return response;
}

/** Ask for a stream of events; an answer that is none is an Error, with the server's words and its `status`. */
export async function stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal });
  if (!response.ok) throw Object.assign(new Error(await problemOf(response)), { status: response.status });
  return events(response);
}

export async function problemOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.message ?? text;
  } catch {
    return text || `the server answers ${response.status}`;
  }
}

/** The JSON of each server-sent event, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
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
