/**
 * The graphs of a round, in both layouts, and how much of their caches counts. K draft tokens a
 * round, L tokens of the text.
 */
import { join } from 'node:path';
import { sessionOptions } from './bundle.js';
import { Graph, doubles, flags, floats, ints } from './graph.js';

const PIECE = 256; // tokens of a long prompt that are fed at once

/** Open the graphs of K draft tokens, or of as many as the bundle says. */
export async function openRounds(folder, bundle, numDraftTokens) {
  const rounds = bundle.hosts.graphs.filter(({ name }) => name === 'round');
  const k = numDraftTokens ?? (rounds[0] ?? bundle).num_draft_tokens;
  const round = rounds.find((graph) => graph.num_draft_tokens === k);
  if (!Number.isInteger(k) || k < 1 || (rounds.length && !round)) {
    throw new RangeError(`there are no rounds of ${k} draft tokens; run specedge embed -k ${k}`);
  }
  const opened = round ? new FusedRounds(bundle, k) : new SplitRounds(bundle, k);
  try {
    await opened.open(folder, await sessionOptions(bundle), round);
    return opened;
  } catch (error) {
    await opened.release();
    throw error;
  }
}

class Rounds {
  graphs = {};
  draftStart = 0; // where in the text the draft's cache begins
  draftLength = 0; // how many rows of the draft's cache count, and of the target's
  targetLength = 0;

  constructor(bundle, k) {
    Object.assign(this, { bundle, k });
    this.context = bundle.target.context_length;
    this.draftContext = Math.min(bundle.draft.context_length, this.context);
  }

  async openGraph(role, path, signature, options, context = this.context) {
    this.graphs[role] = await Graph.open(path, signature, options);
    if (this.graphs[role].rows <= context + this.k) {
      throw new RangeError(`the caches have no room for ${this.k} draft tokens`);
    }
  }

  async release() {
    for (const graph of Object.values(this.graphs)) await graph.release();
    this.graphs = {};
  }

  /** Another text takes the place of the last one, with which it has `common` tokens in common. */
  begin(common) {
    this.targetLength = Math.min(this.targetLength, common);
    this.draftLength = Math.max(0, Math.min(this.draftLength, common - this.draftStart));
  }

  /**
   * A draft of a shorter context begins anew here and there ("A smaller draft" in docs/bundle.md).
   * Returns how many tokens may be drafted.
   */
  placeDraft(length) {
    const step = this.draftContext - Math.floor(this.draftContext / 2);
    const start = Math.max(0, Math.ceil((length - this.draftContext) / step) * step);
    if (start !== this.draftStart) [this.draftStart, this.draftLength] = [start, 0];
    return start + this.draftContext - length + 1;
  }

  /** A round after `first` tokens has made the text `length` tokens long. */
  end(first, length) {
    this.targetLength = length - 1;
    this.draftLength = Math.min(this.targetLength, first + this.k - 1) - this.draftStart;
  }

  /** What reads the tokens of the text that a penalty is for. */
  seen(...texts) {
    const seen = new Uint8Array(this.bundle.target.vocab_size);
    for (const text of texts) for (const token of text) seen[token] = 1;
    return flags(seen);
  }
}

class FusedRounds extends Rounds {
  open(folder, options, { file, signature }) {
    return this.openGraph('round', join(folder, file), signature, options);
  }

  /** Draft, verify, accept and draw: `next_tokens` and `num_accepted`, at most n. */
  run(text, n, uniforms, settings) {
    const fed = text.slice(this.draftLength);
    return this.graphs.round.run({
      ...settings,
      tokens: ints(fed, [1, fed.length]),
      draft_length: ints([this.draftLength]),
      target_length: ints([this.targetLength]),
      num_draft_tokens: ints([n]),
      seen: this.seen(text),
      uniforms: doubles(uniforms),
    });
  }

  /** Feed a piece of a long prompt; false if no more than a piece is left. */
  async read(text, settings) {
    const end = this.draftLength + PIECE;
    if (text.length <= end) return false;
    await this.run(text.slice(0, end), 0, new Float64Array(2 * this.k + 1), settings);
    this.draftLength = this.targetLength = end;
    return true;
  }
}

class SplitRounds extends Rounds {
  async open(folder, options) {
    const { hosts, target } = this.bundle;
    for (const role of ['draft', 'accept']) {
      const { file, signature } = hosts.graphs.find(({ name }) => name === role);
      await this.openGraph(role, join(folder, file), signature, options, this.draftContext);
    }
    const decoder = target.graphs.find((g) => g.name === 'decoder' && g.ops === hosts.ops);
    const signature = target.signatures[decoder.signature];
    await this.openGraph('target', join(folder, decoder.file), signature, options);
  }

  async run(text, n, uniforms, settings) {
    const size = this.bundle.target.vocab_size;
    const drafted = [];
    const weights = new Float32Array(this.k * size);
    let [fed, length] = [text.slice(this.draftStart + this.draftLength), this.draftLength];
    for (let i = 0; i < this.k; i += 1) {
      const step = await this.draft(fed, length, uniforms[i], this.seen(text, drafted), settings);
      length += fed.length;
      fed = [Number(step.token.data[0])];
      drafted.push(...fed);
      weights.set(step.weights.data, i * size);
    }
    const missing = text.slice(this.targetLength);
    const { logits } = await this.verify([...missing, ...drafted], this.k + 1);
    return this.graphs.accept.run({
      ...settings,
      logits,
      tokens: ints(drafted),
      weights: floats(weights, [this.k, size]),
      num_draft_tokens: ints([n]),
      seen: this.seen(text),
      uniforms: doubles(uniforms.slice(this.k)),
    });
  }

  async read(text, settings) {
    const from = this.draftStart + this.draftLength;
    if (text.length - from > PIECE) {
      const piece = text.slice(from, from + PIECE);
      await this.draft(piece, this.draftLength, 0, this.seen(), settings);
      this.draftLength += PIECE;
    } else if (text.length - this.targetLength > PIECE) {
      await this.verify(text.slice(this.targetLength, this.targetLength + PIECE), 1);
      this.targetLength += PIECE;
    } else {
      return false;
    }
    return true;
  }

  /** Feed the draft, which draws the next token with a random number. */
  draft(fed, length, uniform, seen, settings) {
    return this.graphs.draft.run({
      ...settings,
      tokens: ints(fed, [1, fed.length]),
      draft_length: ints([length]),
      seen,
      uniforms: doubles([uniform]),
    });
  }

  /** Feed the target, of which the last rows give logits. */
  verify(fed, numRows) {
    return this.graphs.target.run({
      tokens: ints(fed, [1, fed.length]),
      past_length: ints([this.targetLength]),
      logits_from: ints([fed.length - numRows]),
    });
  }
}
