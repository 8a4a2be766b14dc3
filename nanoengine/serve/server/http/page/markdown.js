// Markdown as elements. A model may write anything: HTML stays text, links lead to the web or to mail, and images stay links.

import { make, makeCopyButtons } from "./elements.js";
import { lexer } from "./vendor/marked.js";

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };
const CHARACTERS = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const MOST_DEPTH = 24; // of what lies in one another; what is deeper is shown as it was written

const written = new WeakMap(); // block -> its Markdown

/** Show a text in an element. Blocks that are there already stay: an answer grows at its end. */
export function showMarkdown(element, text) {
  let tokens;
  try {
    tokens = lexer(text).filter(({ type }) => type !== "space" && type !== "def");
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    tokens = [{ type: "html", raw: text }]; // so deep that the parser gives up
  }
  const same = tokens.findIndex(({ raw }, i) => written.get(element.children[i]) !== raw);
  const first = same < 0 ? tokens.length : same;
  while (element.childNodes.length > first) element.lastChild.remove();
  for (const token of tokens.slice(first)) {
    const block = makeBlock(token, 0);
    written.set(block, token.raw);
    element.append(block);
  }
}

function makeBlock(token, depth) {
  const part = makePart(token, depth);
  return part instanceof HTMLElement && token.type !== "text" ? part : make("p", {}, part);
}

function makePart(token, depth) {
  if (depth > MOST_DEPTH) return token.raw;
  const inside = () => (token.tokens ?? []).map((part) => makePart(part, depth + 1));
  switch (token.type) {
    case "paragraph": case "blockquote": case "strong": case "em": case "del": return make(TAGS[token.type], {}, ...inside());
    case "heading": return make("h4", { className: `size-${token.depth}` }, ...inside()); // below the name of who speaks
    case "text": return token.tokens ? make("span", {}, ...inside()) : readable(token.text);
    case "code": return makeCode(token.text, (token.lang ?? "").split(/\s/)[0]);
    case "codespan": return make("code", {}, token.text);
    case "link": return makeLink(token.href, inside());
    case "image": return makeLink(token.href, [`Image: ${token.text || token.href}`]);
    case "list": return makeList(token, depth);
    case "table": return makeTable(token, depth);
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "hr": return make("hr");
    case "br": return make("br");
    case "escape": return token.text;
    case "space": return "";
    default: return /^<br\s*\/?>$/i.test(token.raw) ? make("br") : token.raw;
  }
}

function makeCode(text, language) {
  const head = make("figcaption", {}, make("span", { textContent: language }), ...makeCopyButtons(() => text));
  const code = make("pre", { tabIndex: 0, role: "group", ariaLabel: `Code ${language}` }, make("code", {}, text));
  return make("figure", { className: "code" }, head, code);
}

function makeLink(href, parts) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return make("span", {}, ...parts);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer", title: href }, ...parts);
}

function makeList({ ordered, start, items }, depth) {
  const list = make(ordered ? "ol" : "ul");
  if (ordered && start !== 1) list.start = start;
  for (const item of items) list.append(make("li", {}, ...item.tokens.map((part) => makePart(part, depth + 2))));
  return list;
}

function makeTable({ header, rows }, depth) {
  const cell = (tag) => ({ tokens, align }) => {
    const element = make(tag, {}, ...tokens.map((part) => makePart(part, depth + 2)));
    if (align) element.style.textAlign = align;
    return element;
  };
  const row = (cells, tag) => make("tr", {}, ...cells.map(cell(tag)));
  const table = make("table", {}, make("thead", {}, row(header, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  return make("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Table" }, table);
}

/** A text with the characters that entities stand for. */
function readable(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,6}));/gi, (entity, decimal, hex, name) => {
    if (name) return CHARACTERS[name] ?? entity;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : entity;
  });
}
