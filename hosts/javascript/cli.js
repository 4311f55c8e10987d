#!/usr/bin/env node
/** Command line of the host: README.md. */
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { isDeepStrictEqual, parseArgs } from 'node:util';
import { SpecedgeHost } from './specedge_host.js';

const USAGE = `usage: node cli.js BUNDLE PROMPT [OPTIONS]         write text
       node cli.js BUNDLE --ids 5,17,3 [OPTIONS]   take and write token ids
       node cli.js BUNDLE --golden                 replay the bundle's golden.json
options: -n/--max-new-tokens N, -k/--num-draft-tokens K, --temperature T, --top-k N, --top-p P,
         --min-p P, --repetition-penalty R, --seed S`;

const OPTIONS = {
  'max-new-tokens': { type: 'string', short: 'n' },
  'num-draft-tokens': { type: 'string', short: 'k' },
  temperature: { type: 'string' },
  'top-k': { type: 'string' },
  'top-p': { type: 'string' },
  'min-p': { type: 'string' },
  'repetition-penalty': { type: 'string' },
  seed: { type: 'string' },
  ids: { type: 'string' },
  golden: { type: 'boolean' },
};

function number(name, text) {
  if (text.trim() === '' || Number.isNaN(Number(text))) {
    throw new Error(`--${name} takes a number, got "${text}"`);
  }
  return Number(text);
}

/** Replace names of settings in a message by options, such as topK by --top-k. */
function inOptions(message) {
  const names = Object.keys(OPTIONS).map((name) => [name, settingOf(name)]);
  const [name] = names.find(([, setting]) => message.startsWith(`${setting} must be`)) ?? [];
  return name ? message.replace(/^\w+/, `--${name}`) : message;
}

const settingOf = (name) => name.replace(/-./g, ([, letter]) => letter.toUpperCase());

function seedOf(text) {
  if (!/^-?\d+$/.test(text)) throw new Error(`--seed takes an integer, got "${text}"`);
  return BigInt(text);
}

/** Settings of generate() from the command line's options. */
function settingsOf({ seed, ids, golden, 'num-draft-tokens': k, ...values }) {
  const settings = seed === undefined ? {} : { seed: seedOf(seed) };
  for (const [name, text] of Object.entries(values)) {
    settings[settingOf(name)] = number(name, text);
  }
  return settings;
}

async function write(folder, prompt, values, signal) {
  const k = values['num-draft-tokens'];
  const settings = { ...settingsOf(values), signal };
  const tokens = values.ids?.split(',').map((id) => number('ids', id));
  const host = await SpecedgeHost.open(folder, {
    numDraftTokens: k === undefined ? undefined : number('num-draft-tokens', k),
  });
  let separator = '';
  try {
    for await (const round of host.generate(tokens ?? prompt, settings)) {
      process.stdout.write(tokens ? separator + round.tokens.join() : round.text);
      separator = ',';
    }
    process.stdout.write('\n');
  } finally {
    await host.release();
  }
}

/** Replay all transcripts, with a host for each K; return true if all match. */
async function replayAll(folder, signal) {
  const { transcripts } = JSON.parse(await readFile(join(folder, 'golden.json'), 'utf8'));
  let isRight = transcripts.length > 0;
  for (const k of new Set(transcripts.map((transcript) => transcript.num_draft_tokens))) {
    const host = await SpecedgeHost.open(folder, { numDraftTokens: k });
    try {
      for (const transcript of transcripts.filter((one) => one.num_draft_tokens === k)) {
        const other = await difference(host, transcript, signal);
        const request = `K ${k}, temperature ${transcript.temperature}, seed ${transcript.seed}`;
        console.log(other ? `DIFFERS ${request}: ${other}` : `same    ${request}`);
        isRight &&= !other;
      }
    } finally {
      await host.release();
    }
  }
  return isRight;
}

/** Return the first difference from a transcript. */
async function difference(host, transcript, signal) {
  const found = { prompt_tokens: await host.encode(transcript.prompt) };
  Object.assign(found, { tokens: [], num_accepted: [], text: '' });
  const settings = {
    maxNewTokens: transcript.max_new_tokens,
    temperature: transcript.temperature,
    topK: transcript.top_k,
    topP: transcript.top_p,
    minP: transcript.min_p,
    repetitionPenalty: transcript.repetition_penalty,
    seed: transcript.seed,
    signal,
  };
  for await (const round of host.generate(found.prompt_tokens, settings)) {
    found.tokens.push(...round.tokens);
    found.num_accepted.push(round.numAccepted);
    found.text += round.text;
  }
  return Object.keys(found).find((key) => !isDeepStrictEqual(found[key], transcript[key]));
}

const interrupted = new AbortController();
process.on('SIGINT', () => interrupted.abort());
try {
  const { values, positionals } = parseArgs({ options: OPTIONS, allowPositionals: true });
  const [folder, prompt] = positionals;
  if (positionals.length !== (values.golden || values.ids !== undefined ? 1 : 2)) {
    console.error(USAGE);
    process.exitCode = 1;
  } else if (values.golden) {
    process.exitCode = (await replayAll(folder, interrupted.signal)) ? 0 : 1;
  } else {
    await write(folder, prompt, values, interrupted.signal);
  }
} catch (error) {
  if (interrupted.signal.aborted) {
    process.stdout.write('\n');
    process.exitCode = 130;
  } else {
    console.error(`error: ${inOptions(error.message.split('\n')[0])}`);
    process.exitCode = 1;
  }
}
