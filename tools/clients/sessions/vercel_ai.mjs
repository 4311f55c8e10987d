// client: Vercel AI SDK
// npm: ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const { TEXT_URL: TEXT, TOOLS_URL: TOOLS } = process.env; // without /v1
const CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Rome"}} </tool_call>';
const LOOP = `SCRIPT: ${CALL} ||| It is 31 degrees in Rome.`; // a call, and its result's answer

// A step prints one line of JSON with its name and its error, if any, as those of steps.py.
async function step(name, run) {
  let error = null;
  try {
    await run();
  } catch (caught) {
    console.error(caught);
    error = `${caught}`.slice(0, 300);
  }
  console.log(JSON.stringify({ step: name, error }));
}

function same(value, expected) {
  if (value !== expected) throw new Error(`${JSON.stringify(value)} is not ${JSON.stringify(expected)}`);
}

// The model of a server by each of the three ways.
function models(url, name) {
  const baseURL = `${url}/v1`;
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "specedge", baseURL, supportsStructuredOutputs: true });
  return [compatible(name), openai.chat(name), openai(name)];
}

const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `31 in ${city}`,
});
const short = { maxOutputTokens: 16, temperature: 0, maxRetries: 0 };

async function joined(result) {
  let text = "";
  for await (const piece of result.textStream) text += piece;
  return text;
}

await step("text, streaming, two turns", async () => {
  for (const model of models(TEXT, "smollm2")) {
    const messages = [{ role: "user", content: "Hello" }];
    const whole = await generateText({ model, messages, ...short });
    same(await joined(streamText({ model, messages, ...short })), whole.text);
    messages.push(...whole.response.messages, { role: "user", content: "And?" });
    if (!(await generateText({ model, messages, ...short })).text) throw new Error("no text");
  }
});

await step("objects", async () => {
  const schema = z.object({ city: z.string(), degrees: z.number() });
  for (const model of models(TOOLS, "scripted")) {
    const prompt = 'SCRIPT: {"city": "Rome", "degrees": 31}';
    const { output } = await generateText({ model, prompt, output: Output.object({ schema }), maxRetries: 0 });
    same(output.degrees, 31);
  }
});

await step("tool loop, streamed or not", async () => {
  for (const model of models(TOOLS, "scripted")) {
    const request = { model, prompt: LOOP, tools: { weather }, stopWhen: isStepCount(4), maxRetries: 0 };
    same((await generateText(request)).text, "It is 31 degrees in Rome.");
    same(await joined(streamText(request)), "It is 31 degrees in Rome.");
  }
});

await step("forced tool", async () => {
  for (const model of models(TOOLS, "scripted")) {
    const request = { model, prompt: LOOP, tools: { weather }, toolChoice: "required", maxRetries: 0 };
    same((await generateText(request)).toolCalls[0].input.city, "Rome");
  }
});
