"""Engine cache: keys, atomic publication and errors for missing engines."""

import dataclasses
import threading

import pytest

from specedge.bundle import Bundle, store
from specedge.bundle.manifest import FileEntry
from specedge.diagnosis import plug_in
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


def test_each_part_of_a_cache_key_changes_its_name():
    parts = dict.fromkeys(("graph", "weights"), "c" * 64)
    keys = [dataclasses.replace(WHOLE, **{field: value}) for field, value in parts.items()]
    for field in EnginePlatform.__dataclass_fields__:
        keys.append(
            dataclasses.replace(WHOLE, platform=dataclasses.replace(PLATFORM, **{field: "other"}))
        )
    assert len({key.name for key in (WHOLE, *keys)}) == 1 + len(keys)
    assert dataclasses.replace(WHOLE, platform=PLATFORM).name == WHOLE.name


def test_an_engine_is_renamed_when_complete(tmp_path):
    with engines.publish(tmp_path, WHOLE) as place:
        place().write_bytes(b"half")
        assert not (tmp_path / WHOLE.name).exists()
        place().write_bytes(b"whole")
    assert (tmp_path / WHOLE.name / ENGINE).read_bytes() == b"whole"
    assert '"gpu": "sm89"' in (tmp_path / WHOLE.name / engines.KEY).read_text("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == [WHOLE.name]


def test_failed_build_leaves_no_files(tmp_path):
    def fail():
        with engines.publish(tmp_path, WHOLE) as new:
            new().write_bytes(b"half")
            raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        fail()
    assert not list(tmp_path.iterdir())


def test_missing_compiler_output_is_an_error(tmp_path):
    wanted = pytest.raises(DeviceError, match=r"wrote no engine\.onnx")
    with wanted, engines.publish(tmp_path, WHOLE):
        pass
    assert not list(tmp_path.iterdir())


def test_existing_engine_is_not_rebuilt(tmp_path):
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


def test_existing_copy_of_another_bundle_is_rejected(bundle, tmp_path):
    folder = engine_builder._copy_bundle(bundle, tmp_path / "copy")
    assert engine_builder._copy_bundle(bundle, tmp_path / "copy") == folder
    files = {**bundle.files, bundle.tokenizer: FileEntry(1, "0" * 64)}
    other = dataclasses.replace(bundle, files=files)
    with pytest.raises(DeviceError, match="contains another bundle"):
        engine_builder._copy_bundle(other, tmp_path / "copy")


def test_missing_engine_error_includes_build_command(bundle):
    target = bundle.target
    with pytest.raises(DeviceError) as caught:
        engines.require(bundle, target, target.graph("verify", "onnx"), PLATFORM, "tensorrt:1")
    said = str(caught.value)
    assert f"no engine of {target.graph('verify', 'onnx').file} for tensorrt:1 " in said
    assert "(sm89, TensorRT 10.16.1, driver 590.44, JetPack R39.1.0)" in said
    assert said.endswith(f"specedge build --bundle {bundle.folder} --device tensorrt:1")


def test_dynamic_length_graph_has_no_engine(bundle):
    decoder = bundle.target.graph("decoder", "onnx")
    with pytest.raises(DeviceError, match=r"fixed-shape graphs only, .*'decoder'"):
        engines.require(bundle, bundle.target, decoder, PLATFORM, "rtx")


@pytest.mark.parametrize(
    ("number", "shown"),
    [(101401, None), (101501, "10.15.1"), (101601, "10.16.1"), (101700, None), (110406, None)],
)
def test_tensorrt_10_15_and_10_16_are_supported(number, shown):
    if shown:
        assert tensorrt.check_version(number) == shown
    else:
        with pytest.raises(DeviceError, match=r"needs TensorRT 10\.15 or 10\.16, and 1"):
            tensorrt.check_version(number)


def test_tegra_version_is_parsed_from_release_file():
    line = "# R39 (release), REVISION: 1.0, GCID: 1, BOARD: generic, EABI: aarch64"
    assert tensorrt.tegra_version(line) == "R39.1.0"
    assert tensorrt.tegra_version("something else") is None


@pytest.mark.parametrize(
    ("ops", "kinds"),
    [("onnx-fp16", "100"), ("onnx-bf16", "010"), ("onnx", "000"), ("onnx-qdq", "101")],
)
def test_tensorrt_options_follow_compute_type_of_graph_variant(tmp_path, ops, kinds):
    found = tensorrt.build_options(2, ops, tmp_path / ENGINE)
    assert "".join(found[f"trt_{kind}_enable"] for kind in ("fp16", "bf16", "int8")) == kinds
    assert found["device_id"] == "2"
    assert found["trt_ep_context_file_path"] == str(tmp_path / ENGINE)
    assert found["trt_engine_cache_path"] == "."
    assert not [name for name in found if "profile" in name]


def test_a_missing_rtx_plug_in_is_reported(monkeypatch):
    ort = pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    monkeypatch.setattr(plug_in, "RTX", dataclasses.replace(plug_in.RTX, module="no_such_plug_in"))
    with pytest.raises(DeviceError, match=r"needs NVIDIA's plug-in onnxruntime-ep-.*: pip install"):
        tensorrt_rtx.platform(ort, 0)
    with pytest.raises(DeviceError, match=r"compiles for sm86, .*, not for 'sm90'"):
        tensorrt_rtx.platform(ort, 0, "sm90")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "cuda does not use engines; they are built for rtx or tensorrt"),
        ("rtx", r"rtx runs none of its .*\(onnx, gqa\); export the pair again with --compute qdq"),
        ("tensorrt:1", "tensorrt:1 runs none of its graph variants"),
    ],
)
def test_unsupported_engine_build_is_rejected(device, message):
    with pytest.raises(DeviceError, match=message):
        engine_builder.build_engines(store.embedded_folder(), device)
    with pytest.raises(DeviceError, match="TensorRT builds engines for this machine's GPU only"):
        Device("tensorrt").platform("sm89")


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
