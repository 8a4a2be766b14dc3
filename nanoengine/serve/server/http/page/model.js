// The model that answers, as the server describes it, and all others that it has.

import { ask, post } from "./server.js";

export const model = {
  name: "", // a server of one model needs none
  entries: [], // of all models: {id, status}; a server of one model gives no status
  isLoaded: true, // otherwise the first request loads it
  length: Infinity, // tokens of the longest conversation
  hasTemplate: true, // without one it can only go on with a text
  canThink: false,
  defaults: {}, // of sampling
};

const STORAGE = "nanoengine-model"; // the picked name
const NAMES = { repeat_penalty: "repetition_penalty" }; // Ollama's -> OpenAI's and ours

/** Read the list and the description of the picked model; returns the response that failed, if one did. */
export async function findModel() {
  const list = await ask("v1/models");
  if (!list.ok) return list;
  const { data } = await list.json();
  const entries = data.filter(({ status, parent }, i) => !i || status || parent); // the others are more names of the first
  const picked = sessionStorage.getItem(STORAGE);
  const isLoaded = ({ status }) => (status?.value ?? "loaded") === "loaded";
  const entry = entries.find(({ id }) => id === (picked ?? model.name)) ?? entries.find(isLoaded) ?? entries[0];
  const response = await post("api/show", { model: entry.id });
  if (picked !== sessionStorage.getItem(STORAGE)) return null; // another was picked meanwhile, and its description comes
  Object.assign(model, { entries, name: entry.id, length: entry.max_model_len ?? Infinity, isLoaded: isLoaded(entry) });
  if (!response.ok) return response;
  const { parameters, template, capabilities } = await response.json();
  const defaults = parameters.split("\n").filter(Boolean).map((line) => line.split(/\s+/));
  Object.assign(model, {
    hasTemplate: Boolean(template), canThink: capabilities.includes("thinking"),
    defaults: Object.fromEntries(defaults.map(([name, value]) => [NAMES[name] ?? name, value])),
  });
  return null;
}

/** Requests go to the model of this name from now on. */
export function pickModel(name) {
  sessionStorage.setItem(STORAGE, name);
  model.name = name;
}
