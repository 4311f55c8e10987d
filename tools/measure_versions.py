"""How far the logits of two versions of ONNX Runtime are apart. Development only.

    python tools/measure_versions.py OTHER_PYTHON [--bundle FOLDER ...]

OTHER_PYTHON is of an environment that has the other version and NumPy. Golden transcripts keep ten
times the largest difference from every decision: `LEAST_MARGIN` in specedge/verification/golden.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

from specedge import int8_products
from specedge.bundle import Bundle, store

LENGTHS = (64, 5, 1, 1, 2, 5)  # tokens of a prompt, then of verify passes and single steps
SCRIPT = """
import sys
import numpy as np, onnxruntime as ort
graph, output, unsigned, shapes, *lengths = sys.argv[1:]
options = ort.SessionOptions()
options.log_severity_level = 3
if unsigned and tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 30):
    options.add_session_config_entry(unsigned, "1")
session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
caches = {v.name: np.zeros(v.shape[1:], np.float32)[None] for v in session.get_inputs()
          if v.name.startswith("past_key_values.")}
names, past, found = [v.name for v in session.get_outputs()], 0, {}
rng = np.random.default_rng(0)
for i, length in enumerate(map(int, lengths)):
    given = {"input_ids": rng.integers(0, int(shapes), (1, length)), "logits_from": np.array([0]),
             "past_length": np.array([past])}
    made = dict(zip(names, session.run(None, given | caches)))
    caches = {name: made[name.replace("past_key_values", "present")] for name in caches}
    found[f"pass{i}"], past = made["logits"], past + length
np.savez(output, version=ort.__version__, **found)
"""


def logits(python: str, bundle: Bundle, role: str, unsigned: str) -> dict[str, np.ndarray]:
    """What a Python's ONNX Runtime makes of some passes, by pass, and its version."""
    model = bundle.models[role]
    graph = bundle.path(model.graph("decoder", model.cpu_ops).file)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.npz")
        lengths = map(str, LENGTHS)
        told = [str(graph), str(output), unsigned, str(model.vocab_size), *lengths]
        subprocess.run([python, "-c", SCRIPT, *told], check=True)
        return dict(np.load(output))


@click.command()
@click.argument("other_python")
@click.option("--bundle", "bundles", multiple=True, help="[default: the embedded pair]")
@click.option("--unsigned", is_flag=True, help="Multiply bytes unsigned, where that can be asked.")
def main(other_python: str, bundles: tuple[str, ...], unsigned: bool) -> None:
    """Compare passes of each model's decoder in this environment and another."""
    option = int8_products.UNSIGNED_OPTION if unsigned else ""
    for folder in map(Path, bundles or (str(store.embedded_folder()),)):
        bundle = Bundle.read(folder)
        for role in bundle.models:
            ours, theirs = (
                logits(python, bundle, role, option) for python in (sys.executable, other_python)
            )
            versions = " and ".join(str(found.pop("version")) for found in (ours, theirs))
            apart = [float(np.abs(ours[name] - theirs[name]).max()) for name in ours]
            size = max(float(np.abs(row).max()) for row in ours.values())
            click.echo(
                f"{folder} {role}, {bundle.models[role].weights_dtype}, {versions}: logits of up "
                f"to {size:.1f} are at most {max(apart):.1e} apart"
            )


if __name__ == "__main__":
    main()
