"""Packages as pip leaves them, with nothing in them."""

from importlib import metadata


def only(monkeypatch, folder):
    everywhere = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: everywhere(path=[str(folder)]))


def install(folder, name, version, module="onnxruntime"):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
