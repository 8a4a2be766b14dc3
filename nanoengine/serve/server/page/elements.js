// Elements of the page, found and made. Text goes in as text: nothing here, or anywhere else, parses HTML.

export const $ = (id) => document.getElementById(id);
export const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const makeButton = (words, onclick) => make("button", { type: "button", textContent: words, onclick });

/** A button that copies what `read` says when it is pressed. */
export function makeCopyButton(read) {
  const button = makeButton("Copy", async () => {
    await copy(read());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", { value: text }); // browsers have no clipboard for pages that come over plain HTTP from afar
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}
