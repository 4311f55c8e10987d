// Client of the server's OpenAI-compatible API.

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
  error.status = response.status;
  throw error;
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export async function describeModel(key) {
  const response = await checked(await fetch("v1/models", { headers: headers(key) }));
  return (await response.json()).data[0];
}

// Yield the events of a stream; throw an error if it ends with one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function addCalls(calls, deltas) {
  for (const { index, id, function: part } of deltas) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += part?.name ?? "";
    calls[index].function.arguments += part?.arguments ?? "";
  }
}

// Stream an answer into `answer`, calling `changed` after each event.
// An answer has content, reasoning, tool_calls, spans, seed, finish, usage and firstSeconds.
export async function stream(body, key, signal, answer, changed) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const options = { stream: true, stream_options: { include_usage: true }, trace: true };
  const start = performance.now();
  const response = await checked(
    await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify({ ...body, ...options }), signal }),
  );
  for await (const event of events(response)) {
    for (const choice of event.choices) {
      const { content, reasoning_content, tool_calls } = choice.delta ?? { content: choice.text };
      answer.content += content ?? "";
      answer.reasoning += reasoning_content ?? "";
      addCalls(answer.tool_calls, tool_calls ?? []);
      answer.spans.push(...(choice.spans ?? []));
      answer.seed = choice.seed ?? answer.seed;
      answer.finish = choice.finish_reason ?? answer.finish;
      if (answer.spans.length) answer.firstSeconds ??= (performance.now() - start) / 1000;
    }
    answer.usage = event.usage ?? answer.usage;
    changed();
  }
}

export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", tool_calls: [], spans: [] };
}

// Return a message in the format of requests.
export function sentMessage({ role, content, reasoning, tool_calls, tool_call_id }) {
  return {
    role,
    content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(tool_calls?.length ? { tool_calls } : {}),
    ...(tool_call_id ? { tool_call_id } : {}),
  };
}

export function secondsPerToken({ completion_tokens, speculative }) {
  return speculative.decode_seconds / completion_tokens;
}

export function speed({ usage }) {
  if (!usage?.completion_tokens) return "";
  return `${usage.completion_tokens} tokens, ${(1 / secondsPerToken(usage)).toFixed(1)} tokens/s`;
}

// Return a description of an answer's speed and acceptance rate.
export function figures({ usage, firstSeconds }) {
  if (!usage?.completion_tokens) return "";
  const { num_drafted, num_accepted, num_rounds } = usage.speculative;
  return [
    speed({ usage }),
    firstSeconds === undefined ? "" : `first after ${firstSeconds.toFixed(2)} s`,
    num_drafted ? `${Math.round((100 * num_accepted) / num_drafted)}% of ${num_drafted} draft tokens accepted` : "",
    `${(usage.completion_tokens / num_rounds).toFixed(2)} tokens per round`,
  ].filter(Boolean).join(", ");
}
