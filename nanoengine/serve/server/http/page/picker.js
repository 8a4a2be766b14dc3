// The picker of models, where a server has several.

import { $, make, setText } from "./elements.js";
import { model, pickModel } from "./model.js";

/** `onRefresh` is called when the models and their states must be read again. */
export function startPicker(onRefresh) {
  const picker = $("picker");
  for (const event of ["pointerenter", "focus"]) picker.addEventListener(event, onRefresh);
  picker.addEventListener("change", () => { pickModel(picker.value); onRefresh(); });
}

export function showPicker() {
  const picker = $("picker");
  const { entries } = model;
  if (picker.length !== entries.length) picker.replaceChildren(...entries.map(() => make("option")));
  entries.forEach(({ id, status }, i) => { // the elements stay: the list may be open
    picker[i].value = id;
    const state = status?.state ?? status?.value ?? "loaded";
    setText(picker[i], state === "loaded" ? id : `${id} (${state})`);
  });
  picker.value = model.name;
  picker.hidden = entries.length < 2;
  $("model").hidden = !picker.hidden;
}
