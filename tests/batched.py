"""Bundles with batched graphs, for tests of the runtime."""

import shutil
from dataclasses import replace

from specedge.bundle import MANIFEST, Bundle
from specedge.bundle.integrity import file_entry
from specedge.exporter.graph.batched import add_batched_graphs


def copy_with_batched_graphs(bundle, folder):
    """Copy a bundle and add batched graphs to its models."""
    shutil.copytree(bundle.folder, folder, dirs_exist_ok=True)
    models = {role: add_batched_graphs(model, folder) for role, model in bundle.models.items()}
    paths = [graph.file for model in models.values() for graph in model.graphs]
    files = {path: bundle.files.get(path) or file_entry(folder / path) for path in paths}
    changed = replace(bundle, **models, files=bundle.files | files)
    (folder / MANIFEST).write_text(changed.to_json(), "utf-8")
    return Bundle.read(folder)
