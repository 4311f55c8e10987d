"""Dependencies between packages, and what an import loads."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specedge

ROOT = Path(specedge.__file__).parent
EXPORT = {
    "torch", "transformers", "optimum", "safetensors", "huggingface_hub",
    "onnx", "onnxscript", "onnx_ir", "ml_dtypes",
}  # fmt: skip


def imports(folder):
    """Every module or name that a folder imports, by its full name, with its file."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield from imports_of(path)


@functools.cache
def imports_of(path):
    return list(_imports_of(path))


def _imports_of(path):
    package = ["specedge", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((path.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((path.name, f"{module}.{alias.name}") for alias in node.names)


def test_exporter_and_runtime_do_not_import_each_other():
    assert ("parity.py", "specedge.exporter.verification.runner.Runner") in list(
        imports("exporter")
    )
    assert not [i for i in imports("exporter") if i[1].startswith("specedge.runtime")]
    assert not [i for i in imports("runtime") if i[1].startswith("specedge.exporter")]


def test_the_runtime_imports_no_package_of_the_export_extra():
    assert not [i for i in imports("runtime") if i[1].split(".")[0] in EXPORT]


def test_only_sessions_import_onnxruntime_in_the_runtime():
    names = [file for file, module in imports("runtime") if module.startswith("onnxruntime")]
    assert not names  # backend/sessions.py imports it by name, to turn its absence into our error


def test_server_imports_runtime_and_only_serve_command_imports_server():
    assert ("app.py", "specedge.runtime.requests.pipeline.Pipeline") in list(imports("serve"))
    strangers = ("specedge.exporter", "specedge.cli")
    assert not [i for i in imports("serve") if i[1].startswith(strangers)]
    serve = "specedge.serve"
    importers = {
        name
        for name, imported in modules().items()
        if not name.startswith(serve) and any(other.startswith(serve) for other in imported)
    }
    assert importers == {"specedge.cli.serve", "specedge.ray"}


def test_ray_is_imported_by_its_command_only():
    assert not [(name, i) for name, i in imports("") if i == "ray" or i.startswith("ray.")]
    importers = {name for name, imported in modules().items() if "specedge.ray" in imported}
    assert {name.rpartition(".")[0] for name in importers} <= {"specedge.cli"}


def modules():
    """Return every module of specedge by its full name, with the modules that it imports."""
    paths = {
        ".".join(["specedge", *path.relative_to(ROOT).with_suffix("").parts]): path
        for folder in ("*.py", *(f"{p.name}/**/*.py" for p in ROOT.iterdir() if p.is_dir()))
        for path in sorted(ROOT.glob(folder))
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imported = {}
    for name, path in paths.items():
        names = {full for _, full in imports_of(path)}
        owners = {full if full in paths else full.rpartition(".")[0] for full in names}
        imported[name] = (owners & paths.keys()) - {name}
    return imported


def test_wheel_contains_every_python_package():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))
    found = {
        ".".join(["specedge", *path.relative_to(ROOT).parent.parts])
        for folder in ("", *(p.name for p in ROOT.iterdir() if p.is_dir()))
        for path in (ROOT / folder).glob("**/__init__.py" if folder else "__init__.py")
    }
    assert found == {*project["tool"]["setuptools"]["packages"]}


def test_there_are_no_import_cycles():
    left = modules()
    assert "specedge.runtime.decoding.verification" in left["specedge.runtime.decoding.decoding"]
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert not left


def package_of(module):
    """Return the package of a module; "" for modules directly in specedge, exporter and runtime."""
    parts = module.split(".")[1:]
    package = "/".join(parts[: 1 + (parts[:1] in (["exporter"], ["runtime"]))])
    is_package = (ROOT / package).is_dir() and package not in ("exporter", "runtime", "models")
    return package if is_package else ""


def table_of_packages():
    """Return the packages in docs/architecture.md in order: imported packages and libraries."""
    text = (ROOT.parent / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z/]+)/` \| [^|]+ \| ([^|]*)\| ([^|]*)\|$", text, re.MULTILINE)
    table = {}
    for name, imported, libraries in rows:
        name = name.removeprefix("specedge/")
        folder = name.partition("/")[0]
        siblings = {other.rpartition("/")[2]: other for other in table}
        siblings |= {n.rpartition("/")[2]: n for n in table if n.startswith(f"{folder}/")}
        words = {word for word in re.split(r"[ ,]+", imported) if word}
        packages = {*table} if words == {"everything"} else {siblings[word] for word in words}
        table[name] = (packages, {w.lower() for w in re.split(r"[ ,]+", libraries) if w})
    return table


def test_packages_import_what_the_architecture_document_lists():
    imported = {}
    for module, others in modules().items():
        if package := package_of(module):
            packages = {package_of(other) for other in others} - {package, ""}
            imported.setdefault(package, set()).update(packages)
    libraries = {
        package: {
            top.lower()
            for _, module in imports(package)
            if (top := module.split(".")[0]) != "specedge" and top not in sys.stdlib_module_names
        }
        for package in imported
    }
    table = table_of_packages()
    assert {*table} == {*imported}
    assert {p: (imported[p] if p != "cli" else {*table} - {"cli"}) for p in imported} == {
        package: packages for package, (packages, _) in table.items()
    }
    assert libraries == {package: names for package, (_, names) in table.items()}


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in result.stdout.split()}


def test_importing_specedge_loads_neither_numpy_nor_onnxruntime():
    assert not loaded_after("import specedge") & {"numpy", "onnxruntime", "tokenizers", "click"}


def test_the_runtime_and_the_commands_load_no_optional_package():
    names = "from specedge import load; import specedge.runtime, specedge.cli, specedge.ray"
    optional = {"ray", "scipy", "starlette", "uvicorn", "prometheus_client"}
    assert not loaded_after(names) & (EXPORT | optional)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = specedge.nothing
    assert all(hasattr(specedge, name) for name in dir(specedge))


def test_only_the_audit_and_resampling_load_scipy():
    for package, file in (("verification", "statistics.py"), ("runtime", "wav.py")):
        names = {name for name, module in imports(package) if module.startswith("scipy")}
        assert names == {file}
    assert "scipy" not in loaded_after("import specedge.runtime.audio.transcriber")
