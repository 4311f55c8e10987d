/** From text to tokens, and to text as tokens come. */
import { readFile } from 'node:fs/promises';
import { Tokenizer } from 'tokenizers';

const CONTEXT = 8; // tokens decoded with new ones: some tokenizers drop a space at the beginning

export class Text {
  #encoder;
  #decoder;

  static async open(path) {
    const text = new Text();
    const settings = JSON.parse(await readFile(path, 'utf8'));
    Object.assign(settings, { truncation: null, padding: null });
    // What a user writes is text, even where it spells a special token.
    const added = settings.added_tokens.filter(({ special }) => !special);
    text.#encoder = Tokenizer.fromString(JSON.stringify({ ...settings, added_tokens: added }));
    text.#decoder = Tokenizer.fromString(JSON.stringify(settings));
    return text;
  }

  async encode(text) {
    return (await this.#encoder.encode(text)).getIds();
  }

  /** A function that gives what new tokens add to the text, given all tokens up to them. */
  stream(prompt) {
    let [from, shown] = [Math.max(0, prompt.length - CONTEXT), prompt.length];
    return async (tokens, isLast) => {
      const before = await this.#decoder.decode(tokens.slice(from, shown), true);
      const after = await this.#decoder.decode(tokens.slice(from), true);
      if (after.endsWith('\ufffd') && !isLast) return ''; // perhaps the beginning of a character
      [from, shown] = [shown, tokens.length];
      return after.slice(before.length);
    };
  }
}
