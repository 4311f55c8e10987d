/** Text from a specedge bundle: docs/hosts.md. There is no sampling here, only random numbers. */
import { join } from 'node:path';
import { readBundle } from './bundle.js';
import { openRounds } from './rounds.js';
import { check, checkPrompt, settingsOf, uniforms } from './settings.js';
import { Text } from './text.js';

/** One text at a time. What a prompt shares with the text before it is not computed again. */
export class SpecedgeHost {
  #bundle;
  #rounds;
  #text;
  #tokens = []; // of the last text
  #isBusy = false;

  /** Open a bundle to draft `numDraftTokens` tokens a round, or as many as it says. */
  static async open(folder, { numDraftTokens } = {}) {
    const host = new SpecedgeHost();
    host.#bundle = await readBundle(folder);
    host.#text = await Text.open(join(folder, host.#bundle.tokenizer));
    host.#rounds = await openRounds(folder, host.#bundle, numDraftTokens);
    return host;
  }

  /** Free the sessions and the caches; not while a text is written. */
  release() {
    return this.#rounds.release();
  }

  /** The tokens of a text. */
  encode(text) {
    return this.#text.encode(text);
  }

  /**
   * Continue a prompt, text or token ids. Gives after each round its tokens, how many of them were
   * drafted, and the text that became certain; throws the reason of `signal` once that is aborted.
   *
   * Settings are temperature (0 is greedy), topK, topP, minP and repetitionPenalty.
   */
  async *generate(prompt, { maxNewTokens = 64, seed = 0, signal, ...given } = {}) {
    if (this.#isBusy) throw new Error('the host is writing another text; wait for its end');
    const isLength = Number.isSafeInteger(maxNewTokens) && maxNewTokens >= 0;
    check('maxNewTokens', maxNewTokens, 'a whole number, at least 0', isLength);
    this.#isBusy = true;
    try {
      const tokens = await this.#tokensOf(prompt);
      const settings = settingsOf(given);
      this.#begin(tokens);
      yield* this.#write(tokens, maxNewTokens, uniforms(seed), settings, signal);
    } finally {
      this.#isBusy = false;
    }
  }

  async #tokensOf(prompt) {
    const isText = typeof prompt === 'string';
    const tokens = isText && prompt ? await this.encode(prompt) : [...prompt];
    checkPrompt(tokens, this.#bundle.target);
    return tokens;
  }

  #begin(tokens) {
    let common = 0;
    while (common < tokens.length - 1 && tokens[common] === this.#tokens[common]) common += 1;
    this.#rounds.begin(common);
    this.#tokens = tokens;
  }

  async *#write(tokens, maxNewTokens, random, settings, signal) {
    const { end_tokens: ends, target } = this.#bundle;
    const rounds = this.#rounds;
    const limit = Math.min(tokens.length + maxNewTokens, target.context_length);
    const isGreedy = settings.temperature.data[0] === 0;
    const newText = this.#text.stream(tokens);
    for (let isLast = false; !isLast && tokens.length < limit; ) {
      signal?.throwIfAborted();
      const [first, wanted] = [tokens.length, limit - tokens.length];
      const room = rounds.placeDraft(first);
      if (await rounds.read(tokens, settings)) continue;
      const n = Math.min(rounds.k, wanted - isGreedy, room);
      const found = await rounds.run(tokens, n, random(2 * rounds.k + 1), settings);
      const numAccepted = Math.min(Number(found.num_accepted.data[0]), wanted);
      const emitted = Array.from(found.next_tokens.data, Number).slice(0, numAccepted + 1);
      emitted.splice(wanted);
      const end = emitted.findIndex((token) => ends.includes(token));
      if (end >= 0) emitted.splice(end + 1);
      tokens.push(...emitted);
      rounds.end(first, tokens.length);
      isLast = end >= 0 || tokens.length >= limit;
      yield { tokens: emitted, numAccepted, text: await newText(tokens, isLast) };
    }
  }
}
