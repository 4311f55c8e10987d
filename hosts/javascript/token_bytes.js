/** Bytes that tokens add to a text. */

const CONTEXT = 4; // tokens; a character has at most 4 bytes
const REPLACEMENT = '\ufffd';
const NONE = new Uint8Array();
const encoder = new TextEncoder();

/**
 * Whole characters are the difference that a token makes to the decoding of one token before it,
 * because decoders remove a space at the beginning of a text, or insert one between words. The name
 * of any other token spells its bytes. Special tokens have none.
 */
export class TokenBytes {
  #tokenizer;
  #before = null; // the last token of whole characters; null at the beginning of a text

  constructor(tokenizer) {
    this.#tokenizer = tokenizer;
  }

  /** Append a prompt; return the bytes of its last tokens. */
  async start(prompt) {
    const last = [];
    for (let i = prompt.length - 1; i >= 0 && last.length <= CONTEXT; i--) {
      if (await this.#hasText(prompt[i])) last.unshift(prompt[i]);
    }
    if (last.length > CONTEXT) this.#before = [];
    const bytes = [];
    for (const token of last.slice(-CONTEXT)) bytes.push(...(await this.add(token)));
    return Uint8Array.from(bytes);
  }

  /** Append a token; return the bytes that it adds. */
  async add(token) {
    if (!(await this.#hasText(token))) return NONE;
    const text = await this.#decode([token]);
    const isWhole = !text.includes(REPLACEMENT);
    const spelled = isWhole ? null : spelledBytes(this.#tokenizer.idToToken(token), text);
    const before = this.#before?.length === 0 ? [token] : (this.#before ?? []);
    const length = (await this.#decode(before)).length;
    const added = spelled ?? encoder.encode((await this.#decode([...before, token])).slice(length));
    this.#before = isWhole ? [token] : (this.#before ?? []);
    return added;
  }

  /** Return false for special tokens and unknown ones. */
  async #hasText(token) {
    if (await this.#decode([token])) return true;
    const isKnown = Boolean(this.#tokenizer.idToToken(token));
    return isKnown && !(await this.#tokenizer.decode([token], false));
  }

  async #decode(tokens) {
    return tokens.length ? this.#tokenizer.decode(tokens, true) : '';
  }
}

/** Return the bytes that a token's name spells if they decode to `text`, else null. */
function spelledBytes(name, text) {
  const fallback = /^<0x([0-9A-F]{2})>$/.exec(name);
  const candidates = [fallback ? [parseInt(fallback[1], 16)] : [], Array.from(name, (c) => BYTES.get(c))];
  for (const candidate of candidates) {
    const bytes = Uint8Array.from(candidate);
    if (new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes) === text) return bytes;
  }
  return null;
}

// Characters of bytes in byte-level BPE (GPT-2).
const isLatin = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const ALL = Array.from({ length: 256 }, (_, byte) => byte);
const BYTES = new Map([
  ...ALL.filter(isLatin).map((byte) => [String.fromCharCode(byte), byte]),
  ...ALL.filter((byte) => !isLatin(byte)).map((byte, i) => [String.fromCharCode(256 + i), byte]),
]);
