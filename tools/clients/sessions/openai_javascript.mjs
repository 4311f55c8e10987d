// client: OpenAI JavaScript
// npm: openai@7.57.0 zod@4.6.7
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { LOOP, TEXT, TOOLS, same, step } from "./steps.mjs";

const text = new OpenAI({ baseURL: `${TEXT}/v1`, apiKey: "none", maxRetries: 0 });
const tools = new OpenAI({ baseURL: `${TOOLS}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const request = { model: "smollm2", messages: user("What is the sky?"), max_tokens: 8, temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "weather", description: "Tell the weather.", parameters };
const Weather = z.object({ city: z.string(), degrees: z.array(z.number()), note: z.string().nullable() });
const report = 'SCRIPT: {"city": "Rome", "degrees": [31], "note": null}';

await step("chat and streaming", async () => {
  const whole = await text.chat.completions.create(request);
  let joined = "";
  for await (const chunk of await text.chat.completions.create({ ...request, stream: true }))
    joined += chunk.choices[0]?.delta.content ?? "";
  same(joined, whole.choices[0].message.content);
});

await step("completions", async () => {
  const response = await text.completions.create({ model: "smollm2", prompt: "The sky is", max_tokens: 4 });
  same(response.usage.completion_tokens, 4);
});

await step("parsed output (zod)", async () => {
  const response_format = zodResponseFormat(Weather, "weather");
  const response = await tools.chat.completions.parse({ model: "scripted", messages: user(report), response_format });
  same(response.choices[0].message.parsed.degrees[0], 31);
});

await step("tool loop (runTools)", async () => {
  const run = ({ city }) => `31 in ${city}`;
  const tool = { type: "function", function: { ...weather, function: run, parse: JSON.parse } };
  for (const stream of [false, true]) {
    const runner = tools.chat.completions.runTools({ model: "scripted", messages: user(LOOP), tools: [tool], stream });
    same(await runner.finalContent(), "It is 31 degrees in Rome.");
  }
});

await step("responses, streamed", async () => {
  const request = { model: "smollm2", input: "Hello", max_output_tokens: 8, temperature: 0 };
  const whole = await text.responses.create(request);
  let joined = "";
  for await (const event of await text.responses.create({ ...request, stream: true }))
    if (event.type === "response.output_text.delta") joined += event.delta;
  same(joined, whole.output_text);
  const next = { ...request, input: "And?", previous_response_id: whole.id };
  same((await text.responses.create(next)).previous_response_id, whole.id);
});

await step("responses with tools", async () => {
  const request = { model: "scripted", tools: [{ type: "function", ...weather, strict: false }] };
  const stream = tools.responses.stream({ ...request, input: user(LOOP) });
  const { output } = await stream.finalResponse();
  const call = output.find((item) => item.type === "function_call");
  same(call.arguments.replaceAll(" ", ""), '{"city":"Rome"}');
  const result = { type: "function_call_output", call_id: call.call_id, output: "31" };
  const last = await tools.responses.create({ ...request, input: [...user(LOOP), ...output, result] });
  same(last.output_text, "It is 31 degrees in Rome.");
});

await step("parsed responses (zod)", async () => {
  const request = { model: "scripted", input: report, text: { format: zodTextFormat(Weather, "weather") } };
  same((await tools.responses.parse(request)).output_parsed.city, "Rome");
});

await step("errors", async () => {
  const error = await text.chat.completions.create({ ...request, temperature: -1 }).catch((caught) => caught);
  same(error.param, "temperature");
});
