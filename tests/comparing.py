"""A model exported into a folder, and its graphs compared with PyTorch."""

from checkpoints import make_config, make_model
from specedge.exporter import (
    Progress,
    model_files,
    parity,
    reference,
)
from specedge.exporter.checkpoints import Loaded
from specedge.exporter.playing import Player
from specedge.exporter.sources import Sources

CONTEXT = 96


def traced(model, folder, ops="onnx", context=CONTEXT):
    loaded = Loaded(model, "float32", Sources())
    part = model_files.measured("target", loaded, context, 4, 512, folder, Progress())
    model_files.write([part], ops)
    return Player(folder, part.lengths, part.shape, ops)


def measure(model, player):
    references = reference.references(model, Sources(), player.geometry, 512)
    found = parity.measure("target", references, player)
    assert found.differing == []
    return found.parity


def model_of(kind="llama", **options):
    model = make_model(make_config(kind, kv_heads=2, context=CONTEXT, **options))
    model.set_attn_implementation("eager")
    return model
