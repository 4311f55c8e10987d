/** Graphs by roles, on onnxruntime-node. */
import ort from 'onnxruntime-node';

export const ints = (values, dims = [values.length]) =>
  new ort.Tensor('int64', BigInt64Array.from(values, BigInt), dims);
export const floats = (values, dims = [values.length]) =>
  new ort.Tensor('float32', new Float32Array(values), dims);
export const doubles = (values) =>
  new ort.Tensor('float64', new Float64Array(values), [values.length]);
export const flags = (values) => new ort.Tensor('bool', values, [1, values.length]);

/** A session and the caches that it reads and writes. */
export class Graph {
  #session;
  #inputs;
  #outputs;
  #caches = {}; // by buffer

  static async open(path, { inputs, outputs }, options) {
    const graph = new Graph();
    graph.#session = await ort.InferenceSession.create(path, options);
    graph.#inputs = inputs;
    // Each output comes back as a copy, so of a buffer the last alone is asked for.
    graph.#outputs = outputs.filter(
      ({ buffer }, i) => !buffer || i === outputs.findLastIndex((one) => one.buffer === buffer),
    );
    for (const { buffer, shape } of inputs.filter(({ role }) => role === 'cache')) {
      const dims = shape.map((size) => (size === 'B' ? 1 : size));
      const zeros = new Float32Array(dims.reduce((a, b) => a * b));
      graph.#caches[buffer] = new ort.Tensor('float32', zeros, dims);
    }
    return graph;
  }

  /** The rows of the shortest cache; Infinity if there are none. */
  get rows() {
    return Math.min(...Object.values(this.#caches).map((cache) => cache.dims[2]));
  }

  /**
   * The outputs, by role, of inputs by role.
   *
   * The same tensor is a cache's input and its output: the run then writes new rows alone, in
   * place, and the one copy is that which onnxruntime-node returns.
   */
  async run(values) {
    const feeds = {};
    for (const { name, role, buffer } of this.#inputs) {
      feeds[name] = buffer ? this.#caches[buffer] : values[role];
      if (!feeds[name]) throw new Error(`${name} has a role that is unknown here: ${role}`);
    }
    const fetches = Object.fromEntries(
      this.#outputs.map(({ name, buffer }) => [name, buffer ? this.#caches[buffer] : null]),
    );
    const found = await this.#session.run(feeds, fetches);
    const results = {};
    for (const { name, role, buffer } of this.#outputs) {
      if (buffer) this.#caches[buffer] = found[name];
      else results[role] = found[name];
    }
    return results;
  }

  release() {
    return this.#session.release();
  }
}
