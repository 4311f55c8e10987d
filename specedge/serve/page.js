// Page of `specedge serve`: chat for chat models, completion for others, and a view of the tokens.
import { describeModel, figures, newAnswer, secondsPerToken, sentMessage, speed, stream } from "./page-client.js";
import { copyButton, element, markdown } from "./page-markdown.js";

const at = (id) => document.getElementById(id);
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const EXAMPLES = [
  "Explain recursion to a ten-year-old.",
  "Write a Python function that returns the n-th Fibonacci number.",
  "Give me three ideas for a cheap weekend trip with children.",
];
const COMPLETION = { max_tokens: 128, temperature: 0 }; // defaults of the completion view
const PROMPTS = { code: "def read_config(path):", prose: "The old lighthouse keeper had not spoken to anyone for" };

let model = null;
let running = null; // AbortController of the answer in progress
let chats = stored("specedge-chats", []);
let chat = newChat();
let inspected = null; // { body, answer } in the tokens view

// Local storage may be empty, full or disabled.
function stored(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // ignored: the page works without storage
  }
}

// Settings

const form = at("settings-form");
const setting = (name) => form.elements[name].value.trim();

function saveSettings() {
  const { key, ...kept } = Object.fromEntries(new FormData(form));
  store("specedge-settings", kept);
}

function loadSettings() {
  for (const [name, value] of Object.entries(stored("specedge-settings", {}))) {
    if (form.elements[name]) form.elements[name].value = value;
  }
}

function toolsOf(text) {
  if (!text) return [];
  try {
    const tools = JSON.parse(text);
    return tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  } catch {
    throw new Error("Invalid settings: tools must be a JSON list of functions.");
  }
}

// Return the request fields set by the settings.
function requestOptions() {
  const fields = {};
  for (const name of NUMBERS) if (setting(name)) fields[name] = Number(setting(name));
  if (setting("draft")) fields.speculative = { num_draft_tokens: Number(setting("draft")) };
  if (!model.chat) return { ...COMPLETION, ...fields };
  if (setting("thinking")) fields.enable_thinking = setting("thinking") === "on";
  const tools = toolsOf(setting("tools"));
  return tools.length ? { ...fields, tools } : fields;
}

// Generation

function say(text) {
  at("status").textContent = text;
}

// Run one generation at a time and update the buttons. The result of `generate` is announced to
// screen readers.
async function run(errorNode, generate) {
  if (running) return;
  running = new AbortController();
  errorNode.textContent = "";
  showRunning();
  say("Generating.");
  try {
    say(await generate(running.signal));
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : "");
    if (error.name !== "AbortError") errorNode.textContent = error.message;
  } finally {
    running = null;
    showRunning();
  }
}

function showRunning() {
  for (const button of document.querySelectorAll(".stop")) button.hidden = !running;
  for (const button of document.querySelectorAll(".go")) button.hidden = Boolean(running);
  at("compare").disabled = Boolean(running) || !inspected?.answer.usage;
  for (const id of ["continue", "copy-result"]) at(id).disabled = Boolean(running) || !at("result").textContent;
}

// Return a function that calls `call` at most once per frame.
function eachFrame(call) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      call();
    });
  };
}

// Chat

function newChat() {
  return { messages: [] };
}

// Move a chat to the top of the list; chats without messages are removed.
function saveChat(saved) {
  chats = [saved, ...chats.filter((other) => other !== saved)].filter(({ messages }) => messages.length);
  storeChats();
}

function storeChats() {
  const kept = chats.slice(0, 50).map(({ messages }) => ({ messages: messages.map(({ spans, ...message }) => message) }));
  store("specedge-chats", kept);
  showChats();
}

function openChat(other) {
  running?.abort();
  chat = other;
  at("chat-error").textContent = "";
  showChat();
  at("message").focus();
}

function showChats() {
  const items = chats.map((other) => {
    const title = other.messages[0].content.slice(0, 60);
    const open = element("button", { type: "button", textContent: title, className: "title" });
    if (other === chat) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openChat(other));
    const remove = element("button", { type: "button", className: "small", textContent: "Delete", ariaLabel: `Delete ${title}` });
    remove.addEventListener("click", () => {
      other.messages = [];
      saveChat(other);
      if (other === chat) openChat(newChat());
    });
    return element("li", {}, open, remove);
  });
  at("chat-list").replaceChildren(...items);
}

function showChat() {
  at("log").replaceChildren(...chat.messages.map((message, i) => messageNode(message, i)));
  at("examples").hidden = chat.messages.length > 0;
  showTokens(null, chat.messages.findLast((message) => message.usage) ?? null);
  showChats();
  scrollDown(true);
}

function scrollDown(always) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

function messageNode(message, i) {
  const body = element("div", { className: "body" });
  const actions = element("p", { className: "actions" });
  const node = element("li", { className: message.role }, element("h2", { textContent: NAMES[message.role] }), body, actions);
  showMessage(message, body);
  const name = message.role === "assistant" ? "answer" : "message";
  actions.append(copyButton(() => message.content, `Copy ${name}`));
  const action = (text, label, done) => {
    const button = element("button", { type: "button", className: "small", textContent: text, ariaLabel: label });
    button.addEventListener("click", done);
    actions.append(button);
  };
  if (message.role === "user") action("Edit", "Edit message", () => edit(message, i, body));
  if (message.role === "assistant") {
    action("Regenerate", "Regenerate answer", () => answerFrom(i));
    if (message.usage) actions.append(element("span", { className: "figures", textContent: speed(message) }));
  }
  return node;
}

function showMessage(message, body) {
  if (message.role !== "assistant") {
    body.replaceChildren(element("p", { textContent: message.content }));
    return;
  }
  const parts = [];
  if (message.reasoning) {
    const wasOpen = body.querySelector(".thinking")?.open ?? false;
    const summary = element("summary", { textContent: message.content || message.finish ? "Thinking" : "Thinking…" });
    parts.push(element("details", { className: "thinking", open: wasOpen }, summary, ...markdown(message.reasoning)));
  }
  parts.push(...markdown(message.content), ...message.tool_calls.map(callNode));
  if (message.finish === "length") parts.push(element("p", { className: "note", textContent: "Truncated at the maximum length." }));
  if (message.stopped) parts.push(element("p", { className: "note", textContent: "Stopped." }));
  if (!parts.length) parts.push(element("p", { className: "note", textContent: message.finish ? "Empty answer." : "…" }));
  body.replaceChildren(...parts);
}

// Return the node of a call, with a form for its result if there is none yet.
function callNode(call) {
  const { name, arguments: text } = call.function;
  const node = element("details", { className: "call", open: true }, element("summary", { textContent: `Tool call: ${name}` }), element("pre", { tabIndex: 0, textContent: text }));
  if (!running && !chat.messages.some((message) => message.tool_call_id === call.id)) {
    const area = element("textarea", { rows: 2 });
    const label = element("label", {}, `Result of ${name}`, area);
    const send = element("form", {}, label, element("button", { type: "submit", textContent: "Send result" }));
    send.addEventListener("submit", (event) => {
      event.preventDefault();
      chat.messages.push({ role: "tool", tool_call_id: call.id, content: area.value });
      const last = chat.messages.findLast((message) => message.role === "assistant");
      const answeredIds = new Set(chat.messages.map((message) => message.tool_call_id));
      if (last.tool_calls.every(({ id }) => answeredIds.has(id))) answerFrom(chat.messages.length);
      else showChat();
    });
    node.append(send);
  }
  return node;
}

function edit(message, i, body) {
  const area = element("textarea", { value: message.content, rows: 4, ariaLabel: "Edited message" });
  const save = element("button", { type: "submit", textContent: "Send" });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  const editor = element("form", { className: "edit" }, area, element("p", { className: "actions" }, save, cancel));
  const leave = () => {
    showMessage(message, body);
    body.parentNode.querySelector("[aria-label='Edit message']").focus();
  };
  cancel.addEventListener("click", leave);
  area.addEventListener("keydown", (event) => event.key === "Escape" && leave());
  submitOnEnter(area, editor);
  editor.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !area.value.trim()) return;
    message.content = area.value;
    answerFrom(i + 1);
  });
  body.replaceChildren(editor);
  area.focus();
}

// Remove the messages from an index on, and answer the remaining ones.
function answerFrom(i) {
  return run(at("chat-error"), async (signal) => {
    chat.messages.length = i;
    const current = chat;
    saveChat(current);
    showChat();
    const system = setting("system");
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...chat.messages.map(sentMessage)];
    const body = { messages, ...requestOptions() };
    const answer = newAnswer();
    const node = messageNode(answer, i);
    node.setAttribute("aria-busy", "true");
    at("log").append(node);
    scrollDown(true);
    const show = eachFrame(() => {
      if (current !== chat || answer.finished) return;
      showMessage(answer, node.querySelector(".body"));
      scrollDown(false);
      showTokens(body, answer);
    });
    try {
      await stream(body, setting("key"), signal, answer, show);
    } catch (error) {
      answer.stopped = error.name === "AbortError";
      throw error;
    } finally {
      answer.finished = true;
      if (answer.spans.length && chats.includes(current)) current.messages.push(answer);
      storeChats();
      running = null;
      if (current === chat) {
        showChat();
        showTokens(body, answer);
        if (document.activeElement === document.body && !isNarrow()) at("message").focus();
      }
    }
    return `Answer: ${answer.content}`;
  });
}

// Completion

function complete() {
  return run(at("completion-error"), async (signal) => {
    const body = { prompt: at("prompt").value, ...requestOptions() };
    const answer = newAnswer();
    at("result-figures").textContent = "";
    const show = () => {
      const prompt = element("span", { className: "prompt", textContent: body.prompt });
      at("result").replaceChildren(prompt, answer.content);
      showTokens(body, answer);
    };
    const showSoon = eachFrame(() => answer.finished || show());
    show();
    try {
      await stream(body, setting("key"), signal, answer, showSoon);
    } finally {
      answer.finished = true;
      show();
      at("result-figures").textContent = speed(answer);
    }
    return `Result: ${answer.content}`;
  });
}

// Tokens and speeds

function spanNodes(spans) {
  return spans.map(({ text, fate }) => element("span", { className: fate, title: fate, textContent: text }));
}

// Append the new spans of an answer to an element.
function showSpans(id, answer) {
  const container = at(id);
  if (container.answer !== answer) container.replaceChildren();
  container.answer = answer;
  container.append(...spanNodes(answer?.spans?.slice(container.childElementCount) ?? []));
}

function showTokens(body, answer) {
  if (inspected?.answer !== answer) {
    at("plain").hidden = true;
    at("verdict").textContent = "";
  }
  inspected = answer && { body, answer };
  showSpans("text-speculative", answer);
  at("figures-speculative").textContent = answer ? figures(answer) : "";
  at("compare").disabled = Boolean(running) || !body || !answer?.usage;
}

// Repeat the inspected request with plain decoding and the same seed.
function compare() {
  return run(at("verdict"), async (signal) => {
    const { body, answer } = inspected;
    const plain = newAnswer();
    const show = () => {
      showSpans("text-plain", plain);
      at("figures-plain").textContent = figures(plain);
    };
    at("plain").hidden = false;
    show();
    const seed = answer.seed === undefined ? {} : { seed: answer.seed };
    await stream({ ...body, ...seed, speculative: { off: true } }, setting("key"), signal, plain, show);
    const times = secondsPerToken(plain.usage) / secondsPerToken(answer.usage);
    const greedy = (body.temperature ?? model.default_sampling.temperature) === 0;
    const textOf = ({ spans }) => spans.map((span) => span.text).join("");
    const comparison = textOf(plain) === textOf(answer) ? "the texts are identical" : "the texts differ";
    const verdict = `Speculative decoding is ${times.toFixed(2)} times as fast`;
    at("verdict").textContent = greedy ? `${verdict}; ${comparison}.` : `${verdict}.`;
    return "";
  });
}

// Controls

const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

// One side view fits beside the text; narrow screens show a single view.
function toggle(button, open) {
  for (const other of open ? document.querySelectorAll(".toggle") : []) {
    const isBeside = other !== toggleOf("chats") && button !== toggleOf("chats");
    if (other !== button && (isBeside || isNarrow())) toggle(other, false);
  }
  button.setAttribute("aria-expanded", open);
  at(button.getAttribute("aria-controls")).hidden = !open;
}

const toggleOf = (id) => document.querySelector(`[aria-controls="${id}"]`);

function submitOnEnter(area, target) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    target.requestSubmit();
  });
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 200)}px`;
}

async function start() {
  try {
    model = await describeModel(setting("key"));
  } catch (error) {
    at("model").textContent = error.status === 401 ? "Enter the API key in the settings." : error.message;
    toggle(toggleOf("settings"), true);
    form.elements.key.focus();
    return;
  }
  const drafter = model.draft ? `drafted by ${model.draft}` : "drafted by suffix decoding";
  at("model").textContent = `${model.id}, ${drafter}, ${model.context_length} tokens`;
  document.title = `${model.id} · specedge`;
  const defaults = model.chat ? { max_tokens: "rest of the context", ...model.default_sampling } : { ...model.default_sampling, ...COMPLETION };
  for (const name of NUMBERS) form.elements[name].placeholder ||= defaults[name] ?? "";
  for (const node of document.querySelectorAll(".chat-only")) node.hidden = !model.chat;
  at("thinking").hidden = !model.capabilities?.includes("thinking");
  at("chat").hidden = !model.chat;
  at("completion").hidden = model.chat;
  if (model.chat) {
    openChat(chats[0] ?? chat);
  } else {
    at("prompt").value ||= /python|code/i.test(model.target) ? PROMPTS.code : PROMPTS.prose;
    if (!isNarrow()) toggle(toggleOf("tokens"), true);
    at("prompt").focus();
  }
}

for (const button of document.querySelectorAll(".toggle")) {
  button.addEventListener("click", () => toggle(button, button.getAttribute("aria-expanded") !== "true"));
}
for (const button of document.querySelectorAll(".stop")) button.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
at("new-chat").addEventListener("click", () => openChat(newChat()));
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = at("message").value.trim();
  if (running || !content) return;
  chat.messages.push({ role: "user", content });
  at("message").value = "";
  grow(at("message"));
  answerFrom(chat.messages.length);
});
submitOnEnter(at("message"), at("composer"));
at("message").addEventListener("input", () => grow(at("message")));
at("examples").append(...EXAMPLES.map((text) => {
  const button = element("button", { type: "button", textContent: text });
  button.addEventListener("click", () => {
    at("message").value = text;
    at("composer").requestSubmit();
  });
  return button;
}));
at("completion-form").addEventListener("submit", (event) => {
  event.preventDefault();
  complete();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) complete();
});
at("continue").addEventListener("click", () => {
  at("prompt").value = at("result").textContent;
  complete();
});
at("copy-result").replaceWith(Object.assign(copyButton(() => at("result").textContent, "Copy result"), { id: "copy-result", disabled: true }));
at("compare").addEventListener("click", compare);
form.addEventListener("input", saveSettings);
form.addEventListener("submit", (event) => event.preventDefault());
form.elements.key.addEventListener("change", () => model ?? start());
loadSettings();
start();
