// The page asks for a view of the engine four times a second, keeps the last minute of them, and shows it.
// Whatever comes from the server or from the model gets into the page as text, never as HTML.

import { counted, minute, owns, take } from "./minute.js";
import { drawCurve, drawLane, drawLegend, drawMap, readColours } from "./pictures.js";
import { ask, key, problemOf } from "./server.js";
import { findModel, sendOrStop, tryOrStop } from "./talk.js";
import { lengthsOf, nameOf, number, percent, plural, tellBlock, tellMap, tellRequest, tellStory } from "./words.js";

const POLL = 250; // milliseconds between two views
const GONE_POLL = 1500; // while the server does not answer
const LONG_STEP = 2000; // milliseconds until the page says that it waits
const MAX_LANES = 64;
const REST = 3; // seconds before a lane is given to another request
const STORY = 2.5; // seconds that a sentence stays at least

const $ = (id) => document.getElementById(id);
const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const setLabel = (element, text) => { if (element.ariaLabel !== text) element.ariaLabel = text; };

// ---- one view after the other

async function poll() {
  let wait = POLL;
  if (document.visibilityState === "visible") {
    const view = await askForView();
    if (view) {
      if ($("connection").dataset.is !== "live") findModel().catch(() => {}); // it shows at the next view if the server is gone
      tellConnection("live", "live");
      findLanes(take(view, performance.now() / 1000));
      draw();
    } else if ($("connection").dataset.is === "locked") return; // the key begins it again
    else wait = GONE_POLL;
  }
  setTimeout(poll, wait);
}

/** A view; null if there is none, and the page says why. */
async function askForView() {
  const timer = setTimeout(() => tellConnection("busy", "in a long step"), LONG_STEP); // a view comes between two steps
  try {
    const response = await ask("view", { signal: AbortSignal.timeout(60_000) });
    if (response.ok) return await response.json();
    if (response.status === 401) tellConnection("locked", "wants a key");
    else tellConnection("gone", await problemOf(response));
  } catch {
    tellConnection("gone", "no answer, trying again");
  } finally {
    clearTimeout(timer);
  }
  return null;
}

function tellConnection(state, words) {
  document.body.dataset.is = $("connection").dataset.is = state;
  setText($("connection"), words);
}

// ---- lanes: a request keeps its own, and it is used again later, so that nothing moves under the pointer

let lanes = []; // {element, name, canvas, lengths, requests}

function findLanes(requests) {
  for (const lane of lanes) lane.requests = lane.requests.filter((request) => minute.requests.has(request.key));
  for (const request of requests) {
    let lane = lanes.find(isFree);
    if (!lane && lanes.length < MAX_LANES) lanes.push((lane = makeLane()));
    lane?.requests.push(request);
  }
  while (lanes.length && !lanes.at(-1).requests.length) lanes.pop().element.remove();
}

function isFree({ requests }) {
  const last = requests.at(-1);
  return !last || (!last.isLive && minute.at - last.endedAt > REST);
}

function makeLane() {
  const make = (tag, name) => Object.assign(document.createElement(tag), { className: name });
  const element = Object.assign(make("button", "lane"), { type: "button" });
  const lane = { element, name: make("span", "name"), canvas: make("canvas", ""), lengths: make("span", "lengths"), requests: [] };
  element.append(lane.name, lane.canvas, lane.lengths);
  const focus = () => ({ request: lane.requests.at(-1)?.key });
  element.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") point(focus()); });
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("click", () => choose(focus()));
  $("lanes").append(element);
  return lane;
}

// ---- who is pointed at: {request: key} or {block: id}

let pointed = null; // is under the pointer
let chosen = null; // was tapped
const focus = () => pointed ?? chosen ?? {};
const isSame = (a, b) => a?.request === b?.request && a?.block === b?.block;
function point(at) { pointed = at; draw(); }
function choose(at) { chosen = isSame(chosen, at) ? null : at; draw(); }
const isFocused = (request) => focus().request === request.key || (focus().block && owns(request, focus().block));

// ---- everything that is shown

let numCells = 128; // of the map: grows with what was used, so that a large pool is no grey field
let grid = null; // where they are
let story = { text: "", at: -STORY };

function draw() {
  if (!minute.view) return;
  drawBlocks(minute.view);
  drawNumbers(minute.view);
  lanes.forEach(drawRow);
  $("nothing").hidden = lanes.length > 0;
  drawCurve($("decode-curve"), minute.history, "decode", minute.at);
  drawCurve($("prefill-curve"), minute.history, "prefill", minute.at);
}

function drawRow({ element, name, canvas, lengths, requests }) {
  drawLane(canvas, requests, minute.at);
  const last = requests.at(-1);
  if (!last) return;
  setText(name, nameOf(last.sequence));
  setText(lengths, lengthsOf(last));
  setLabel(element, tellRequest(last));
  element.classList.toggle("ended", !last.isLive);
  element.classList.toggle("focused", requests.some(isFocused));
  element.ariaPressed = String(chosen?.request === last.key);
}

function drawBlocks({ pool }) {
  while (numCells < pool.cells.length) numCells *= 2;
  const count = Math.min(numCells, pool.num_blocks);
  const request = minute.requests.get(focus().request);
  grid = { count, ...drawMap($("map"), pool.cells, count, new Set(request?.isLive ? request.sequence.blocks : []), focus().block) };
  setLabel($("map"), tellMap(minute.view));
  setText($("block-size"), String(pool.block_size));
  setText($("pool-size"), count < pool.num_blocks ? `the first ${number(count)} of ${number(pool.num_blocks)}` : plural(pool.num_blocks, "block"));
  const nothing = "Point at a block, or tap it, to see whose it is.";
  setText($("map-words"), focus().block ? tellBlock(focus().block) : request ? tellRequest(request) : nothing);
}

function drawNumbers(view) {
  const { pool, totals } = view;
  const { decode, prefill } = minute.history.at(-1);
  setText($("decode-rate"), number(Math.round(decode)));
  setText($("prefill-rate"), number(Math.round(prefill)));
  const queried = counted("num_queried_tokens");
  setText($("hit-rate"), queried ? percent(counted("num_hit_tokens"), queried) : percent(totals.num_hit_tokens, totals.num_queried_tokens));
  setText($("hit-words"), `of prompt tokens${queried ? ", last minute" : ""}`);
  setText($("pool-usage"), percent(pool.num_used, pool.num_blocks));
  setText($("pool-words"), `${plural(pool.num_used, "block")}, ${number(pool.num_cached)} cached`);
  setText($("preemptions"), number(totals.num_preemptions));
  $("speculation").hidden = totals.num_drafts === null;
  if (totals.num_drafts !== null) {
    setText($("acceptance"), percent(totals.num_accepted, totals.num_drafts));
    setText($("draft-words"), `of ${plural(totals.num_drafts, "guessed token")}`);
  }
  const queue = [`${number(view.num_running)} running`, `${number(view.num_waiting)} waiting`];
  if (view.num_fetching) queue.push(`${number(view.num_fetching)} fetching`);
  setText($("queue"), queue.join(", "));
  if (minute.at - story.at >= STORY) story = { text: tellStory(view), at: minute.at };
  setText($("story"), story.text);
}

// ---- the map, under a pointer and under the arrow keys

function blockAt({ offsetX, offsetY }) {
  if (!grid) return null;
  const [column, row] = [Math.floor(offsetX / grid.size), Math.floor(offsetY / grid.size)];
  const block = row * grid.columns + column + 1;
  return column >= 0 && column < grid.columns && block >= 1 && block <= grid.count ? { block } : null;
}

function moveByKey(event) {
  if (!grid) return;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  if (event.key === "Escape") chosen = null;
  else if (step) {
    const block = chosen?.block ? chosen.block + step : 1;
    if (block >= 1 && block <= grid.count) chosen = { block };
    event.preventDefault();
  }
  draw();
}

// ---- begin

key.onWanted = () => {
  setText($("key-words"), key.value ? "The server does not take that key." : "This server wants an API key. It stays in this tab.");
  $("key-form").hidden = false;
};

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("key").value.trim();
  $("key").value = "";
  $("key-form").hidden = true;
  if (document.body.dataset.is === "locked") poll();
  else findModel().catch(() => {});
});
$("try").addEventListener("click", tryOrStop);
$("chat-form").addEventListener("submit", sendOrStop);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if ($("send").textContent === "Send") $("chat-form").requestSubmit();
});
$("map").addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(blockAt(event)); });
$("map").addEventListener("pointerleave", () => point(null));
$("map").addEventListener("click", (event) => { const at = blockAt(event); if (at) choose(at); });
$("map").addEventListener("keydown", moveByKey);

function redraw() {
  readColours();
  drawLegend();
  draw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
redraw();
poll();
