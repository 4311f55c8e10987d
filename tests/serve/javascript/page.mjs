// Print the contents of a server's page in Chromium as one line of JSON.
// usage: node page.mjs CHROMIUM URL chat|completions|stop [SCREENSHOT]
import { chromium } from "playwright-core";

const [executablePath, url, what, screenshot] = process.argv.slice(2);
const quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"];
quiet.push("--disable-background-networking", "--disable-component-update");
const chromiumSandbox = process.getuid?.() !== 0; // Chromium has no sandbox for root
const browser = await chromium.launch({ executablePath, chromiumSandbox, args: quiet });

// Count text events; optionally stop after the first one.
function watch(stop) {
  window.steps = 0;
  const at = (id) => document.getElementById(id);
  const came = () => (window.steps++, stop && at("stop").click());
  new MutationObserver(came).observe(at("text-speculative"), { childList: true });
}

function shown() {
  const at = (id) => document.getElementById(id);
  const colour = (span) => getComputedStyle(span).backgroundColor;
  const spans = (id) => [...at(id).children].map((span) => [span.textContent, span.className]);
  const coloured = [...document.querySelectorAll(".legend span, pre span")];
  return {
    model: at("model").textContent,
    steps: window.steps,
    speculative: spans("text-speculative"),
    plain: spans("text-plain"),
    figures: [at("figures-speculative").textContent, at("figures-plain").textContent],
    verdict: at("verdict").textContent,
    error: at("error").textContent,
    colours: [...new Set(coloured.map((span) => `${span.className} ${colour(span)}`))].sort(),
  };
}

try {
  const page = await browser.newPage({ colorScheme: "light" });
  page.setDefaultTimeout(60_000);
  const messages = [], requests = new Set();
  page.on("console", (message) => messages.push(message.text()));
  page.on("pageerror", (error) => messages.push(error.message));
  page.on("request", (request) => requests.add(new URL(request.url()).pathname));
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("model").textContent);
  await page.evaluate(watch, what === "stop");
  await page.setChecked("#chat", what === "chat");
  await page.fill("#tokens", what === "stop" ? "450" : "60");
  await page.fill("#draft", "3");
  await page.click("#go");
  await page.waitForSelector("#go:enabled");
  if (screenshot) await page.screenshot({ path: screenshot, fullPage: true });
  console.log(JSON.stringify({ ...(await page.evaluate(shown)), messages, requests: [...requests] }));
} finally {
  await browser.close();
}
