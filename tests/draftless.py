"""The embedded target as a bundle without a draft model."""

import shutil
from dataclasses import replace

from specedge.bundle import MANIFEST, Bundle, store


def make_draftless(folder):
    """Write the bundle to a new folder; nothing is exported."""
    embedded = Bundle.read(store.embedded_folder())
    files = {name: file for name, file in embedded.files.items() if not name.startswith("draft/")}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(embedded.path(name), folder / name)
    bundle = replace(embedded, models={"target": embedded.target}, files=files)
    (folder / MANIFEST).write_text(bundle.to_json(), "utf-8")
    return Bundle.read(folder)
