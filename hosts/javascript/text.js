/** Tokenization and streaming detokenization. */
import { readFile } from 'node:fs/promises';
import { Tokenizer } from 'tokenizers';

const CONTEXT = 8; // tokens decoded before new ones, since some tokenizers drop a leading space

export class Text {
  #encoder;
  #decoder;

  static async open(path) {
    const text = new Text();
    const settings = JSON.parse(await readFile(path, 'utf8'));
    Object.assign(settings, { truncation: null, padding: null });
    // User text that spells a special token is encoded as text.
    const added = settings.added_tokens.filter(({ special }) => !special);
    text.#encoder = Tokenizer.fromString(JSON.stringify({ ...settings, added_tokens: added }));
    text.#decoder = Tokenizer.fromString(JSON.stringify(settings));
    return text;
  }

  async encode(text) {
    return (await this.#encoder.encode(text)).getIds();
  }

  /** Return a function from all tokens so far to the text that the new ones add. */
  stream(prompt) {
    let [from, shown] = [Math.max(0, prompt.length - CONTEXT), prompt.length];
    return async (tokens, isLast) => {
      const before = await this.#decoder.decode(tokens.slice(from, shown), true);
      const after = await this.#decoder.decode(tokens.slice(from), true);
      if (after.endsWith('\ufffd') && !isLast) return ''; // an incomplete character, perhaps
      [from, shown] = [shown, tokens.length];
      return after.slice(before.length);
    };
  }
}
