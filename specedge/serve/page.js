// The page asks the server as any client does: one stream with drafts, one without.
"use strict";

const at = (id) => document.getElementById(id);
let model = null;
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the server answered ${response.status}`);
}

async function describe() {
  const response = await checked(await fetch("v1/models", { headers: headers() }));
  model = (await response.json()).data[0];
  at("model").textContent = `${model.id}, drafted by ${model.draft ?? "suffix decoding"}, ${model.context_length} tokens`;
  at("chat").checked = model.chat;
  at("chat-label").hidden = !model.chat;
}

function body(speculative) {
  const text = at("prompt").value;
  const asked = at("chat").checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  return {
    ...asked,
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
    seed: 1,
    speculative,
    stream: true,
    stream_options: { include_usage: true },
    trace: true,
  };
}

// The events of a stream; an error among them is thrown.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function show(place, spans) {
  for (const { text, fate } of spans) {
    const span = document.createElement("span");
    span.className = fate;
    span.title = fate;
    span.textContent = text;
    place.append(span);
  }
}

// Seconds a token of one stream, shown as it comes.
async function generate(name, speculative) {
  const path = at("chat").checked ? "v1/chat/completions" : "v1/completions";
  const place = at(`text-${name}`);
  const sent = { method: "POST", headers: headers(), body: JSON.stringify(body(speculative)), signal: running.signal };
  const response = await checked(await fetch(path, sent));
  let pace = null;
  for await (const event of events(response)) {
    for (const choice of event.choices) show(place, choice.spans ?? []);
    if (!event.usage) continue;
    const { completion_tokens: tokens, speculative: counts } = event.usage;
    pace = counts.decode_seconds / tokens;
    const rate = counts.num_drafted ? `${Math.round((100 * counts.num_accepted) / counts.num_drafted)}% of ${counts.num_drafted} draft tokens accepted, ` : "";
    const rounds = (tokens / counts.num_rounds).toFixed(2);
    at(`figures-${name}`).textContent = `${(1 / pace).toFixed(1)} tokens/s, ${rate}${rounds} tokens a round`;
  }
  return pace;
}

async function run() {
  running = new AbortController();
  for (const id of ["error", "verdict", "text-speculative", "figures-speculative", "text-plain", "figures-plain"]) at(id).textContent = "";
  at("go").disabled = true;
  at("stop").disabled = false;
  try {
    if (!model) await describe();
    const k = at("draft").value.trim();
    const drafted = await generate("speculative", { num_draft_tokens: /^\d+$/.test(k) ? Number(k) : k || "auto" });
    if (!at("plain").checked) return;
    const plain = await generate("plain", { off: true });
    const same = at("text-speculative").textContent === at("text-plain").textContent;
    const times = `speculative decoding is ${(plain / drafted).toFixed(2)} times as fast`;
    const greedy = Number(at("temperature").value) === 0;
    at("verdict").textContent = greedy ? `${times}; the texts are ${same ? "the same" : "NOT the same"}` : times;
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    at("go").disabled = false;
    at("stop").disabled = true;
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("stop").addEventListener("click", () => running.abort());
describe().catch(() => { at("model").textContent = "give the key, and generate"; });
