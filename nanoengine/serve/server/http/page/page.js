// The page begins: the chat, the engine's view beside it, and the key that a server may want.

import { refresh, startChat } from "./chat.js";
import { startEngine, watch } from "./engine.js";
import { $, setText } from "./elements.js";
import { findModel, model } from "./model.js";
import { showPicker, startPicker } from "./picker.js";
import { key, problemOf } from "./server.js";
import { startSettings, tellSettings } from "./settings.js";

/** Read which models there are, and show it. */
async function refreshModels() {
  const failed = await findModel().catch(() => null); // the view says if the server is gone
  if (failed?.status === 401) {
    setText($("key-words"), key.value ? "The server does not take that key." : "This server wants an API key. It stays in this tab.");
    $("key-form").hidden = false;
    return;
  }
  if (failed) setText($("trouble"), (await problemOf(failed)).message);
  for (const id of ["model", "welcome-name"]) setText($(id), model.name);
  showPicker();
  tellSettings();
  refresh();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("key").value.trim();
  $("key").value = "";
  $("key-form").hidden = true;
  $("message").focus();
  watch(refreshModels);
});

startSettings();
startPicker(refreshModels);
startChat(() => { if (!model.isLoaded) refreshModels(); });
startEngine();
watch(refreshModels);
