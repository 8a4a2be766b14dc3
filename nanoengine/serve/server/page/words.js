// Every sentence that the page makes.

import { counted, minute, ownersOf } from "./minute.js";

export const number = (count) => count.toLocaleString("en");
export const plural = (count, word, words = `${word}s`) => `${number(count)} ${count === 1 ? word : words}`;

/** 0% is none, and 100% all. */
export function percent(part, whole) {
  if (!whole) return "–";
  if (part && 100 * part < whole) return "<1%";
  return part < whole && 100 * part > 99 * whole ? ">99%" : `${Math.round((100 * part) / whole)}%`;
}

const others = new Map(); // id -> number, of requests whose ids nobody can read

/** A name that can be read: "chat 3" and "try 2" are of a page; others have the name that their client gave, or a number. */
export function nameOf({ request_id: id, index }) {
  const own = id.match(/^(?:chat)?cmpl-(chat|try)-(\d+)-\w+-(\d+)-[0-9a-f]{8}$/);
  const given = id.replace(/^[a-z]+-/, "").replace(/-\d+-[0-9a-f]{8}$/, "");
  const name = own ? `${own[1]} ${own[1] === "try" ? Number(own[3]) + 1 : own[2]}` : /[0-9a-f]{16}|[0-9a-f]{8}-/.test(given) ? numbered(id) : given.slice(0, 24);
  return index ? `${name}.${index + 1}` : name;
}

function numbered(id) {
  if (!others.has(id)) others.set(id, others.size + 1);
  return `other ${others.get(id)}`;
}

const DOES = {
  waiting: "waits for room",
  decode: "generates",
  preempted: "was preempted and waits for blocks",
  fetching: "waits for files",
};

export function tellRequest({ sequence: s, isLive }) {
  const hit = s.num_cached ? `, ${number(s.num_cached)} of them found in the cache` : "";
  const preempted = s.num_preemptions ? `, preempted ${plural(s.num_preemptions, "time")}` : "";
  const blocks = isLive ? `, ${plural(s.num_blocks, "block")}` : "";
  const does = !isLive ? "has ended" : s.state === "prefill" ? `has computed ${number(s.num_computed)} of its prompt` : DOES[s.state];
  return `${nameOf(s)} ${does}: ${plural(s.num_prompt, "prompt token")}${hit}, ${number(s.num_output)} generated${blocks}${preempted}.`;
}

export function tellBlock(block) {
  const owners = ownersOf(block).map((request) => nameOf(request.sequence));
  const more = owners.length > 6 ? ` and ${owners.length - 6} more` : "";
  const whose = owners.length ? owners.slice(0, 6).join(", ") + more : "requests that are not shown";
  switch (minute.view.pool.cells[block - 1]) {
    case "s": return `Block ${block} is shared by ${whose}: their tokens up to here are the same.`;
    case "f": return `Block ${block} is full, and of ${whose}. Who begins with the same tokens shares it.`;
    case "o": return `Block ${block} is being filled by ${whose}.`;
    case "c": return `Block ${block} is of nobody. What it holds is a hit for who begins alike, until its room is needed.`;
    default: return `Block ${block} is empty.`;
  }
}

export function tellMap({ pool }) {
  return `Map of the KV blocks: ${pool.num_used} in use, ${numShared(pool)} of them shared, ${pool.num_cached} cached, ${pool.num_free} empty.`;
}

const numShared = ({ cells }) => cells.split("s").length - 1;

export function tellQueue({ num_running: running, num_waiting: waiting, num_fetching: fetching }) {
  return `${number(running)} running, ${number(waiting)} waiting${fetching ? `, ${number(fetching)} fetching` : ""}`;
}

/** What is happening, in a sentence or two. */
export function tellStory(view) {
  const { pool, sequences, totals, num_running: running, num_waiting: waiting } = view;
  const count = (state) => sequences.filter((sequence) => sequence.state === state).length;
  const entries = sequences.flatMap((sequence) => sequence.blocks);
  const saved = entries.length - new Set(entries).size;
  const shared = numShared(pool);
  const drafts = totals.num_drafts === null ? "" : ", and those of its draft that are right";
  if (count("preempted")) return `The pool was full: ${plural(count("preempted"), "request")} gave way for those that came before. What was computed stays a hit until its room is taken.`;
  if (count("fetching")) return `${plural(count("fetching"), "request waits", "requests wait")} for K/V from files. The others go on meanwhile.`;
  if (waiting) return `${plural(running, "request runs", "requests run")}, ${number(waiting)} ${waiting === 1 ? "waits" : "wait"} for room.`;
  if (count("prefill")) return `${plural(count("prefill"), "prompt is", "prompts are")} being computed, many tokens in each step.`;
  if (shared) return `${plural(shared, "block is", "blocks are")} shared: requests that begin alike use the same K/V. Without that, they would need ${plural(saved, "more block", "more blocks")}.`;
  if (running === 1) return `One request generates: each step gives it one token${drafts}.`;
  if (running) return `${number(running)} requests generate together: each step gives every one of them a token${drafts}.`;
  if (counted("num_preemptions")) return "All have ended, those that had given way too: nothing that they had said was lost.";
  if (pool.num_cached) return `Nothing runs. ${plural(pool.num_cached, "block still holds", "blocks still hold")} K/V: a prompt that begins alike need not compute it again.`;
  return "Nothing runs. Say something, or try six requests that begin alike.";
}
