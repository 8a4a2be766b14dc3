// Six requests that begin alike: what an engine that shares blocks is good at.

import { $, setText } from "./elements.js";
import { model } from "./model.js";
import { stream } from "./server.js";

const BEGINNING = `"""How a server of language models uses its memory.

Every token that a model has read leaves a key and a value in each layer. They are needed again for each token
that follows, so they are kept. They are kept in blocks of a few tokens, which may lie anywhere, as the pages of a
process do. A table for each request says which block comes when. Two requests that begin with the same tokens
need the same keys and values there, so their tables name the same blocks: they are computed and stored once. When a
request ends, its blocks are free, but what they hold can be found until somebody else needs the room.
"""

from collections import deque


class Pool:
    """Blocks that are handed out and taken back."""

    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.counts = [0] * num_blocks

`;
const ENDS = ["allocate(self, count)", "release(self, blocks)", "share(self, table)", "is_full(self)", "find(self, tokens)", "check(self)"];
const [TRY, STOP] = ["Try six requests that begin alike", "Stop them"];

let trying = null; // ends them

export async function tryOrStop() {
  if (trying) return trying.abort();
  trying = new AbortController();
  setText($("try"), STOP);
  setText($("try-trouble"), "");
  const prompt = ENDS.map((end) => `${BEGINNING}    def ${end}:\n`);
  const id = `try-1-${Math.random().toString(36).slice(2, 8)}`;
  const body = { model: model.name, request_id: id, prompt, max_tokens: 300, temperature: 0.8, ignore_eos: true };
  try {
    // In one call: browsers have six connections to a server, and the page needs some. Nobody reads what comes.
    for await (const _ of await stream("v1/completions", body, trying.signal));
  } catch (error) {
    if (error.name !== "AbortError") setText($("try-trouble"), error.message);
  }
  trying = null;
  return setText($("try"), TRY);
}
