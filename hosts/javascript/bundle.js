/** A bundle's manifest and files, checked: docs/bundle.md. */
import { createHash } from 'node:crypto';
import { readFile, stat } from 'node:fs/promises';
import { arch } from 'node:os';
import { join } from 'node:path';
import ort from 'onnxruntime-node';

const FORMAT = 8;
const HASHED = 8 * 2 ** 20; // bytes; a larger file is known by its size alone

/** The manifest of a bundle whose files are all as it says. */
export async function readBundle(folder) {
  let manifest;
  try {
    manifest = JSON.parse(await readFile(join(folder, 'bundle.json'), 'utf8'));
  } catch (error) {
    throw new Error(`${folder}: ${error.message}; give the folder of a bundle`, { cause: error });
  }
  const { format, files, hosts } = manifest;
  if (format !== FORMAT) {
    throw new Error(`the bundle has format ${format}, this host reads ${FORMAT}; export it again`);
  }
  if (!hosts) {
    throw new Error(`the bundle has no graphs for hosts; run specedge embed --bundle ${folder}`);
  }
  const { node: version } = ort.env.versions;
  if (release(version) < release(hosts.oldest_onnxruntime)) {
    throw new Error(`ONNX Runtime is ${version}, the bundle needs ${hosts.oldest_onnxruntime}`);
  }
  const unlisted = hosts.graphs.find(({ file }) => !Object.hasOwn(files, file));
  if (unlisted) throw new Error(`bundle.json does not list a graph's file: ${unlisted.file}`);
  for (const [name, file] of Object.entries(files)) await checkFile(folder, name, file);
  return manifest;
}

/** 1030 of 1.30.0. */
function release(version) {
  const [major, minor] = version.split('.').map(Number);
  return 1000 * major + minor;
}

async function checkFile(folder, name, { size, sha256 }) {
  const path = join(folder, name);
  if (!/^\w/.test(name) || name.includes('..')) {
    throw new Error(`bundle.json lists ${name}, which lies outside of the bundle`);
  }
  const found = await stat(path).catch(() => null);
  if (!found?.isFile()) throw new Error(`${path} is missing; copy the whole bundle`);
  if (found.size !== size) {
    const sizes = `${found.size} bytes, bundle.json says ${size}`;
    throw new Error(`${path} has ${sizes}; copy the bundle again`);
  }
  if (size > HASHED) return;
  if (createHash('sha256').update(await readFile(path)).digest('hex') !== sha256) {
    throw new Error(`${path} has another SHA-256 than bundle.json says; copy the bundle again`);
  }
}

/** The options of every session. */
export async function sessionOptions({ draft, target, hosts }) {
  const extra = { ...hosts.session_options };
  const hasIntegers = [draft, target].some((model) => model.weights_dtype.startsWith('int'));
  if (hasIntegers && (await saturates())) extra['session.x64quantprecision'] = '1';
  return { logSeverityLevel: 3, extra };
}

/**
 * Whether sums of products of bytes are cut to 16 bits, as on AVX2 without VNNI. Where that cannot
 * be told it is taken to be so: text is then right, and long prompts may take longer.
 */
async function saturates() {
  if (arch() !== 'x64') return false;
  const flags = await readFile('/proc/cpuinfo', 'utf8').catch(() => 'avx2');
  return /\bavx2\b/.test(flags) && !/\bavx(512)?_vnni\b/.test(flags);
}
