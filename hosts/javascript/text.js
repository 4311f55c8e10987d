/** Tokenization and streaming detokenization. */
import { readFile } from 'node:fs/promises';
import { Tokenizer } from 'tokenizers';
import { TokenBytes } from './token_bytes.js';

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
  async stream(prompt) {
    const tokenBytes = new TokenBytes(this.#decoder);
    const end = await tokenBytes.start(prompt);
    const characters = new TextDecoder('utf-8', { ignoreBOM: true });
    const isWhole = new TextDecoder().decode(end) === characters.decode(end, { stream: true });
    let [numShown, ofPrompt] = [prompt.length, isWhole ? '' : '\ufffd'];
    return async (tokens, isLast) => {
      let text = '';
      for (; numShown < tokens.length; numShown++) {
        text += characters.decode(await tokenBytes.add(tokens[numShown]), { stream: true });
      }
      if (isLast) text += characters.decode();
      if (ofPrompt && text) {
        if (text.startsWith(ofPrompt)) text = text.slice(1); // an incomplete character of the prompt
        ofPrompt = '';
      }
      return text;
    };
  }
}
