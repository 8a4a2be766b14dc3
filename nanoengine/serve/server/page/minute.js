// The last minute, from the views that came in it. Times are seconds of the browser's clock, but for `view.time`.

export const MINUTE = 60;
const MISSED = 3; // seconds without a view, of which nobody knows anything
const SUDDEN = 0.25; // seconds that a prompt is given that was computed between two views

export const minute = {
  view: null, // the latest
  at: 0, // when it came
  history: [], // of each view: when it came, its totals, and the rates of the second before
  requests: new Map(), // by id and index: {key, sequence, bars, isLive, endedAt}
};

/** Take a view in. Returns the requests that are new. */
export function take(view, at) {
  const isOther = Object.entries(minute.view?.totals ?? {}).some(([name, count]) => view.totals[name] < count);
  if (isOther) minute.history = []; // nothing is counted down: it is another engine
  const from = minute.view && at - minute.at < MISSED ? minute.at : at - 0.1;
  Object.assign(minute, { view, at });
  noteTotals(view, at);
  const added = view.sequences.map((sequence) => noteSequence(sequence, from, at)).filter((request) => request.isNew);
  for (const [id, request] of minute.requests) {
    request.isLive = request.endedAt === at;
    request.isNew = false;
    request.bars = request.bars.filter((bar) => bar.to > at - MINUTE);
    if (!request.bars.length) minute.requests.delete(id);
  }
  return added;
}

function noteTotals({ time, totals }, at) {
  const { history } = minute;
  const before = history.findLast((past) => at - past.at >= 1) ?? history[0];
  const seconds = before ? time - before.time : 0;
  const rate = (name) => (seconds > 0 ? (totals[name] - before.totals[name]) / seconds : 0);
  history.push({ at, time, totals, decode: rate("decode_tokens"), prefill: rate("prefill_tokens") });
  while (at - history[0].at > MINUTE + 1) history.shift();
}

function noteSequence(sequence, from, at) {
  const id = `${sequence.request_id} ${sequence.index}`;
  let request = minute.requests.get(id);
  if (!request) minute.requests.set(id, (request = { key: id, bars: [], isNew: true }));
  const bar = request.bars.at(-1);
  // A prompt is often computed between two views: who generates all at once has had it computed just now.
  const isSudden = sequence.state === "decode" && !["decode", "prefill"].includes(bar?.state);
  const state = isSudden ? "prefill" : sequence.state;
  if (bar?.state === state && bar.to === from) bar.to = at;
  else request.bars.push({ state, from: isSudden ? Math.max(from, at - SUDDEN) : from, to: at });
  return Object.assign(request, { sequence, endedAt: at });
}

/** Note what an answer came to: views do not see the last tokens of a request. */
export function noteEnd(name, numOutput) {
  for (const { sequence } of minute.requests.values()) {
    if (sequence.request_id.includes(name)) sequence.num_output = Math.max(sequence.num_output, numOutput);
  }
}

export const ownersOf = (block) => [...minute.requests.values()].filter((request) => owns(request, block));
export const owns = ({ isLive, sequence }, block) => isLive && sequence.blocks.includes(block);

/** What was counted in the last minute. */
export function counted(name) {
  return minute.view.totals[name] - minute.history[0].totals[name];
}
