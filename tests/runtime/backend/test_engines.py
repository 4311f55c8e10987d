"""Engines on disk: their keys, how they appear whole, and what is said where there is none."""

import dataclasses
import threading

import pytest

from specedge.bundle import Bundle, store
from specedge.bundle.manifest import FileEntry
from specedge.errors import DeviceError
from specedge.runtime.backend.cuda import engine_builder, engines, tensorrt, tensorrt_rtx
from specedge.runtime.backend.cuda.engines import ENGINE, EngineKey, EnginePlatform
from specedge.runtime.backend.sessions import Device

PLATFORM = EnginePlatform("tensorrt", "1.31.1", "10.16.1", "sm89", "590.44", "R39.1.0")
WHOLE = EngineKey("a" * 64, "b" * 64, PLATFORM)


@pytest.fixture
def bundle():
    return Bundle.read(store.embedded_folder())


def built(folder, key, text=b"engine"):
    with engines.publish(folder, key) as place:
        place().write_bytes(text)
    return folder / key.name / ENGINE


@pytest.mark.parametrize("field", [*EngineKey.__dataclass_fields__][:2])
def test_graph_and_weights_are_part_of_the_cache_key(field):
    assert dataclasses.replace(WHOLE, **{field: "c" * 64}).name != WHOLE.name


@pytest.mark.parametrize("field", [*EnginePlatform.__dataclass_fields__])
def test_version_and_gpu_are_part_of_the_cache_key(field):
    changed = dataclasses.replace(PLATFORM, **{field: "other"})
    assert dataclasses.replace(WHOLE, platform=changed).name != WHOLE.name
    assert dataclasses.replace(WHOLE, platform=PLATFORM).name == WHOLE.name


def test_each_graph_of_a_pair_has_an_engine_of_its_own(bundle):
    keys = {
        engines.key_of(bundle, model, graph, PLATFORM).name
        for model in bundle.models.values()
        for graph in model.graphs
    }
    assert len(keys) == sum(len(model.graphs) for model in bundle.models.values())


def test_an_engine_is_renamed_when_complete(tmp_path):
    with engines.publish(tmp_path, WHOLE) as place:
        place().write_bytes(b"half")
        assert not (tmp_path / WHOLE.name).exists()
        place().write_bytes(b"whole")
    assert (tmp_path / WHOLE.name / ENGINE).read_bytes() == b"whole"
    assert '"gpu": "sm89"' in (tmp_path / WHOLE.name / engines.KEY).read_text("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == [WHOLE.name]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail():
        with engines.publish(tmp_path, WHOLE) as new:
            new().write_bytes(b"half")
            raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_wrote_nothing_is_an_error(tmp_path):
    wanted = pytest.raises(DeviceError, match=r"wrote no engine\.onnx")
    with wanted, engines.publish(tmp_path, WHOLE):
        pass
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_there_is_not_built_again(tmp_path):
    built(tmp_path, WHOLE)
    with engines.publish(tmp_path, WHOLE) as place:
        assert place is None


def test_a_folder_without_its_engine_is_replaced(tmp_path):
    built(tmp_path, WHOLE).unlink()
    assert built(tmp_path, WHOLE, b"new").read_bytes() == b"new"


def test_concurrent_builds_are_locked(tmp_path):
    found = []

    def other():
        try:
            built(tmp_path, WHOLE)
        except DeviceError as error:
            found.append(str(error))

    with engines.publish(tmp_path, WHOLE) as place:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        place().write_bytes(b"first")
    assert "another process is building" in found[0]
    assert (tmp_path / WHOLE.name / ENGINE).read_bytes() == b"first"


def test_engines_of_the_bundle_take_precedence(bundle, tmp_path):
    key = engines.key_of(bundle, bundle.target, bundle.target.graph("step", "onnx"), PLATFORM)
    assert engines.find(bundle, key) is None
    cached = built(engines.cache_folder(), key)
    assert engines.find(bundle, key) == cached
    folder = engine_builder._copy_bundle(bundle, tmp_path / "copy")
    own = built(folder, key)
    assert engines.find(Bundle.read(tmp_path / "copy"), key) == own


def test_a_copy_of_another_bundle_is_not_written_into(bundle, tmp_path):
    folder = engine_builder._copy_bundle(bundle, tmp_path / "copy")
    assert engine_builder._copy_bundle(bundle, tmp_path / "copy") == folder
    files = {**bundle.files, bundle.tokenizer: FileEntry(1, "0" * 64)}
    other = dataclasses.replace(bundle, files=files)
    with pytest.raises(DeviceError, match="contains another bundle"):
        engine_builder._copy_bundle(other, tmp_path / "copy")


def test_a_missing_engine_is_named_with_the_command_that_builds_it(bundle):
    target = bundle.target
    with pytest.raises(DeviceError) as caught:
        engines.require(bundle, target, target.graph("verify", "onnx"), PLATFORM, "tensorrt:1")
    said = str(caught.value)
    assert f"no engine of {target.graph('verify', 'onnx').file} for tensorrt:1 " in said
    assert "(sm89, TensorRT 10.16.1, driver 590.44, JetPack R39.1.0)" in said
    assert said.endswith(f"specedge build --bundle {bundle.folder} --device tensorrt:1")


def test_a_graph_of_any_length_has_no_engine(bundle):
    decoder = bundle.target.graph("decoder", "onnx")
    with pytest.raises(DeviceError, match=r"fixed-shape graphs only, .*'decoder'"):
        engines.require(bundle, bundle.target, decoder, PLATFORM, "rtx")


@pytest.mark.parametrize("number", [101501, 101600, 101601])
def test_tensorrt_10_15_and_10_16_are_taken(number):
    assert tensorrt.check_version(number) == f"10.{number // 100 % 100}.{number % 100}"


@pytest.mark.parametrize(
    ("number", "shown"), [(101401, "10.14.1"), (101700, "10.17.0"), (110406, "11.4.6")]
)
def test_another_tensorrt_is_one_clear_error(number, shown):
    with pytest.raises(DeviceError, match=rf"needs TensorRT 10\.15 or 10\.16, and {shown} is"):
        tensorrt.check_version(number)


def test_jetsons_name_their_system():
    line = "# R39 (release), REVISION: 1.0, GCID: 1, BOARD: generic, EABI: aarch64"
    assert tensorrt.tegra_version(line) == "R39.1.0"
    assert tensorrt.tegra_version("something else") is None


@pytest.mark.parametrize(
    ("ops", "kinds"),
    [("onnx-fp16", "100"), ("onnx-bf16", "010"), ("onnx", "000"), ("onnx-qdq", "101")],
)
def test_tensorrt_computes_in_the_graph_variants_type_and_writes_beside_the_engine(
    tmp_path, ops, kinds
):
    found = tensorrt.build_options(2, ops, tmp_path / ENGINE)
    assert "".join(found[f"trt_{kind}_enable"] for kind in ("fp16", "bf16", "int8")) == kinds
    assert found["device_id"] == "2"
    assert found["trt_ep_context_file_path"] == str(tmp_path / ENGINE)
    assert found["trt_engine_cache_path"] == "."
    assert not [name for name in found if "profile" in name]


def test_a_missing_rtx_plug_in_is_reported(monkeypatch):
    ort = pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    monkeypatch.setattr(tensorrt_rtx, "MODULE", "no_such_plug_in")
    with pytest.raises(DeviceError, match=r"needs NVIDIA's plug-in onnxruntime-ep-.*: pip install"):
        tensorrt_rtx.platform(ort, 0)
    with pytest.raises(DeviceError, match=r"compiles for sm86, .*, not for 'sm90'"):
        tensorrt_rtx.platform(ort, 0, "sm90")


def test_engines_are_for_devices_that_need_them():
    with pytest.raises(DeviceError, match="cuda runs graphs as they are"):
        engine_builder.build_engines(store.embedded_folder(), "cuda")
    with pytest.raises(DeviceError, match="TensorRT builds engines for this machine's GPU only"):
        Device("tensorrt").platform("sm89")


@pytest.mark.parametrize("device", ["rtx", "tensorrt:1"])
def test_weights_of_integers_need_a_graph_variant_of_their_own(device):
    said = (
        f"{device} runs none of onnx, gqa of its graph variants; export the pair again with "
        "--compute qdq"
    )
    with pytest.raises(DeviceError, match=said):
        engine_builder.build_engines(store.embedded_folder(), device)


def test_libraries_of_tensorrt_are_loaded_before_its_provider(monkeypatch):
    done = []

    class Ort:
        class SessionOptions:
            def add_session_config_entry(self, *entry):
                pass

        def preload_dlls(self, cudnn):
            done.append(("preload", cudnn))

    monkeypatch.setattr(tensorrt, "inference_session", lambda *_: done.append("session"))
    tensorrt.open_session(Ort(), "engine.onnx", 0)
    assert done == [("preload", True), "session"]
