/** Speculative decoding of a specedge bundle (docs/hosts.md); sampling is part of the graphs. */
import { join } from 'node:path';
import ort from 'onnxruntime-node';
import { readBundle } from './bundle.js';
import { check, ints, settingsOf, tensor, uniforms } from './settings.js';
import { Text } from './text.js';

const PIECE = 256; // tokens of a long prompt per pass
/** Allocate zeroed states, with the names of their input and last output, if a round writes them. */
function cachesOf({ inputs, outputs }) {
  const caches = inputs.filter(({ state }) => state);
  return caches.map(({ name, state, shape }) => ({
    state,
    input: name,
    output: outputs.findLast((output) => output.state === state)?.name,
    tensor: tensor('float32', new Float32Array(shape.reduce((a, b) => a * b)), shape),
  }));
}

/** Generates one text at a time; a prompt reuses the caches for its common prefix with the last text. */
export class SpecedgeHost {
  #bundle;
  #text;
  #session;
  #k; // draft tokens per round
  #boundaries; // cache lengths that no run may cross
  #caches; // names of input and output, and the current tensor
  #readsText; // the round has inputs text_tokens and prompt_length
  #tokens = []; // tokens of the last text
  #promptLength = 0;
  #draftLength = 0; // valid rows of the draft's caches, and of the target's below
  #targetLength = 0;
  #isBusy = false;
  #opener; // session of an encoder-decoder's source
  #source = []; // tokens of the constant states

  /** Open a bundle with `numDraftTokens` draft tokens per round, by default its own K. */
  static async open(folder, { numDraftTokens } = {}) {
    const host = new SpecedgeHost();
    const { hosts, files, tokenizer } = (host.#bundle = await readBundle(folder));
    const [version, oldest] = [ort.env.versions.node, hosts.oldest_onnxruntime];
    if (version.localeCompare(oldest, 'en', { numeric: true }) < 0) {
      throw new Error(`ONNX Runtime is ${version}, the bundle needs ${oldest}`);
    }
    const round = hosts.graphs.find(
      ({ name, num_draft_tokens: k }) => name === 'round' && k === (numDraftTokens ?? k),
    );
    if (!round) {
      const wanted = `round.onnx of ${numDraftTokens ?? 'any'} draft tokens`;
      throw new RangeError(`there is no ${wanted}; run specedge embed --layout fused -k K`);
    }
    if (!files[round.file]) throw new Error(`bundle.json does not list the graph ${round.file}`);
    host.#k = round.num_draft_tokens;
    host.#caches = cachesOf(round.signature);
    host.#readsText = round.signature.inputs.some(({ role }) => role === 'text_tokens');
    host.#text = await Text.open(join(folder, tokenizer));
    host.#boundaries = hosts.pass_boundaries ?? [];
    // Flash attention is not batch-invariant there; kernels read this when they are created.
    if (process.arch === 'arm64' || host.#boundaries.length) {
      process.env.ORT_GQA_DISABLE_FLASH_ATTENTION ??= '1';
    }
    // Fatal: errors are thrown.
    const options = { logSeverityLevel: 4, extra: hosts.session_options };
    host.#session = await ort.InferenceSession.create(join(folder, round.file), options);
    const opener = hosts.graphs.find(({ name }) => name === 'open');
    if (opener) {
      if (opener.signature.inputs[0].role === 'audio') {
        throw new Error('the bundle reads speech; this host reads text');
      }
      host.#opener = await ort.InferenceSession.create(join(folder, opener.file), options);
      for (const cache of host.#caches) {
        const written = ({ state }) => state === cache.state;
        cache.opened = opener.signature.outputs.find(written)?.name;
      }
    }
    return host;
  }

  /** Release the session and the caches; not during generation. */
  async release() {
    await this.#session?.release();
    await this.#opener?.release();
    this.#session = this.#opener = this.#caches = null;
  }

  /** Encode a text. */
  encode(text) {
    return this.#text.encode(text);
  }

  /**
   * Continue a prompt, text or token ids. Yields after each round its tokens, the number of accepted
   * draft tokens, and the completed text; throws the reason of `signal` once that is aborted. The prompt
   * of an encoder-decoder is its source, and the text begins with the bundle's decoder tokens.
   *
   * Settings are temperature (0 is greedy), topK, topP, minP and repetitionPenalty.
   */
  async *generate(prompt, { maxNewTokens = 64, seed = 0, signal, ...given } = {}) {
    if (this.#isBusy) throw new Error('the host is writing another text; wait for its end');
    if (!this.#session) throw new Error('the host was released; open another one');
    this.#isBusy = true;
    try {
      const isText = typeof prompt === 'string' && prompt;
      const read = isText ? await this.encode(prompt) : [...prompt];
      const { context_length: context, vocab_size: size, encoder } = this.#bundle.models.target;
      check('the number of prompt tokens', read.length, 1, encoder?.max_length ?? context - 1);
      for (const token of read) check('a token', token, 0, size - 1);
      check('maxNewTokens', maxNewTokens, 0, Number.MAX_SAFE_INTEGER);
      const settings = settingsOf(given);
      if (encoder) await this.#open(read);
      const { decoder_start: start = [], decoder_prefix: prefix = [] } = this.#bundle;
      const tokens = encoder ? [...start, ...prefix] : read;
      this.#begin(tokens);
      const limit = Math.min(tokens.length + maxNewTokens, context);
      yield* this.#write(limit, uniforms(seed), settings, signal);
    } finally {
      this.#isBusy = false;
    }
  }

  /** Compute the constant states of a source, unless they are its own. */
  async #open(source) {
    if (source.join() === this.#source.join()) return;
    this.#draftLength = this.#targetLength = 0;
    this.#source = [];
    const found = await this.#opener.run({ source: ints(source, [1, source.length]) });
    for (const cache of this.#caches) if (cache.opened) cache.tensor = found[cache.opened];
    this.#source = source;
  }

  #begin(tokens) {
    let common = 0;
    while (common < tokens.length - 1 && tokens[common] === this.#tokens[common]) common += 1;
    this.#draftLength = Math.min(this.#draftLength, common);
    this.#targetLength = Math.min(this.#targetLength, common);
    this.#tokens = tokens;
    this.#promptLength = tokens.length;
  }

  async *#write(limit, random, settings, signal) {
    const tokens = this.#tokens;
    const isGreedy = settings.temperature.data[0] === 0;
    const newText = await this.#text.stream(tokens);
    for (let isLast = false; !isLast && tokens.length < limit; ) {
      signal?.throwIfAborted();
      const [length, wanted] = [tokens.length, limit - tokens.length];
      const boundary = this.#boundaries.find((end) => end > this.#draftLength);
      const piece = Math.min(this.#draftLength + PIECE, boundary ?? Infinity);
      if (piece < length) {
        await this.#run(piece, 0, () => 0, settings);
        this.#draftLength = this.#targetLength = piece;
        continue;
      }
      // A sampled token's acceptance depends on the draft tokens after it.
      const most = isGreedy ? wanted - 1 : this.#bundle.models.target.context_length - length;
      const n = Math.min(this.#k, most);
      const found = await this.#run(length, n, random, settings);
      const numAccepted = Math.min(Number(found.num_accepted.data[0]), wanted);
      const emitted = Array.from(found.next_tokens.data, Number);
      emitted.splice(Math.min(numAccepted + 1, wanted));
      const end = emitted.findIndex((token) => this.#bundle.end_tokens.includes(token));
      if (end >= 0) emitted.splice(end + 1);
      tokens.push(...emitted);
      this.#targetLength = tokens.length - 1;
      this.#draftLength = Math.min(this.#targetLength, length + this.#k - 1);
      isLast = end >= 0 || tokens.length >= limit;
      yield { tokens: emitted, numAccepted, text: await newText(tokens, isLast) };
    }
  }

  /** Feed the tokens up to `end` that the caches lack; at most n draft tokens may be accepted. */
  async #run(end, n, random, settings) {
    const fed = this.#tokens.slice(this.#draftLength, end);
    const seen = new Uint8Array(this.#bundle.models.target.vocab_size);
    for (const token of this.#tokens) seen[token] = 1;
    const feeds = {
      ...settings,
      tokens: ints(fed, [1, fed.length]),
      draft_length: ints([this.#draftLength]),
      target_length: ints([this.#targetLength]),
      num_draft_tokens: ints([n]),
      seen: tensor('bool', seen, [1, seen.length]),
      uniforms: tensor('float64', Array.from({ length: 2 * this.#k + 1 }, random)),
    };
    const fetches = { next_tokens: null, num_accepted: null };
    // One tensor as input and output: the run writes new rows in place, and the package returns a copy.
    const written = this.#caches.filter(({ output }) => output);
    for (const cache of this.#caches) feeds[cache.input] = cache.tensor;
    for (const cache of written) fetches[cache.output] = cache.tensor;
    if (this.#opener) feeds.source_length = ints([this.#source.length]);
    if (this.#readsText) {
      feeds.text_tokens = ints(this.#tokens, [1, this.#tokens.length]);
      feeds.prompt_length = ints([this.#promptLength]);
    }
    const found = await this.#session.run(feeds, fetches);
    for (const cache of written) cache.tensor = found[cache.output];
    return found;
  }
}
