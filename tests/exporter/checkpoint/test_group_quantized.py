"""Loading of GPTQ, AWQ, AutoRound and compressed-tensors checkpoints."""

import functools
import json
import shutil
from dataclasses import replace as replace_fields

import numpy as np
import pytest
import torch
from formats import edit, load, make, refusal, refusal_of_config, same, stored_numbers
from safetensors.torch import load_file, save_file

import packed
from packed import Scheme, make_packed, quantize_checkpoint
from specedge.exporter.checkpoint import checkpoints, loader, placeholders
from specedge.exporter.checkpoint.quantized_tensors import BlockLayout

SCHEMES = {
    "gptq": Scheme(),
    "gptq, symmetric": Scheme(symmetric=True, group_size=128),
    "gptq, act-order": Scheme(reordered=True),
    "gptq, 8 bits": Scheme(bits=8, group_size=64),
    "gptq, 8 bits, per channel": Scheme(bits=8, group_size=-1, symmetric=True),
    "gptq, per channel": Scheme(group_size=-1),
    "gptq, groups of 96": Scheme(group_size=96),
    "gptq_v2": Scheme("gptq_v2", group_size=16),
    "awq": Scheme("awq"),
    "awq, groups of 128": Scheme("awq", group_size=128),
    "autoround": Scheme("auto_round", symmetric=True),
    "autoround, gptq": Scheme("auto_round:auto_gptq", scale_type=torch.bfloat16),
    "autoround, awq": Scheme("auto_round:auto_awq"),
    "compressed-tensors": Scheme("pack-quantized", scale_type=torch.bfloat16),
    "compressed-tensors, symmetric": Scheme("pack-quantized", symmetric=True, group_size=128),
    "compressed-tensors, act-order": Scheme("pack-quantized", reordered=True, symmetric=True),
    "compressed-tensors, 8 bits": Scheme("pack-quantized", bits=8, group_size=-1, symmetric=True),
    "compressed-tensors, int8": Scheme("int-quantized", bits=8, group_size=-1, symmetric=True),
    "compressed-tensors, int8, asymmetric": Scheme("int-quantized", bits=8, group_size=-1),
}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get placeholders, too."""
    monkeypatch.setattr(placeholders, "SMALLEST", 1)


def kept_tensors(folder):
    return loader.quantized_tensors(checkpoints.find("target", str(folder), None))


def edit_state(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def test_packed_words_match_reference_libraries():
    """Words by AutoGPTQ 0.7.1, compressed-tensors 0.20.0 and AutoRound 0.16.1 (AWQ's layout)."""
    values = (np.arange(8)[:, None] * 5 + np.arange(16) * 3) % 16
    zeros = (np.arange(8)[:, None] * 3 + 2) % 15 + 1
    integers = packed.Integers(values, torch.ones(8, 1), zeros, np.zeros(16, np.int64))
    words = [
        1392285232, -629924168, -1488852091, 801727245, -57265958, 1948170322, 1105954095,
        -916255321, -1775183244, 515396348, -343593015, 1661839169, 819622942, -1202520938,
        -2060465821, 229065195,
    ]  # fmt: skip
    parts = packed.pack_quantized(integers, Scheme())
    assert parts["weight_packed"].flatten().tolist() == words
    assert parts["weight_zero_point"].tolist() == [[-1774204573]]
    parts = packed.gptq(integers, Scheme(), minus=1)
    assert parts["qweight"].T.flatten().tolist() == words
    assert parts["qzeros"].tolist() == [[-2060535726]]
    parts = packed.awq(integers, Scheme())
    assert parts["qweight"].flatten().tolist() == [
        972416160, 1814566867, -1621407226, -1030849223, -172908436, 686085023, 1528235714,
        -1907738123, -1317180376, -459235493, 399753870, 1241970097, 2100898020, -1603511529,
        -744518070, 113422717,
    ]  # fmt: skip
    assert parts["qzeros"].tolist() == [[-1815711853]]


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_the_published_integers_times_their_scales(name, tmp_path):
    scheme = SCHEMES[name]
    folder, expected = make_packed(tmp_path, scheme)
    loaded, notes = load(folder)
    assert same(loaded, expected)
    assert "the target is the quantized model" in notes
    tensors = kept_tensors(folder)
    assert len(tensors) == 2 * 7
    numbers = dict(expected.named_parameters())
    for tensor in tensors:
        matrix = numbers[f"{tensor.name}.weight"].detach().numpy()
        assert tensor.layout.bits == scheme.bits
        assert tensor.layout.has_zero_points != scheme.symmetric
        assert (tensor.order is not None) == scheme.reordered
        rows = np.random.default_rng(0).permutation(len(matrix))[:9]
        blocks = tensor.unpack(rows)
        zeros = 2 ** (scheme.bits - 1) if scheme.symmetric else blocks.zero_points[..., None]
        values = (blocks.integers.astype(np.float32) - zeros) * blocks.scales[..., None]
        inputs = slice(None) if tensor.order is None else tensor.order
        assert np.array_equal(values.reshape(len(rows), -1), matrix[rows][:, inputs])
        assert np.array_equal(tensor.dequantize(slice(3, 8)), matrix[3:8])


def test_int8_of_bitsandbytes_is_kept(tmp_path):
    scheme = Scheme("bitsandbytes", bits=8, group_size=-1, symmetric=True)
    folder, _ = make_packed(tmp_path, scheme)
    state, numbers = load_file(folder / "model.safetensors"), stored_numbers(load(folder)[0])
    tensors = kept_tensors(folder)
    assert {tensor.type_name for tensor in tensors} == {"bitsandbytes int8, per channel"}
    for tensor in tensors:
        key = f"{tensor.name}.weight"
        expected = state[key] * state[f"{tensor.name}.SCB"][:, None] * 7.874015718698502e-3
        assert torch.allclose(numbers[key], expected, rtol=2.0**-23, atol=0)
        assert np.array_equal(tensor.dequantize(slice(None)), numbers[key].numpy())


def test_non_power_of_two_groups_are_split_into_blocks(tmp_path):
    folder, _ = make_packed(tmp_path, Scheme(group_size=96), hidden=192)
    layouts = {tensor.layout.block_size for tensor in kept_tensors(folder)}
    assert layouts == {32}


def test_bits_in_the_file_count_scales_zero_points_and_order(tmp_path):
    folder, _ = make_packed(tmp_path, Scheme())
    tensor = next(t for t in kept_tensors(folder) if t.name.endswith("layers.0.mlp.down_proj"))
    width, size = tensor.shape
    groups = size // 32
    assert tensor.num_bytes == width * size // 2 + groups * width * 5 // 2 + 4 * size
    assert tensor.type_name == "GPTQ int4, groups of 32"


def test_gptq_zero_point_underflow_borrows_across_word(tmp_path):
    """gptqmodel subtracts from words, so that a zero point of 0 borrows from the next one."""
    folder, _ = make_packed(tmp_path, Scheme())
    key = "model.layers.0.mlp.up_proj.qzeros"

    def borrow(state):
        words = np.full(state[key].shape, 0x98765430, np.uint32) - np.uint32(0x11111111)
        state[key] = torch.from_numpy(words.view(np.int32))

    edit_state(folder, borrow)
    tensor = next(t for t in kept_tensors(folder) if f"{t.name}.qzeros" == key)
    zeros = tensor.unpack(np.arange(8)).zero_points[:, 0]
    assert zeros.tolist() == [0, 3, 4, 5, 6, 7, 8, 9]


OTHER_CONVENTIONS = {
    "gptq": (Scheme("gptq"), Scheme("gptq_v2")),
    "gptq, 8 bits": (Scheme("gptq", bits=8), Scheme("gptq_v2", bits=8)),
    "gptq_v2": (Scheme("gptq_v2"), Scheme("gptq")),
    "autoround": (Scheme("auto_round"), Scheme("gptq")),
    "autoround, gptq": (Scheme("auto_round:auto_gptq"), Scheme("gptq_v2")),
}


@pytest.mark.parametrize("name", OTHER_CONVENTIONS)
def test_symmetric_zero_points_are_the_middle_in_either_convention(name, tmp_path):
    stated, stored = (replace_fields(s, symmetric=True) for s in OTHER_CONVENTIONS[name])
    folder, expected = make_packed(tmp_path, stored)
    edit(folder / "config.json", quantization_config=stated.quantization_config)
    assert same(load(folder)[0], expected)
    assert not any(tensor.layout.has_zero_points for tensor in kept_tensors(folder))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gptq, act-order", "qzeros"),
        ("gptq, per channel", "qzeros"),
        ("gptq_v2", "qzeros"),
        ("awq", "qzeros"),
        ("autoround, awq", "qzeros"),
        ("compressed-tensors", "weight_zero_point"),
        ("compressed-tensors, int8, asymmetric", "weight_zero_point"),
    ],
)
def test_zero_points_that_contradict_a_symmetric_config_are_refused(name, part, tmp_path):
    folder, _ = make_packed(tmp_path, SCHEMES[name])
    stated = replace_fields(SCHEMES[name], symmetric=True)
    edit(folder / "config.json", quantization_config=stated.quantization_config)
    message = refusal(folder)
    assert f"proj.{part} has the zero point " in message
    assert "the quantization config is symmetric" in message


@pytest.mark.parametrize(
    ("how", "exceptions"),
    [
        ("gptq", {"dynamic": {r"+:.*up_proj": {"sym": False}}}),
        ("auto_round", {"extra_config": {"model.layers.0.mlp.up_proj": {"sym": False}}}),
    ],
)
def test_zero_points_of_modules_with_another_scheme_are_read(how, exceptions, tmp_path):
    folder, expected = make_packed(tmp_path, Scheme(how))
    stated = Scheme(how, symmetric=True, config=exceptions).quantization_config
    edit(folder / "config.json", quantization_config=stated)
    assert same(load(folder)[0], expected)


def test_per_module_bits_and_groups_are_supported(tmp_path):
    folder, expected = make_packed(tmp_path, Scheme(symmetric=True))
    eight = Scheme("gptq", bits=8, group_size=64, symmetric=True)
    names = "model.layers.1.mlp.down_proj"
    other, other_model = make_packed(tmp_path / "other", eight)
    state = {k: t for k, t in load_file(other / "model.safetensors").items() if names in k}
    edit_state(folder, lambda whole: whole.update(state))
    with torch.no_grad():
        matrix = other_model.get_parameter(f"{names}.weight")
        expected.get_parameter(f"{names}.weight").copy_(matrix)
    loaded, _ = load(folder)
    assert same(loaded, expected)


def test_config_beside_config_json_is_read(tmp_path):
    folder, expected = make_packed(tmp_path, Scheme(symmetric=True, group_size=128))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    stated = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    old = {key: stated[key] for key in ("bits", "group_size", "desc_act", "sym")}
    (folder / "quantize_config.json").write_text(json.dumps(old), "utf-8")
    assert same(load(folder)[0], expected)
    edit(folder / "quantize_config.json", bits=3)
    assert "GPTQ of 3 bits" in refusal(folder)


def test_autoawqs_config_beside_config_json_is_read(tmp_path):
    folder, expected = make_packed(tmp_path, Scheme("awq"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old), "utf-8")
    assert same(load(folder)[0], expected)


def test_matrices_of_gpt2_are_transposed(tmp_path):
    folder, _ = make(tmp_path, "gpt2")
    names = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    edit_state(folder, lambda state: state.update(
        {k: t.T.contiguous() for k, t in state.items() if k.endswith(names)}
    ))  # fmt: skip
    matrices = quantize_checkpoint(folder, Scheme(), lambda key: key.endswith(names))
    loaded, _ = load(folder)
    numbers = stored_numbers(loaded)
    assert matrices
    for key, matrix in matrices.items():
        assert torch.equal(numbers[key], matrix.T)


def test_experts_are_joined_and_can_be_kept(tmp_path):
    folder, _ = make(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    matrices = quantize_checkpoint(folder, Scheme(), lambda key: ".experts." in key)
    loaded, _ = load(folder)
    numbers = stored_numbers(loaded)
    for key, matrix in matrices.items():
        layer, _, rest = key.partition(".experts.")
        expert, name, _ = rest.split(".")
        if name == "down_proj":
            part = numbers[f"{layer}.experts.down_proj"][int(expert)]
        else:
            joined = numbers[f"{layer}.experts.gate_up_proj"][int(expert)]
            part = joined[:32] if name == "gate_proj" else joined[32:]
        assert torch.equal(part, matrix)
    kept = {f"{tensor.name}.weight": tensor for tensor in kept_tensors(folder)}
    assert kept.keys() == matrices.keys()
    for key, tensor in kept.items():
        assert tensor.layout == BlockLayout(4, 32, has_zero_points=True)
        assert np.array_equal(tensor.dequantize(slice(None)), matrices[key].numpy())


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Folders of checkpoints in each format."""

    @functools.cache
    def folder(how):
        scheme = Scheme(how, bits=8 if how == "int-quantized" else 4)
        return make_packed(tmp_path_factory.mktemp("sound"), scheme)[0]

    return folder


def remove(part):
    def change(state):
        del state[f"model.layers.0.mlp.up_proj.{part}"]

    return change


def replace(part, make_tensor):
    def change(state):
        key = f"model.layers.0.mlp.up_proj.{part}"
        state[key] = make_tensor(state[key]).contiguous()

    return change


def add(name):
    return lambda state: state.update({f"model.layers.0.mlp.{name}": torch.ones(3)})


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ("gptq", remove("scales"), "lacks model.layers.0.mlp.up_proj.scales; download it again"),
        ("gptq", remove("qzeros"), "lacks model.layers.0.mlp.up_proj.qzeros"),
        ("gptq", remove("qweight"), "up_proj.g_idx is a part of a weight in an unsupported"),
        ("gptq", replace("qzeros", lambda t: t[:, :-1]), "parts of model.layers.0.mlp.up_proj do"),
        ("gptq", replace("qweight", lambda t: t[:, :-1]), "do not fit each other"),
        ("gptq", replace("qweight", lambda t: t[:-1]), "do not fit each other"),
        ("gptq", replace("qweight", lambda t: t[0]), "do not fit each other"),
        ("gptq", replace("qweight", lambda t: t.long()), "do not fit each other"),
        ("gptq", replace("scales", lambda t: t.int()), "scales is stored in int32"),
        ("gptq", replace("scales", lambda t: t[:0]), "do not fit each other"),
        ("gptq", replace("g_idx", lambda t: t + 7), "g_idx does not name 4 groups of 32 inputs"),
        ("gptq", replace("g_idx", lambda t: t * 0), "g_idx does not name 4 groups of 32 inputs"),
        ("gptq", replace("g_idx", lambda t: t - 2), "g_idx does not name"),
        ("gptq", replace("g_idx", lambda t: t[:-1]), "do not fit each other"),
        ("gptq", add("up_proj.had_matrix"), "up_proj.had_matrix is a part of a weight in an"),
        ("awq", remove("scales"), "lacks model.layers.0.mlp.up_proj.scales"),
        ("awq", replace("qweight", lambda t: t[:, :-1]), "do not fit each other"),
        ("awq", replace("qzeros", lambda t: t[:-1]), "do not fit each other"),
        ("awq", add("act_fn.scales"), "act_fn.scales is a part of a weight in an unsupported"),
        ("pack-quantized", remove("weight_scale"), "lacks model.layers.0.mlp.up_proj.weight_scale"),
        ("pack-quantized", remove("weight_shape"), "lacks model.layers.0.mlp.up_proj.weight_shape"),
        ("pack-quantized", replace("weight_shape", lambda t: t * 2), "do not fit each other"),
        ("pack-quantized", replace("weight_packed", lambda t: t[:-1]), "do not fit each other"),
        ("pack-quantized", replace("weight_scale", lambda t: t[:, :-1]), "do not fit each other"),
        ("pack-quantized", replace("weight_zero_point", lambda t: t[:-1]), "do not fit each other"),
        ("int-quantized", replace("weight_scale", lambda t: t[:-1]), "do not fit each other"),
        ("int-quantized", add("gate_proj.weight_mask"), "weight_mask is a part of a weight in an"),
    ],
)  # fmt: skip
def test_inconsistent_tensors_are_one_line_error(how, change, message, sound, tmp_path):
    folder = shutil.copytree(sound(how), tmp_path / "checkpoint")
    edit_state(folder, change)
    assert message in refusal(folder)


def test_truncated_file_is_refused(tmp_path):
    folder, _ = make_packed(tmp_path, Scheme())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors cannot be read" in refusal(folder)


def test_float_weights_with_a_quantization_config_are_refused(tmp_path):
    folder, _ = make(tmp_path, "llama")
    edit(folder / "config.json", quantization_config=Scheme().quantization_config)
    assert "says GPTQ, and its files contain no such weights" in refusal(folder)


CHANNEL = Scheme("int-quantized", bits=8, group_size=-1).quantization_config
GROUP = CHANNEL["config_groups"]["group_0"]


def groups(**weights):
    return {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "GPTQ of 2 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "GPTQ of 4 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ's layout 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's layout 'gemv'"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "AWQ's layout 'gemv_fast'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "AWQ's layout 'llm-awq'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "'auto_round:fp8'"),
        ({"quant_method": "auto-round", "bits": 2}, "AutoRound of 2 bits"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "AutoRound's data type 'mx_fp'"),
        ({"quant_method": "auto-round", "act_bits": 8}, "AutoRound with activations of 8 bits"),
        ({"quant_method": "auto-round", "rotation_config": {"a": 1}}, "with rotation_config"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups"),
        (CHANNEL | {"format": "nvfp4-pack-quantized"}, "the format 'nvfp4-pack-quantized'"),
        (CHANNEL | {"format": "float-quantized"}, "the format 'float-quantized'"),
        (CHANNEL | groups(type="float"), "weights in float8"),
        (CHANNEL | groups(num_bits=2), "weights in int2"),
        (CHANNEL | {"config_groups": {"g": {"format": "marlin-24"}}}, "the format 'marlin-24'"),
        (CHANNEL | {"config_groups": {"g": None}}, "weights are not described"),
        (CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (CHANNEL | {"transform_config": {"config_groups": {}}}, "with transform_config"),
    ],
)
def test_unsupported_variants_are_rejected_by_name(config, name, tmp_path):
    _, message = refusal_of_config(tmp_path, config)
    assert name in message
    assert "specify the original checkpoint" in message


def test_activation_scales_are_ignored(tmp_path):
    scheme = Scheme("int-quantized", bits=8, group_size=-1, symmetric=True)
    folder, expected = make_packed(tmp_path, scheme)
    edit_state(folder, add("up_proj.input_scale"))
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    edit_state(folder, lambda state: state.update(scale))
    assert same(load(folder)[0], expected)
