/** What a caller may ask for, and the random numbers of a seed. */
import { doubles, floats, ints } from './graph.js';

const STEP = 0x9e3779b97f4a7c15n;

/** Settings as graphs take them, by role. */
export function settingsOf({
  temperature = 0,
  topK = 0,
  topP = 1,
  minP = 0,
  repetitionPenalty = 1,
  ...others
}) {
  const [unknown] = Object.keys(others);
  if (unknown) throw new TypeError(`there is no setting ${unknown}`);
  check('temperature', temperature, 'at least 0', temperature >= 0);
  check('topK', topK, 'a whole number, at least 0', Number.isSafeInteger(topK) && topK >= 0);
  check('topP', topP, 'above 0, at most 1', topP > 0 && topP <= 1);
  check('minP', minP, '0 to 1', minP >= 0 && minP <= 1);
  check('repetitionPenalty', repetitionPenalty, 'above 0', repetitionPenalty > 0);
  return {
    temperature: floats([temperature]),
    top_k: ints([topK]),
    top_p: doubles([topP]),
    min_p: floats([minP]),
    repetition_penalty: floats([repetitionPenalty]),
  };
}

export function check(name, value, wanted, isRight) {
  if (!isRight || !Number.isFinite(value)) {
    throw new RangeError(`${name} must be ${wanted}, got ${value}`);
  }
}

/** Refuse a prompt that the target cannot continue. */
export function checkPrompt(tokens, { context_length: context, vocab_size: size }) {
  if (!tokens.length) throw new RangeError('the prompt is empty; give at least one token');
  const bad = tokens.find((token) => !(Number.isSafeInteger(token) && token >= 0 && token < size));
  if (bad !== undefined) throw new RangeError(`token ${bad} is not between 0 and ${size - 1}`);
  if (tokens.length >= context) {
    const room = `the bundle takes ${context} with at least one new`;
    throw new RangeError(`the prompt has ${tokens.length} tokens, ${room}; shorten it`);
  }
}

/** A function that gives so many of a seed's next random numbers: splitmix64. */
export function uniforms(seed) {
  let state = BigInt.asUintN(64, BigInt(seed));
  const next = () => {
    state = BigInt.asUintN(64, state + STEP);
    let z = BigInt.asUintN(64, (state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) * 2 ** -53;
  };
  return (count) => Array.from({ length: count }, next);
}
