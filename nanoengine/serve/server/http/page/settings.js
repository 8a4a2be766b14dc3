// How a conversation is answered: its system prompt and its sampling. An empty field means what the model's makers advise.

import { $ } from "./elements.js";
import { model } from "./model.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];

let settings = {}; // of the conversation that is shown: only what differs
let changed = () => {};

export function startSettings() {
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("settings-form").addEventListener("input", take);
  $("reset").addEventListener("click", () => {
    for (const field of $("settings-form").querySelectorAll("input, textarea")) field.value = "";
    $("think").checked = true;
    take();
  });
}

/** Show the settings of a conversation; `onChange` is called when they change. */
export function fillSettings(ofConversation, onChange) {
  settings = ofConversation;
  changed = onChange;
  $("system").value = settings.system ?? "";
  $("think").checked = !settings.noThinking;
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  tellSettings();
}

/** Show what an empty field means, and whether one is not empty. */
export function tellSettings() {
  for (const name of NUMBERS) $(name).placeholder = model.defaults[name] ?? { max_tokens: "as many as fit", repetition_penalty: "1", temperature: "1", top_p: "1", top_k: "all", min_p: "0" }[name];
  $("think-row").hidden = !model.canThink;
  $("open-settings").textContent = Object.keys(settings).length ? "Settings (changed)" : "Settings";
}

function take() {
  for (const name of Object.keys(settings)) delete settings[name];
  if ($("system").value.trim()) settings.system = $("system").value;
  if (!$("think").checked) settings.noThinking = true;
  for (const name of NUMBERS) if ($(name).value && $(name).checkValidity()) settings[name] = Number($(name).value);
  tellSettings();
  changed();
}
