/** Validation of settings, and random numbers. */
import ort from 'onnxruntime-node';

export const tensor = (type, values, dims = [values.length]) => new ort.Tensor(type, values, dims);
export const ints = (values, dims) => tensor('int64', BigInt64Array.from(values, BigInt), dims);

const [TINY, HUGE] = [1e-37, 3e38]; // as float32 neither 0 nor infinite

export function check(name, value, least, most, isWhole = true) {
  if (!(value >= least && value <= most) || (isWhole && !Number.isInteger(value))) {
    const kind = isWhole ? 'an integer' : 'a number';
    throw new RangeError(`${name} must be ${kind} from ${least} to ${most}, got ${value}`);
  }
}

/** Return the inputs of the graph for the settings. */
export function settingsOf({
  temperature = 0,
  topK = 0,
  topP = 1,
  minP = 0,
  repetitionPenalty = 1,
  ...others
}) {
  for (const name of Object.keys(others)) throw new TypeError(`unknown setting ${name}`);
  check('temperature', temperature, 0, HUGE, false);
  check('topK', topK, 0, Number.MAX_SAFE_INTEGER);
  check('topP', topP, TINY, 1, false);
  check('minP', minP, 0, 1, false);
  check('repetitionPenalty', repetitionPenalty, TINY, HUGE, false);
  return {
    temperature: tensor('float32', [temperature]),
    top_k: ints([topK]),
    top_p: tensor('float64', [topP]),
    min_p: tensor('float32', [minP]),
    repetition_penalty: tensor('float32', [repetitionPenalty]),
  };
}

/** Return a function that returns the next random number of a seed (splitmix64). */
export function uniforms(seed) {
  let state = BigInt.asUintN(64, BigInt(seed));
  return () => {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
    let z = BigInt.asUintN(64, (state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) * 2 ** -53;
  };
}
