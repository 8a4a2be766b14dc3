// Code in an answer: its language, a button that copies it, and colours.

import { make, makeCopyButton } from "./elements.js";
import highlighter from "./vendor/highlight.js";

const LONGEST = 20_000; // characters that are coloured, each time that some are added

export function makeCode(text, language) {
  const known = highlighter.getLanguage(language) && text.length <= LONGEST;
  const parts = known ? coloured(highlighter.highlight(text, { language })._emitter.rootNode) : [text];
  const head = make("figcaption", {}, make("span", { textContent: language }), makeCopyButton(() => text));
  const code = make("pre", { tabIndex: 0, role: "group", ariaLabel: `Code ${language}` }, make("code", {}, ...parts));
  return make("figure", { className: "code" }, head, code);
}

/** A tree of scopes ("title.function") as elements of classes ("code-title"). */
function coloured({ children }) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    return make("span", { className: child.scope ? `code-${child.scope.split(".")[0]}` : "" }, ...coloured(child));
  });
}
