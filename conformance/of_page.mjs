// The page in a browser: answers that mean harm, axe-core in light and dark, wide and narrow, and what one does in a chat.
//
// `run.sh FOLDER page` runs it where Chromium is (CHROMIUM, or /usr/bin/chromium), with playwright-core and axe-core of npm in
// node_modules beside this file, and `nanoengine serve smollm2` at SERVER_URL. It ends with 1 if a check fails.

import { readFileSync } from "node:fs"
import { createRequire } from "node:module"

import { chromium } from "playwright-core"

const URL = process.env.SERVER_URL ?? "http://127.0.0.1:8000"
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8") + "; 0"
const CHAT = "**/v1/chat/completions"
const EVIL = `# Hi

<script>window.harm=1</script> <img src=x onerror="window.harm=2"> ![i](http://evil.example/x.png) [a](javascript:window.harm=3)
[b](JaVaScRiPt:alert(1)) [c](data:text/html,x) <javascript:alert(1)> [ok](https://example.org/) <svg onload=window.harm=4>

<iframe src=http://evil.example></iframe><style>*{display:none}</style>

\`\`\`html
<script>window.harm=5</script>
\`\`\`

|a|b|
|-|-|
|<img src=x onerror=window.harm=6>|\`x\`|

- [x] done

`
const counts = { passed: 0, failed: 0 }

function check(isRight, what) {
  counts[isRight ? "passed" : "failed"] += 1
  console.log(isRight ? "ok    " : "FAILED", what)
}

/** A stream that thinks, says a text, and is cut. */
function streamOf(text) {
  const usage = { prompt_tokens: 10, completion_tokens: 2 }
  const events = [
    { choices: [{ delta: { reasoning_content: "<b>think</b>" } }], usage },
    { choices: [{ delta: { content: text }, finish_reason: "length" }], usage },
    { choices: [], usage: { ...usage, prompt_tokens_details: { cached_tokens: 8 } } },
  ]
  const body = events.map((event) => `data: ${JSON.stringify(event)}\n\n`).join("") + "data: [DONE]\n\n"
  return (route) => route.fulfill({ contentType: "text/event-stream", body })
}

async function say(page, text) {
  await page.fill("#message", text)
  await page.keyboard.press("Enter")
}

/** Do something that has the model answer, and wait for the end. */
async function answered(page, act) {
  await act()
  await page.waitForSelector(".answering")
  await page.waitForSelector(".answering", { state: "detached" })
}

async function meanHarm(page) {
  const elsewhere = []
  page.on("request", (request) => { if (!request.url().startsWith(URL) && !request.url().startsWith("data:")) elsewhere.push(request.url()) })
  for (const depth of [100, 5000]) {
    await page.route(CHAT, streamOf(EVIL + ">".repeat(depth) + "deep"))
    await say(page, "<img src=x onerror=window.harm=7>")
    await page.waitForFunction(() => !document.querySelector(".answering") && document.querySelector(".assistant:last-child footer p"))
    const seen = await page.evaluate(() => ({
      harm: window.harm,
      elements: document.querySelectorAll("#said :is(script, img, iframe, svg, style)").length,
      links: [...document.querySelectorAll("#said a")].map((link) => link.href),
    }))
    check(!seen.harm && !seen.elements, "nothing of an answer runs or becomes HTML")
    check(seen.links.every((link) => /^https?:/.test(link)), `links lead to the web: ${seen.links}`)
    check(!elsewhere.length, `no other host is asked ${elsewhere}`)
    await page.unroute(CHAT)
  }
}

async function accessible(page, where) {
  await page.evaluate(() => { document.querySelector("#legends").open = true })
  for (const part of ["page", "settings"]) {
    if (part === "settings") await page.click("#open-settings")
    await page.evaluate(AXE) // as a debugger: the page's policy refuses a script that is not its own
    const found = await page.evaluate(() => window.axe.run().then(({ violations }) => violations.map(({ id }) => id)))
    check(!found.length, `axe, ${part}, ${where}: ${found}`)
  }
  await page.keyboard.press("Escape")
  check(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `fits, ${where}`)
}

async function converse(page) {
  let sent
  page.on("request", (request) => { if (request.url().endsWith("chat/completions")) sent = request.postDataJSON() })
  const last = (part) => page.innerText(`.assistant:last-child ${part}`)
  await page.click("#new-chat")
  await page.route(CHAT, () => {})
  await answered(page, async () => { await say(page, "one"); await page.waitForSelector(".answering"); setTimeout(() => page.keyboard.press("Escape"), 300) })
  check((await last("footer")).includes("Stopped before the first word"), "a message that nobody answered stays, and says so")
  await page.unroute(CHAT)
  await page.click("#open-settings")
  await page.fill("#system", "Be kind.")
  await page.fill("#max_tokens", "40")
  await page.fill("#temperature", "0")
  await page.click("text=Done")
  await answered(page, () => say(page, "Tell a long story."))
  check(sent.messages[0].content === "Be kind." && sent.messages[1].content === "one\n\nTell a long story.", "it is told with the next")
  check(/Cut at the limit · 40 tokens · .* tok\/s · .* prompt tokens were cached/.test(await last("footer")), "why it ended, and how fast it was")
  await answered(page, () => page.click("text=Regenerate"))
  check(sent.messages.length === 2, "it is answered anew")
  await page.keyboard.press("ArrowUp")
  await answered(page, async () => { await page.fill("#message", "Two."); await page.keyboard.press("Enter") })
  check(sent.messages.at(-1).content === "one\n\nTwo.", "an edited message takes the place of the old one")
  const said = await page.innerText("#said")
  await page.reload()
  await page.waitForSelector("#connection[data-is=live]")
  check((await page.innerText("#said")) === said, "a conversation is there after a reload")
  await page.click("#new-chat")
  check(!(await page.innerText("#said")), "a new chat is empty")
  await page.click("#old-chat")
  check((await page.innerText("#said")) === said, "and undone")
}

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] })
for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280, 360, 320]) {
    const page = await browser.newPage({ viewport: { width, height: 800 }, colorScheme })
    page.on("pageerror", (error) => check(false, error.message))
    await page.goto(URL)
    await page.waitForSelector("#connection[data-is=live]")
    await page.waitForFunction(() => document.querySelector("#model").textContent.trim())
    await meanHarm(page)
    await accessible(page, `${colorScheme}, ${width} px`)
    if (width === 1280 && colorScheme === "light") await converse(page)
    await page.close()
  }
}
await browser.close()
console.log(`page: ${counts.passed} passed, ${counts.failed} failed, 0 excluded`)
process.exit(counts.failed ? 1 : 0)
