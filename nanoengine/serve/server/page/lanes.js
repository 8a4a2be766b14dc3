// The requests of the last minute, each in a lane. A lane is used again later, so that nothing moves under the pointer.

import { $, make, setText } from "./elements.js";
import { minute } from "./minute.js";
import { drawLane } from "./pictures.js";
import { nameOf, number, plural, tellRequest } from "./words.js";

const MAX_LANES = 64;
const REST = 3; // seconds before a lane is given to another request

let lanes = []; // {element, cells, canvas, requests}

/** Give new requests their lanes. `point` and `choose` are told of whom the reader looks at. */
export function findLanes(requests, point, choose) {
  for (const lane of lanes) lane.requests = lane.requests.filter((request) => minute.requests.has(request.key));
  for (const request of requests) {
    let lane = lanes.find(isFree);
    if (!lane && lanes.length < MAX_LANES) lanes.push((lane = makeLane(point, choose)));
    lane?.requests.push(request);
  }
  while (lanes.length && !lanes.at(-1).requests.length) lanes.pop().element.remove();
}

function isFree({ requests }) {
  const last = requests.at(-1);
  return !last || (!last.isLive && minute.at - last.endedAt > REST);
}

function makeLane(point, choose) {
  const canvas = make("canvas");
  const cells = Array.from({ length: 4 }, () => make("span")); // name, prompt, cached, new
  const element = make("button", { type: "button", className: "lane" }, cells[0], canvas, ...cells.slice(1));
  const lane = { element, cells, canvas, requests: [] };
  const own = () => ({ request: lane.requests.at(-1)?.key });
  element.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") point(own()); });
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("click", () => choose(own()));
  $("lanes").append(element);
  return lane;
}

export function drawLanes(isFocused, chosen) {
  for (const { element, cells, canvas, requests } of lanes) {
    drawLane(canvas, requests, minute.at);
    const last = requests.at(-1);
    if (!last) continue;
    const { sequence } = last;
    const texts = [nameOf(sequence), number(sequence.num_prompt), number(sequence.num_cached ?? 0), number(sequence.num_output)];
    cells.forEach((cell, i) => setText(cell, texts[i]));
    element.ariaLabel = tellRequest(last);
    element.classList.toggle("ended", !last.isLive);
    element.classList.toggle("focused", requests.some(isFocused));
    element.ariaPressed = String(chosen?.request === last.key);
  }
  $("nothing").hidden = lanes.length > 0;
  tellMore();
}

/** How many lanes are out of sight. */
export function tellMore() {
  const box = $("lanes");
  const bottom = box.scrollTop + box.clientHeight;
  const below = lanes.filter(({ element }) => element.offsetTop + element.offsetHeight / 2 > bottom).length;
  setText($("more-lanes"), below ? `${plural(below, "more", "more")} below ↓` : "");
}
