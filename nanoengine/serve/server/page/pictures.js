// Everything that is drawn: bars, curves, cells. Each state and each kind of block has a form of its own, not only a colour.

import { MINUTE } from "./minute.js";

const NAMES = ["line", "ink", "waiting", "prefill", "decode", "preempted", "fetching", "empty", "cached", "open", "full", "shared"];
const CELLS = { ".": "empty", c: "cached", o: "open", f: "full", s: "shared" };
const CELL = 12; // pixels; it never changes, so that a block stays where it is

let colours = {};

/** Take the colours from the style sheet: it knows whether it is dark. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** A cleared context in CSS pixels, and the size. */
function open(canvas) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

/** The bars of some requests, one after the other in the same lane. */
export function drawLane(canvas, requests, at) {
  const [context, width, height] = open(canvas);
  const xOf = (time) => width * Math.max(0, 1 - (at - time) / MINUTE);
  context.fillStyle = colours.line;
  context.fillRect(0, height - 1, width, 1);
  for (const { bars, isLive } of requests) {
    context.globalAlpha = isLive ? 1 : 0.65;
    for (const bar of bars) drawBar(context, bar.state, xOf(bar.from), Math.max(xOf(bar.to) - xOf(bar.from), 2), height - 1);
  }
  context.globalAlpha = 1;
}

function drawBar(context, state, x, width, height) {
  context.fillStyle = context.strokeStyle = colours[state];
  if (state === "prefill") context.fillRect(x, 1, width, height - 2);
  else if (state === "decode") context.fillRect(x, height * 0.25, width, height * 0.5);
  else if (state === "waiting") context.fillRect(x, height / 2 - 1, width, 2);
  else if (state === "fetching") {
    for (let dot = Math.ceil(x / 6) * 6; dot < x + width; dot += 6) context.fillRect(dot, height / 2 - 2, 3, 4);
  } else hatch(context, x, height * 0.2, width, height * 0.6);
}

function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let line = Math.floor(x / 5) * 5 - height; line < x + width; line += 5) {
    context.moveTo(line, y + height);
    context.lineTo(line + height, y);
  }
  context.lineWidth = 1.75;
  context.stroke();
  context.restore();
}

/** A rate over the last minute, as high as the canvas at its highest. */
export function drawCurve(canvas, history, name, at) {
  const [context, width, height] = open(canvas);
  const most = Math.max(...history.map((past) => past[name]), 1);
  const xOf = (past) => width * (1 - (at - past.at) / MINUTE);
  context.beginPath();
  context.moveTo(xOf(history[0]), height);
  for (const past of history) context.lineTo(xOf(past), height - (past[name] / most) * (height - 4));
  context.lineTo(width, height);
  context.fillStyle = colours[name];
  context.globalAlpha = 0.35;
  context.fill();
  context.globalAlpha = 1;
}

/** The first `count` blocks; those of `own`, if it has any, stand out, and `marked` has a frame. Returns the grid. */
export function drawMap(canvas, cells, count, own, marked) {
  const columns = Math.max(1, Math.floor(canvas.clientWidth / CELL));
  const high = `${Math.ceil(count / columns) * CELL}px`;
  if (canvas.style.height !== high) canvas.style.height = high;
  const [context] = open(canvas);
  for (let i = 0; i < count; i += 1) {
    const [x, y] = [(i % columns) * CELL, Math.floor(i / columns) * CELL];
    context.globalAlpha = own.size && !own.has(i + 1) ? 0.22 : 1;
    drawCell(context, cells[i] ?? ".", x, y, CELL);
    if (marked === i + 1) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(x, y, CELL - 2, CELL - 2);
    }
  }
  context.globalAlpha = 1;
  return { size: CELL, columns };
}

function drawCell(context, kind, x, y, size) {
  const side = size - 2;
  context.fillStyle = context.strokeStyle = colours[CELLS[kind]];
  context.lineWidth = 1;
  if (kind === "." || kind === "o") context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  if (kind === "o") context.fillRect(x, y + side / 2, side, side / 2);
  if ("cfs".includes(kind)) context.fillRect(x, y, side, side);
  if (kind === "s") context.clearRect(x + side * 0.36, y + side * 0.36, side * 0.28, side * 0.28);
}

/** The signs of the legends, drawn as what they explain. */
export function drawLegend() {
  for (const sign of document.querySelectorAll("#legends i")) {
    if (!sign.firstChild) sign.append(document.createElement("canvas"));
    const [context, width, height] = open(sign.firstChild);
    if (sign.dataset.bar) drawBar(context, sign.dataset.bar, 0, width, height);
    else drawCell(context, sign.dataset.cell, 0, 0, height);
  }
}
