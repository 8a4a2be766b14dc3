// What the server tells of its model.

import { ask, post } from "./server.js";

export const model = {
  name: "", // a server of one model needs none
  length: Infinity, // tokens of the longest conversation
  hasTemplate: true, // without one it can only go on with a text
  canThink: false,
  defaults: {}, // of sampling
};

const NAMES = { repeat_penalty: "repetition_penalty" }; // Ollama's -> OpenAI's and ours

/** Look; returns the response that failed, if one did. */
export async function findModel() {
  const list = await ask("v1/models");
  if (!list.ok) return list;
  const [{ id, max_model_len: length }] = (await list.json()).data;
  const response = await post("api/show", { model: id });
  if (!response.ok) return response;
  const { parameters, template, capabilities } = await response.json();
  const defaults = parameters.split("\n").filter(Boolean).map((line) => line.split(/\s+/));
  Object.assign(model, {
    name: id, length, hasTemplate: Boolean(template), canThink: capabilities.includes("thinking"),
    defaults: Object.fromEntries(defaults.map(([name, value]) => [NAMES[name] ?? name, value])),
  });
  return null;
}
