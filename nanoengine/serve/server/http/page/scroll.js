// The end of the conversation stays in view, whatever changes above or below it, until the reader scrolls up.

import { $ } from "./elements.js";

const NEAR = 48; // pixels: a reader who is as near to the end follows it

let isFollowing = true;
let top = 0; // how far the log was scrolled when it was last read

export function followEnd() {
  const observer = new ResizeObserver(() => { if (isFollowing) scrollToEnd(); });
  for (const id of ["log", "said"]) observer.observe($(id));
  $("log").addEventListener("scroll", ({ target: log }) => {
    if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR) isFollowing = true;
    else if (log.scrollTop < top) isFollowing = false;
    top = log.scrollTop;
  });
  $("said").addEventListener("click", ({ target }) => { if (target.closest("summary")) isFollowing = false; }); // thoughts open where they are
}

export function scrollToEnd() {
  const log = $("log");
  isFollowing = true;
  log.scrollTop = log.scrollHeight;
  top = log.scrollTop;
}
