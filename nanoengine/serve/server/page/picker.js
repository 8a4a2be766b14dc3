// The picker of models, where a server has several.

import { $, make, setText } from "./elements.js";
import { model, pickModel } from "./model.js";

/** `onLook` is called when the models and their states must be read again. */
export function startPicker(onLook) {
  const picker = $("picker");
  for (const event of ["pointerenter", "focus"]) picker.addEventListener(event, onLook);
  picker.addEventListener("change", () => { pickModel(picker.value); onLook(); });
}

export function showPicker() {
  const picker = $("picker");
  while (picker.childElementCount > model.entries.length) picker.lastChild.remove();
  while (picker.childElementCount < model.entries.length) picker.append(make("option"));
  model.entries.forEach(({ id, status }, i) => { // in their old elements: the list may be open
    picker.children[i].value = id;
    setText(picker.children[i], status && status.value !== "loaded" ? `${id} (${status.value})` : id);
  });
  picker.value = model.name;
  picker.hidden = model.entries.length < 2;
  $("model").hidden = !picker.hidden;
}
