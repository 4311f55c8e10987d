// Requests to a server by OpenAI's package for JavaScript.
// usage: node client.mjs URL CHECK EXPECTED, where EXPECTED is the pipeline's result as JSON
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, name, given] = process.argv.slice(2);
const wanted = JSON.parse(given);
const { model, messages } = wanted;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const greedy = { model, messages, temperature: 0, max_tokens: wanted.length };

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function running() {
  return (await (await fetch(`${url}/health`)).json()).running;
}

async function until(condition) {
  const end = Date.now() + 20_000;
  while (!(await condition())) {
    assert.ok(Date.now() < end, "it never came");
    await new Promise((done) => setTimeout(done, 10));
  }
}

function refused(kind, param, code) {
  return (error) => {
    assert.ok(error instanceof kind, error.stack);
    assert.equal(error.param, param);
    if (code) assert.equal(error.code, code);
    assert.ok(error.message.includes(param.split(".").at(-1)), error.message);
    return true;
  };
}

const checks = {
  async models() {
    assert.deepEqual((await client.models.list()).data.map((one) => one.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async chat() {
    const { choices, usage } = await client.chat.completions.create(greedy);
    assert.equal(choices[0].message.content, wanted.text);
    assert.deepEqual([choices[0].message.role, choices[0].finish_reason], ["assistant", "length"]);
    assert.equal(usage.completion_tokens, wanted.length);
  },

  async streaming() {
    const asked = { ...greedy, stream: true, stream_options: { include_usage: true } };
    const chunks = await collected(await client.chat.completions.create(asked));
    const texts = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "");
    assert.equal(texts.join(""), wanted.text);
    assert.ok(texts.filter(Boolean).length > 1);
    assert.equal(chunks.at(-1).usage.completion_tokens, wanted.length);
    const final = await client.chat.completions.stream(greedy).finalChatCompletion();
    assert.equal(final.choices[0].message.content, wanted.text);
  },

  async completions() {
    const asked = { model, prompt: wanted.prompt, temperature: 0, max_tokens: wanted.length };
    assert.equal((await client.completions.create(asked)).choices[0].text, wanted.continuation);
    const chunks = await collected(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), wanted.continuation);
  },

  async responses() {
    const asked = { model, input: messages, temperature: 0, max_output_tokens: wanted.length };
    const whole = await client.responses.create(asked);
    assert.equal(whole.output_text, wanted.text);
    assert.equal(whole.incomplete_details.reason, "max_output_tokens");
    const final = await client.responses.stream(asked).finalResponse();
    assert.equal(final.output_text, wanted.text);
  },

  async schema() {
    const json_schema = { name: "person", strict: true, schema: wanted.schema };
    const asked = { ...greedy, response_format: { type: "json_schema", json_schema } };
    const [whole] = (await client.chat.completions.create({ ...asked, max_tokens: 100 })).choices;
    assert.deepEqual([whole.message.content, whole.finish_reason], [wanted.json, "stop"]);
    assert.deepEqual(Object.keys(JSON.parse(whole.message.content)), ["name", "age"]);
    const [cut] = (await client.chat.completions.create({ ...asked, max_tokens: 3 })).choices;
    assert.equal(cut.finish_reason, "length");
    assert.ok(wanted.json.startsWith(cut.message.content));
  },

  async tools() {
    const tool_choice = { type: "function", function: { name: "weather" } };
    const tools = [{ type: "function", function: wanted.tool }];
    const asked = { ...greedy, max_tokens: 100, tools, tool_choice };
    const [whole] = (await client.chat.completions.create(asked)).choices;
    const [call] = whole.message.tool_calls;
    assert.deepEqual([call.function.name, whole.finish_reason], ["weather", "tool_calls"]);
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city", "days"]);

    const chunks = await collected(await client.chat.completions.create({ ...asked, stream: true }));
    const parts = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
    assert.equal(parts.map((part) => part.function.arguments).join(""), call.function.arguments);
    assert.ok(parts.length > 2);
    assert.equal(chunks.at(-1).choices[0].finish_reason, "tool_calls");

    const seen = [];
    const function_ = { ...wanted.tool, parse: JSON.parse, function: (given) => seen.push(given) };
    const runner = { ...asked, tools: [{ type: "function", function: function_ }] };
    await client.chat.completions.runTools(runner).done();
    // The library sends the tool's keys in an order of its own, which the prompt keeps.
    assert.deepEqual(seen.map(Object.keys), [["city", "days"]]);

    const result = { role: "tool", tool_call_id: call.id, content: "It is hot." };
    const turn = [...messages, whole.message, result];
    const after = { ...greedy, messages: turn, tools, tool_choice: "none" };
    const [answer] = (await client.chat.completions.create(after)).choices;
    assert.ok(answer.message.content);
    assert.deepEqual([answer.message.tool_calls, answer.finish_reason], [undefined, "length"]);

    const flat = [{ type: "function", ...wanted.tool }];
    const named = { type: "function", name: "weather" };
    const given = { model, input: messages, temperature: 0, tools: flat, tool_choice: named };
    const [item] = (await client.responses.create(given)).output;
    assert.deepEqual([item.type, item.arguments], ["function_call", call.function.arguments]);
  },

  async logprobs() {
    const asked = { ...greedy, logprobs: true, top_logprobs: 3 };
    const whole = (await client.chat.completions.create(asked)).choices[0].logprobs.content;
    assert.deepEqual(whole.map((one) => one.logprob), wanted.logprobs);
    assert.ok(whole.every((one) => one.top_logprobs.length === 3));
    const chunks = await collected(await client.chat.completions.create({ ...asked, stream: true }));
    assert.deepEqual(chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []), whole);
  },

  async errors() {
    const { BadRequestError } = OpenAI;
    const cases = [
      [{ temperature: -1 }, BadRequestError, "temperature"],
      [{ messages: [] }, BadRequestError, "messages"],
      [{ stream: true, n: 17 }, BadRequestError, "n"],
    ];
    for (const [change, ...what] of cases)
      await assert.rejects(client.chat.completions.create({ ...greedy, ...change }), refused(...what));
    const long = client.completions.create({ model, prompt: new Array(512).fill(7), max_tokens: 1 });
    await assert.rejects(long, refused(BadRequestError, "prompt", "context_length_exceeded"));
  },

  async cancellation() {
    const long = { ...greedy, max_tokens: 400, ignore_eos: true, speculative: { off: true } };
    const left = await client.chat.completions.create({ ...long, stream: true });
    for await (const _ of left) break;
    await until(async () => (await running()) === 0);

    const controller = new AbortController();
    const { signal } = controller;
    const aborted = await client.chat.completions.create({ ...long, stream: true }, { signal });
    let pieces = 0;
    for await (const _ of aborted) {
      pieces += 1; // some may have come before
      controller.abort();
    }
    assert.ok(pieces < 200, `${pieces} pieces came of an answer that was aborted at its first`);
    await until(async () => (await running()) === 0);

    const whole = new AbortController();
    const asked = client.chat.completions.create({ ...long, n: 8 }, { signal: whole.signal });
    const refusal = assert.rejects(asked, OpenAI.APIUserAbortError);
    await until(async () => (await running()) > 0);
    whole.abort();
    await refusal;
    await until(async () => (await running()) === 0);
    await checks.chat();
  },
};

await checks[name]();
