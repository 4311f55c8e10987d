"""Graph validation before ONNX Runtime opens a file: listed files only, no loops."""

import dataclasses
import json
import shutil

import pytest

from specedge.bundle import MANIFEST, Bundle, store
from specedge.bundle.graph_scan import GraphFormatError, external_files
from specedge.bundle.integrity import file_entry
from specedge.errors import BundleError

GRAPH, FUNCTION, TRAINING = 7, 25, 20  # fields of a model
NODE, INITIALIZER, SPARSE = 1, 5, 15  # of a graph
GRAPH_FILE = "target/decoder-gqa.onnx"


def field(number, content):
    """One field of a protobuf message: its number, its length and its bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value):
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def tensor(location, dims=b"\x08\x01"):
    """A tensor of one float whose data lie in another file."""
    entry = field(1, b"location") + field(2, location)
    return dims + b"\x10\x01" + field(8, b"stray") + field(13, entry) + b"\x70\x01"


def node(op, attribute=b""):
    return field(NODE, field(1, b"logits") + field(2, b"stray") + field(4, op) + attribute)


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded pair."""
    return shutil.copytree(store.embedded_folder(), tmp_path / "bundle")


def append(folder, piece, file=GRAPH_FILE):
    """Append a protobuf fragment to a graph file and update the manifest."""
    with (folder / file).open("ab") as graph:
        graph.write(piece)
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["files"][file] = dataclasses.asdict(file_entry(folder / file))
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return Bundle.read(folder)


def refusal(bundle):
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.sessions import Device

    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    with pytest.raises(BundleError) as caught:
        OrtModel(bundle, bundle.target, Device(), "gqa")
    assert GRAPH_FILE in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["stray.bin", "./weights.bin", "../draft/weights.bin", "a\nb"])
def test_a_graph_with_an_unlisted_file_is_refused(folder, name):
    (folder / "target/stray.bin").write_bytes(bytes(4096))
    bundle = append(folder, field(GRAPH, field(INITIALIZER, tensor(name.encode()))))
    message = refusal(bundle)
    assert f"refers to {name!r}, which the manifest does not list" in message
    assert message.isprintable()


def test_graph_can_reference_any_listed_file(folder):
    from specedge.bundle.graph_scan import check_graph

    bundle = append(folder, field(GRAPH, field(INITIALIZER, tensor(b"decoder.onnx"))))
    check_graph(bundle, GRAPH_FILE)


@pytest.mark.parametrize("op", ["If", "Loop", "Scan", "SequenceMap"])
def test_possibly_nonterminating_graph_is_rejected(folder, op):
    bundle = append(folder, field(GRAPH, node(op.encode())))
    assert f"a node {op}, which may not terminate" in refusal(bundle)


@pytest.mark.parametrize("number", [6, 11])
def test_a_node_with_a_subgraph_is_refused(folder, number):
    bundle = append(folder, field(GRAPH, node(b"BeamSearch", field(5, field(number, b"")))))
    assert "a node with a subgraph" in refusal(bundle)


def test_a_graph_of_another_file_format_is_refused(folder):
    from specedge.bundle.graph_scan import check_graph

    bundle = append(folder, b"")
    with pytest.raises(BundleError, match=r"must end in \.onnx"):
        check_graph(bundle, "tokenizer.json")


@pytest.mark.parametrize(
    "piece",
    [
        field(GRAPH, field(INITIALIZER, tensor(b"x"))),
        field(GRAPH, field(SPARSE, field(1, tensor(b"x")))),
        field(GRAPH, field(SPARSE, field(2, tensor(b"x")))),
        field(GRAPH, node(b"Constant", field(5, field(5, tensor(b"x"))))),
        field(GRAPH, node(b"Constant", field(5, field(10, tensor(b"x"))))),
        field(GRAPH, node(b"Constant", field(5, field(22, field(1, tensor(b"x")))))),
        field(GRAPH, node(b"Constant", field(5, field(23, field(1, tensor(b"x")))))),
        field(FUNCTION, field(7, field(5, field(5, tensor(b"x"))))),
    ],
)
def test_external_tensors_are_found_in_every_field(piece):
    assert external_files(piece) == {"x"}
    assert external_files(field(GRAPH, b"") + piece) == {"x"}


@pytest.mark.parametrize(
    "piece",
    [
        field(TRAINING, b""),
        field(FUNCTION, field(7, field(4, b"Loop"))),
        field(GRAPH, b"")[:-1],
        field(GRAPH, b"abc")[:-1],
        b"\x38\x01",  # the graph as a number
        b"\x3b\x3c",  # the graph as a group
        b"\x00",
        b"\xff" * 11,
        field(GRAPH, field(INITIALIZER, field(13, field(1, b"location") + field(1, b"offset")))),
    ],
)
def test_unusual_graph_files_are_refused(piece):
    with pytest.raises(GraphFormatError):
        external_files(piece)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_reader_agrees_with_onnx_on_every_embedded_graph(role):
    onnx = pytest.importorskip("onnx")
    bundle = Bundle.read(store.embedded_folder())
    for graph in bundle.models[role].graphs:
        path = bundle.path(graph.file)
        model = onnx.load(path, load_external_data=False)
        entries = [e for t in model.graph.initializer for e in t.external_data]
        assert external_files(path.read_bytes()) == {
            e.value for e in entries if e.key == "location"
        }
