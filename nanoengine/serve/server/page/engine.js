// The engine's view: the page asks for one four times a second, keeps the last minute of them, and shows it.

import { $, setText } from "./elements.js";
import { drawLanes, findLanes, tellMore } from "./lanes.js";
import { counted, minute, owns, take } from "./minute.js";
import { drawCurve, drawLegend, drawMap, readColours } from "./pictures.js";
import { ask, problemOf } from "./server.js";
import { tryOrStop } from "./try.js";
import { number, percent, plural, tellBlock, tellMap, tellQueue, tellRequest, tellStory } from "./words.js";

const POLL = 250; // milliseconds between two views
const GONE_POLL = 1500; // while the server does not answer
const LONG_STEP = 2000; // milliseconds until the page says that it waits
const MAX_CELLS = 2048; // of the map; the server tells of no more
const STORY = 2.5; // seconds that a sentence stays, while as many run and wait

let isPolling = false;

/** Ask for views from now on, until the server wants another key; `onBack` is called when it is there, at first and again. */
export async function watch(onBack) {
  if (isPolling) return;
  isPolling = true;
  for (;;) {
    let wait = POLL;
    if (document.visibilityState === "visible") {
      const view = await askForView();
      if (view === "refused") break; // a key begins it again
      if (!view) wait = GONE_POLL;
      else {
        if ($("connection").dataset.is !== "live") onBack();
        tellConnection("live", "live");
        findLanes(take(view, performance.now() / 1000), point, choose);
        draw();
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, wait); });
  }
  isPolling = false;
  onBack();
}

/** A view; null if there is none, and the page says why. */
async function askForView() {
  const timer = setTimeout(() => tellConnection("busy", "in a long step"), LONG_STEP); // a view comes between two steps
  try {
    const response = await ask("view", { signal: AbortSignal.timeout(60_000) });
    if (response.ok) return await response.json();
    const problem = (await problemOf(response)).message;
    tellConnection(response.status === 401 ? "locked" : "gone", response.status === 401 ? "wants a key" : problem);
    if (response.status === 401) setText($("story"), `The engine's view is closed: ${problem}.`);
    return response.status === 401 ? "refused" : null;
  } catch {
    tellConnection("gone", "no answer, trying again");
    return null;
  } finally {
    clearTimeout(timer);
  }
}

function tellConnection(state, words) {
  document.body.dataset.is = $("connection").dataset.is = state;
  setText($("connection"), words);
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

let grid = null; // where the cells of the map are
let story = { text: "", at: -STORY, queue: "" };

function draw() {
  if (!minute.view) return;
  drawBlocks(minute.view);
  drawNumbers(minute.view);
  drawLanes(isFocused, chosen);
  drawCurve($("decode-curve"), minute.history, "decode", minute.at);
  drawCurve($("prefill-curve"), minute.history, "prefill", minute.at);
}

function drawBlocks({ pool }) {
  const count = Math.min(MAX_CELLS, pool.num_blocks);
  const request = minute.requests.get(focus().request);
  grid = { count, ...drawMap($("map"), pool.cells, count, new Set(request?.isLive ? request.sequence.blocks : []), focus().block) };
  $("map").ariaLabel = tellMap(minute.view);
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
  setText($("pool-usage"), percent(pool.num_used, pool.num_blocks));
  setText($("preemptions"), number(totals.num_preemptions));
  $("speculation").hidden = totals.num_drafts === null;
  if (totals.num_drafts !== null) setText($("acceptance"), percent(totals.num_accepted, totals.num_drafts));
  const queue = tellQueue(view);
  setText($("queue"), queue);
  if (queue !== story.queue || minute.at - story.at >= STORY) story = { text: tellStory(view), at: minute.at, queue };
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
    const row = Math.floor(((chosen?.block ?? 1) - 1) / grid.columns) * grid.size;
    const box = $("map-box");
    box.scrollTop = Math.min(Math.max(box.scrollTop, row + 2 * grid.size - box.clientHeight), row);
    event.preventDefault();
  }
  draw();
}

export function startEngine() {
  $("try").addEventListener("click", tryOrStop);
  $("lanes").addEventListener("scroll", tellMore);
  const map = $("map");
  map.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(blockAt(event)); });
  map.addEventListener("pointerleave", () => point(null));
  map.addEventListener("click", (event) => { const at = blockAt(event); if (at) choose(at); });
  map.addEventListener("keydown", moveByKey);
  $("legends").addEventListener("toggle", drawLegend);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  redraw();
}

function redraw() {
  readColours();
  drawLegend();
  draw();
}
