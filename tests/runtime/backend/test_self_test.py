"""Self-test of kernels at load: batch invariance and int8 products."""

import dataclasses
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest

from specedge import int8_products
from specedge.bundle import Bundle, store
from specedge.errors import DeviceError
from specedge.runtime.backend import self_test
from specedge.runtime.backend.model_session import ModelSession
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests import loader
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("own_costs")


class Moved:
    """Model whose passes of some lengths round differently, perhaps for some tokens only."""

    def __init__(self, model, lengths, tokens=None):
        self.model, self.lengths, self.tokens = model, lengths, tokens
        self.invariant_lengths = model.invariant_lengths

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, tokens):
        logits = self.model.forward(tokens).array()
        if len(tokens) in self.lengths and (self.tokens is None or {*tokens} == self.tokens):
            logits[-1, 3] = np.nextafter(logits[-1, 3], np.float32(np.inf))
        return Logits(logits)


@pytest.fixture(scope="module")
def bundle():
    return Bundle.read(store.embedded_folder())


@pytest.fixture(scope="module")
def target(bundle):
    return OrtModel(bundle, bundle.target, Device())


def test_batch_invariant_models_keep_all_lengths_without_notes(bundle, target):
    recorded = target.invariant_lengths
    assert self_test.verify_cpu_lengths(target, bundle.target) is None
    assert target.invariant_lengths == recorded
    assert target.length == 0


@pytest.mark.parametrize(
    ("lengths", "kept"), [((5,), (1, 2, 3)), ((3, 18), ()), ((18,), ()), ((1,), ())]
)
def test_lengths_from_first_non_invariant_length_are_excluded(bundle, target, lengths, kept):
    moved = Moved(target, lengths)
    said = self_test.verify_cpu_lengths(moved, bundle.target)
    assert moved.invariant_lengths == kept
    assert said is not None
    assert bundle.target.source.id in said


@pytest.mark.parametrize("recorded", [(1, 2, 3, 5, 9, 18), (2, 3, 5, 9, 18)])
def test_single_tokens_are_padded_where_they_differ_bitwise(bundle, monkeypatch, recorded):
    run = ModelSession.run

    def moved(self, bound, tokens, told=None):
        run(self, bound, tokens, told)
        if bound.length == 1:
            bound.arrays["logits"][..., 3] = np.nextafter(
                bound.arrays["logits"][..., 3], np.float32(np.inf)
            )

    monkeypatch.setattr(ModelSession, "run", moved)
    model = OrtModel(bundle, bundle.target, Device())
    model.invariant_lengths = recorded
    assert self_test.verify_cpu_lengths(model, bundle.target) is None
    assert model.invariant_lengths == (1, 2, 3, 5, 9, 18)
    pairs, rows = model.forward([5, 6]).array().copy(), model.with_new_cache()
    assert rows.forward([5]).array().shape == (1, bundle.target.vocab_size)
    assert np.array_equal(rows.forward([6]).array(), pairs[1:])
    assert rows.length == 2


def faulty_from(length, monkeypatch):
    """Plant a kernel fault: passes of at least this many tokens round differently."""
    forward = OrtModel.forward

    def moved(self, tokens, num_rows=None):
        logits = forward(self, tokens, num_rows).array()
        if len(tokens) >= length:
            logits[:, 3] = np.nextafter(logits[:, 3], np.float32(np.inf))
        return Logits(logits)

    monkeypatch.setattr(OrtModel, "forward", moved)


def test_first_passes_are_at_most_the_longest_invariant_length(monkeypatch):
    assert loader.load().max_first_length == 256
    monkeypatch.setattr(store, "costs_folder", lambda: store.data_folder() / "others")
    faulty_from(40, monkeypatch)
    pipeline = loader.load()
    assert pipeline.max_first_length <= 36
    read, forward = [], pipeline.target.forward
    monkeypatch.setattr(
        pipeline.target,
        "forward",
        lambda tokens, n=None: read.append(len(tokens)) or forward(tokens, n),
    )
    prompt = list(range(100, 138))
    texts = [
        pipeline.generate(prompt, 20, num_draft_tokens=k, ignore_eos=True).tokens for k in (0, 8)
    ]
    assert texts[0] == texts[1]
    assert max(read) < 40


def test_long_lengths_of_large_models_are_tested_by_tune_only(bundle, monkeypatch):
    monkeypatch.setattr(loader, "EXACT_BYTES", 0)
    for _ in range(2):
        pipeline = loader.load()
        assert pipeline.max_first_length == self_test.LONGEST
    assert self_test.longest_invariant_length(pipeline.target, bundle.target) == 256
    table = dataclasses.replace(pipeline.costs.table, invariant_length=256)
    pipeline.costs.store(table)
    assert loader.load().max_first_length == 256


def test_tested_lengths_are_stored(monkeypatch):
    loader.load()
    monkeypatch.setattr(
        self_test, "longest_invariant_length", lambda *_: pytest.fail("tried again")
    )
    assert loader.load().max_first_length == 256


@pytest.mark.parametrize(("num_experts", "kept"), [(8, (1, 2, 3)), (0, None)])
def test_experts_are_tested_with_rows_routed_to_the_same_expert(bundle, target, num_experts, kept):
    """Equal tokens do; a kernel may have other sums where an expert has many rows."""
    moved = Moved(target, (5,), {0})
    recorded = target.invariant_lengths
    facts = dataclasses.replace(bundle.target, num_experts=num_experts)
    said = self_test.verify_cpu_lengths(moved, facts)
    assert moved.invariant_lengths == (recorded if kept is None else kept)
    assert (said is None) is (kept is None)
    assert said is None or "(as for some kernels;" in said


@pytest.mark.parametrize(
    ("version", "num_experts", "dtype", "ops", "known"),
    [
        (
            "1.30.2",
            8,
            "int8",
            "gqa",
            "1.31; upgrade it, or use --ops onnx if the bundle has it",
        ),
        ("1.30.2", 8, "int8", "onnx", "as for some kernels"),
        ("1.30.2", 8, "float32", "gqa", "as for some kernels"),
        ("1.30.2", 0, "int8", "gqa", "as for some kernels"),
        ("1.31.0", 8, "int8", "gqa", "as for some kernels"),
        ("1.32.0", 8, "int4", "gqa", "onnxruntime issue 29853"),
    ],
)
def test_notes_name_the_known_defect_of_experts(
    monkeypatch, version, num_experts, dtype, ops, known
):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    facts = Mock(num_experts=num_experts, weights_dtype=dtype)
    assert self_test._known_cause(facts, ops).endswith(known)


def test_non_invariant_quantized_models_decode_plainly_unless_k_is_set(bundle, target):
    pipeline = Pipeline(bundle, load_tokenizer(bundle), Moved(target, ()), None)
    pipeline.target.invariant_lengths = ()
    for rounds, most in ((False, bundle.num_draft_tokens), (True, 0)):
        pipeline.target.rounds_inputs = rounds
        assert pipeline.max_planned_tokens == most


def test_k_is_at_most_the_kernels_row_limit(bundle, target):
    pipeline = Pipeline(bundle, load_tokenizer(bundle), Moved(target, ()), None)
    pipeline.target.invariant_lengths = target.invariant_lengths
    assert pipeline.max_planned_tokens > 4
    pipeline.target.fast_length = 5
    assert pipeline.max_planned_tokens == 4


def test_the_test_product_is_exact_on_this_machine():
    onnx = pytest.importorskip("onnx", reason="needs the export extra")
    model = onnx.load(int8_products.PRODUCT_GRAPH)
    weights = onnx.numpy_helper.to_array(model.graph.initializer[0])
    assert np.array_equal(weights, int8_products.weights())
    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]
    assert any(self_test._products_are_right(Device(unsigned=u)) for u in (False, True))


def test_saturating_processors_are_refused_for_quantized_weights(bundle, monkeypatch):
    saturated = int8_products.weights().copy()
    saturated[0] = 0
    monkeypatch.setattr(int8_products, "weights", lambda: saturated)
    self_test._products_are_right.cache_clear()
    rounded, whole = (dataclasses.replace(bundle.target) for _ in range(2))
    object.__setattr__(rounded, "weights_dtype", "int8")
    object.__setattr__(whole, "weights_dtype", "float16")
    try:
        with pytest.raises(DeviceError, match="computes wrong int8 products on this processor"):
            self_test.exact_device([whole, rounded], Device())
        assert self_test.exact_device([whole], Device()) == Device()
    finally:
        self_test._products_are_right.cache_clear()


@pytest.mark.parametrize("saturates", [False, True])
def test_unsigned_mode_is_used_only_where_products_saturate(bundle, monkeypatch, saturates):
    """Unsigned mode is slower, so it is used only where needed."""
    monkeypatch.setattr(
        self_test, "_products_are_right", lambda device: device.unsigned or not saturates
    )
    device = Device(threads=1)
    found = self_test.exact_device(bundle.models.values(), device)
    assert found == dataclasses.replace(device, unsigned=saturates)


def test_both_product_modes_are_exact_on_this_machine():
    """The one that this processor does not need, too; on AVX2 without VNNI only the unsigned."""
    assert self_test._products_are_right(Device(unsigned=True))


class DependentOnTotal(Moved):
    """Model whose attention depends on the total, as flash attention on Arm does."""

    def __init__(self, model, residue):
        super().__init__(model, ())
        self.residue = residue

    def forward(self, tokens):
        logits = self.model.forward(tokens).array()
        if len(tokens) > 1 and self.model.length % 8 == self.residue:
            logits[-1, 3] = np.nextafter(logits[-1, 3], np.float32(np.inf))
        return Logits(logits)


@pytest.mark.parametrize("residue", range(8))
def test_dependence_on_the_number_of_cache_rows_is_detected(bundle, target, residue):
    dependent = DependentOnTotal(target, residue)
    note = self_test.verify_cpu_lengths(dependent, bundle.target)
    assert note is not None
    assert dependent.invariant_lengths in ((), (1,))  # single tokens do not depend on it


def test_compared_passes_read_no_rows_that_others_wrote():
    for lengths in ((1, 2, 3, 5, 9, 18), (1, 2, 3, 5, 9), (2, 3), (1,), (18, 36, 128, 256)):
        passes = list(self_test.passes_to_compare(lengths))
        assert {length for length, _ in passes} == {*lengths}
        starts = [end - length for length, end in passes]
        assert starts == sorted(starts, reverse=True)
        assert min(starts) == 0
        assert all(end <= max(lengths) for _, end in passes)
