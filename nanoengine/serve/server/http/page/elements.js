// Elements of the page, found and made, and numbers in words. Text goes in as text: nothing here, or anywhere else, parses HTML.

export const $ = (id) => document.getElementById(id);
export const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const makeButton = (words, onclick) => make("button", { type: "button", textContent: words, onclick });

/** A button that copies what `read` says; none where browsers have no clipboard: on pages that come over plain HTTP from afar. */
export function makeCopyButtons(read) {
  return navigator.clipboard ? [makeButton("Copy", () => navigator.clipboard.writeText(read()))] : [];
}

export const number = (count) => count.toLocaleString("en");
export const plural = (count, word, words = `${word}s`) => `${number(count)} ${count === 1 ? word : words}`;
