// The engine at work: the page asks for its state four times a second, and shows numbers, requests and the map of KV blocks.

import { $, make, number, plural, setText } from "./elements.js";
import { model } from "./model.js";
import { ask, problemOf } from "./server.js";

const POLL = 250; // milliseconds between two views
const GONE_POLL = 1500; // while the server does not answer
const LONG_STEP = 2000; // milliseconds until the page says that it waits
const MAX_CELLS = 2048; // of the map; the server tells of no more

let isPolling = false;
let view = null; // the latest
let past = []; // views of the last second
let pointed = {}; // what is under the pointer: {request} or {block}

/** Ask for views until the server wants another key; `onNews` is called when the connection has another state, but for a lost one. */
export async function watch(onNews) {
  if (isPolling) return;
  isPolling = true;
  for (;;) {
    let wait = POLL;
    if (document.visibilityState === "visible") {
      const { state, words, view: next } = await askForView();
      const isNews = $("connection").dataset.is !== state;
      tellConnection(state, words);
      if (state === "locked") break; // a key begins it again
      if (isNews && state !== "gone") onNews();
      if (next) {
        past = past.filter(({ time }) => time <= next.time && next.time - time <= 1);
        past.push(view = next);
        draw();
      } else wait = GONE_POLL;
    }
    await new Promise((resolve) => { setTimeout(resolve, wait); });
  }
  isPolling = false;
  onNews();
}

/** The state of the connection, and a view of the model's engine where there is one. */
async function askForView() {
  const timer = setTimeout(() => tellConnection("busy", "in a long step"), LONG_STEP); // a view comes between two steps
  try {
    const response = await ask(`view?model=${encodeURIComponent(model.name)}`, { signal: AbortSignal.timeout(60_000) });
    if (response.ok) return { state: "live", words: "live", view: await response.json() };
    if (response.status === 401) return { state: "locked", words: "the engine's view wants a key" };
    return { state: "idle", words: model.name ? (await problemOf(response)).message : "connecting" };
  } catch {
    return { state: "gone", words: "no answer, trying again" };
  } finally {
    clearTimeout(timer);
  }
}

function tellConnection(state, words) {
  document.body.dataset.is = $("connection").dataset.is = state;
  setText($("connection"), words);
}

function draw() {
  if (!view) return;
  drawNumbers(view);
  drawRequests(view);
  drawBlocks(view);
}

function drawNumbers({ time, pool, totals, num_running: running, num_waiting: waiting, num_fetching: fetching }) {
  const rate = (name) => (time > past[0].time ? Math.max(0, Math.round((totals[name] - past[0].totals[name]) / (time - past[0].time))) : 0); // totals of a lost replica are gone
  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
  const texts = {
    "decode-rate": number(rate("decode_tokens")),
    "prefill-rate": number(rate("prefill_tokens")),
    "hit-rate": percent(totals.num_hit_tokens, totals.num_queried_tokens),
    "pool-usage": percent(pool.num_used, pool.num_blocks),
    preemptions: number(totals.num_preemptions),
    acceptance: percent(totals.num_accepted, totals.num_drafts),
    queue: `${number(running)} running, ${number(waiting)} waiting${fetching ? `, ${number(fetching)} fetching` : ""}`,
  };
  for (const [id, text] of Object.entries(texts)) setText($(id), text);
  $("speculation").hidden = totals.num_drafts === null;
}

const keyOf = ({ request_id: id, index }) => `${id} ${index}`;

/** A name: the beginning of the id that the client gave its call, the number of the prompt, and that of its completion. */
function nameOf({ request_id: id, index }) {
  const [, clientId, prompt] = id.match(/^[a-z]+[-_](.*)-(\d+)-[0-9a-f]{8}$/) ?? [id, id, "0"];
  return clientId.slice(0, 12) + (prompt === "0" ? "" : `-${prompt}`) + (index ? `.${index}` : "");
}

const isPointed = (sequence) => pointed.request === keyOf(sequence) || sequence.blocks.includes(pointed.block);

function drawRequests({ sequences }) {
  $("requests").replaceChildren(...sequences.map((sequence) => {
    const texts = [nameOf(sequence), sequence.state, number(sequence.num_prompt), number(sequence.num_cached ?? 0), number(sequence.num_output)];
    const row = make("tr", { className: isPointed(sequence) ? "pointed" : "" }, ...texts.map((text) => make("td", { textContent: text })));
    row.dataset.key = keyOf(sequence);
    return row;
  }));
  $("nothing").hidden = sequences.length > 0;
}

const KINDS = { ".": "empty", o: "being filled by", f: "full, and of", s: "shared by", c: "of nobody, and a hit for who begins alike" };

function drawBlocks({ pool, sequences }) {
  const map = $("map");
  const count = Math.min(MAX_CELLS, pool.num_blocks);
  while (map.childElementCount > count) map.lastChild.remove();
  while (map.childElementCount < count) map.append(make("i"));
  const pointedBlocks = new Set(sequences.find((sequence) => pointed.request === keyOf(sequence))?.blocks);
  const kindOf = (block) => pool.cells[block - 1] ?? ".";
  for (const [i, cell] of [...map.children].entries()) {
    if (cell.dataset.kind !== kindOf(i + 1)) cell.dataset.kind = kindOf(i + 1);
    cell.classList.toggle("other", pointedBlocks.size > 0 && !pointedBlocks.has(i + 1));
  }
  map.ariaLabel = `Map of the KV blocks: ${pool.num_used} in use, ${pool.num_cached} cached, ${pool.num_free} empty`;
  setText($("pool-size"), `${plural(pool.num_blocks, "block")} of ${plural(pool.block_size, "token")}`);
  const owners = sequences.filter((sequence) => sequence.blocks.includes(pointed.block)).map(nameOf).join(", ");
  const words = pointed.block ? `Block ${pointed.block} is ${KINDS[kindOf(pointed.block)]} ${owners}` : "Point at a request to see its blocks, or at a block to see whose it is.";
  setText($("map-words"), words);
}

export function startEngine() {
  const point = (at) => { pointed = at; draw(); };
  $("requests").addEventListener("pointerover", ({ target }) => point({ request: target.closest("tr")?.dataset.key }));
  $("map").addEventListener("pointerover", ({ target }) => { if (target !== $("map")) point({ block: [...$("map").children].indexOf(target) + 1 }); });
  for (const id of ["requests", "map"]) $(id).addEventListener("pointerleave", () => point({}));
}
