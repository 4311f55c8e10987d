/** Reads and verifies a bundle's manifest and files: docs/bundle.md. */
import { createHash } from 'node:crypto';
import { readFile, stat } from 'node:fs/promises';
import { join } from 'node:path';

const FORMAT = 10;
const HASHED = 8 * 2 ** 20; // bytes; of larger files only the size is checked

/** Read the manifest of a bundle and verify all files. */
export async function readBundle(folder) {
  const text = await readFile(join(folder, 'bundle.json'), 'utf8').catch((error) => {
    throw new Error(`${error.message}; give the folder of a bundle`, { cause: error });
  });
  const { format, files, hosts, ...others } = JSON.parse(text);
  if (format !== FORMAT) {
    throw new Error(`the bundle has format ${format}, not ${FORMAT}; run specedge embed`);
  }
  if (!hosts) throw new Error('the bundle has no graphs for hosts; run specedge embed');
  for (const [name, file] of Object.entries(files)) {
    const fault = await faultOf(folder, name, file);
    if (fault) throw new Error(`${join(folder, name)} ${fault}; copy the whole bundle again`);
  }
  return { ...others, files, hosts };
}

async function faultOf(folder, name, { size, sha256 }) {
  if (!/^\w/.test(name) || name.includes('..')) return 'is outside of the bundle';
  const path = join(folder, name);
  const found = await stat(path).catch(() => null);
  if (!found?.isFile()) return 'is missing';
  if (found.size !== size) return `has ${found.size} bytes, bundle.json says ${size}`;
  if (size > HASHED) return null;
  const hash = createHash('sha256').update(await readFile(path)).digest('hex');
  return hash === sha256 ? null : 'has another SHA-256 than bundle.json says';
}
