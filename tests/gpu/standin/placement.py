"""Node placement and copies of the CUDA provider on a machine without a GPU.

    python placement.py MODEL.onnx T=1 [T=5 ...] [--dtype float16] [--forbid-cpu] [--graph]

Each argument with "=" names the symbolic dimensions of one round of runs ("B=1,T=5" sets two).
Every input and output is bound on the device, unless named with --host; a present.N output is bound
to the memory of its past_key_values.N input, unless --apart is given.
"""

import argparse
import collections
import pathlib
import sys
import tempfile

import numpy
import onnx
import standin
from onnx import TensorProto, helper, numpy_helper

FLOATS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(double)": "float64",
}
COPIES = ("h2d", "d2h", "d2d", "async_h2d", "async_d2h", "async_d2d")
REST = (
    "launches",
    "blas_calls",
    "bad_launches",
    "memsets",
    "stream_syncs",
    "event_syncs",
    "device_syncs",
    "blocking",
    "racing_copies",
    "mallocs",
    "frees",
    "pinned_mallocs",
    "captures",
    "failed_captures",
    "captured_launches",
    "captured_copies",
    "graph_instantiations",
    "graph_launches",
    "replayed_launches",
    "replayed_copies",
    "errors",
)


def with_dtype(model, name):
    """The model with float16 (or bfloat16) in the place of every float32."""
    wanted = FLOATS[name]
    numpy_type = helper.tensor_dtype_to_np_dtype(wanted)

    def convert(graph):
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(
                    numpy_helper.from_array(
                        numpy_helper.to_array(tensor).astype(numpy_type), tensor.name
                    )
                )
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = wanted
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                    attribute.i = wanted
                if (
                    attribute.type == onnx.AttributeProto.TENSOR
                    and attribute.t.data_type == TensorProto.FLOAT
                ):
                    array = numpy_helper.to_array(attribute.t).astype(numpy_type)
                    attribute.t.CopyFrom(numpy_helper.from_array(array))
                if attribute.type == onnx.AttributeProto.GRAPH:
                    convert(attribute.g)

    convert(model.graph)
    return model


def open_session(model, forbid_cpu=False, graph=False, options=(), provider_options=()):
    """The session, each provider's nodes by operator, the copy nodes in between, all nodes."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if forbid_cpu:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for key, value in options:
        settings.add_session_config_entry(key, value)
    cuda = {"use_tf32": "0", **dict(provider_options)}
    if graph:
        cuda["enable_cuda_graph"] = "1"
    providers = [("CUDAExecutionProvider", cuda)]
    if not forbid_cpu:
        providers.append("CPUExecutionProvider")
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "optimised.onnx"
        settings.optimized_model_filepath = str(path)
        source = model if isinstance(model, (str, bytes)) else model.SerializeToString()
        session = onnxruntime.InferenceSession(source, settings, providers=providers)
        optimised = onnx.load(path, load_external_data=False)
    placed = collections.defaultdict(collections.Counter)
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            placed[part.ep_name][node.op_type] += 1
    copies = [
        f"{node.op_type} {node.input[0]}"
        for node in optimised.graph.node
        if node.op_type.startswith("Memcpy")
    ]
    return (
        session,
        placed,
        copies,
        collections.Counter(node.op_type for node in optimised.graph.node),
    )


def make(value, sizes, device):
    """Memory of an input's or output's shape, zeroed where NumPy knows the type."""
    import onnxruntime

    shape = [sizes[d] if isinstance(d, str) else d for d in value.shape]
    if value.type == "tensor(bfloat16)":
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            shape, TensorProto.BFLOAT16, device, 0
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(
        numpy.zeros(shape, TYPES[value.type]), device, 0
    )


def bind(session, sizes, host=(), apart=False):
    """Everything bound on the device, but what is named in host; the OrtValues by name."""
    binding, values = session.io_binding(), {}
    for value in session.get_inputs():
        values[value.name] = make(value, sizes, "cpu" if value.name in host else "cuda")
        binding.bind_ortvalue_input(value.name, values[value.name])
    for value in session.get_outputs():
        device = "cpu" if value.name in host else "cuda"
        past = value.name.replace("present", "past_key_values", 1)
        if value.name.startswith("present") and past in values and not apart:
            values[value.name] = values[past]
        elif all(d in sizes or isinstance(d, int) for d in value.shape):
            values[value.name] = make(value, sizes, device)
        else:
            binding.bind_output(value.name, device)
            continue
        binding.bind_ortvalue_output(value.name, values[value.name])
    return binding, values


def summary(counts):
    parts = [
        f"{name} {counts[name]} ({counts[name + '_bytes']} B)" for name in COPIES if counts[name]
    ]
    parts += [f"{name} {counts[name]}" for name in REST if counts[name]]
    return ", ".join(parts) or "nothing"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="*", help="NAME=VALUE[,NAME=VALUE]: one round of runs each")
    parser.add_argument("--dtype", choices=sorted(FLOATS), help="convert the float32 model first")
    parser.add_argument(
        "--forbid-cpu", action="store_true", help="session.disable_cpu_ep_fallback=1"
    )
    parser.add_argument(
        "--graph", action="store_true", help="enable_cuda_graph=1, one graph a round"
    )
    parser.add_argument(
        "--host", default="", help="inputs and outputs, with commas, that stay on the host"
    )
    parser.add_argument("--apart", action="store_true", help="present.N in memory of its own")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--kernels", action="store_true", help="name the kernels of the first run of a round"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a session option"
    )
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a CUDA provider option",
    )
    arguments = parser.parse_intermixed_args()
    standin.load()
    import onnxruntime

    model = arguments.model
    if arguments.dtype:
        model = with_dtype(onnx.load(model), arguments.dtype)
    pairs = [
        [tuple(text.split("=", 1)) for text in given]
        for given in (arguments.set, arguments.provider)
    ]
    try:
        with standin.counted() as counts:
            session, placed, copies, optimised = open_session(
                model, arguments.forbid_cpu, arguments.graph, *pairs
            )
    except Exception as error:
        sys.exit(f"refused: {str(error)[:2000]}")
    print("opening:", summary(counts))
    print(
        f"memory: {counts['device_bytes']} B on the device in {counts['device_blocks']} blocks, "
        f"{counts['pinned_bytes']} B pinned"
    )
    for provider in sorted(placed):
        print(
            f"{provider}:",
            ", ".join(f"{op} {count}" for op, count in sorted(placed[provider].items())),
        )
    print(
        "after optimisation:", ", ".join(f"{op} {count}" for op, count in sorted(optimised.items()))
    )
    print(f"Memcpy nodes: {len(copies)}", *copies, sep="\n  ")
    fixed = not any(isinstance(d, str) for value in session.get_inputs() for d in value.shape)
    for number, text in enumerate(arguments.sizes or ([""] if fixed else [])):
        sizes = {
            name: int(value)
            for name, value in (pair.split("=") for pair in text.split(",") if pair)
        }
        binding, _values = bind(session, sizes, arguments.host.split(","), arguments.apart)
        options = onnxruntime.RunOptions()
        if arguments.graph:
            options.add_run_config_entry("gpu_graph_id", str(number + 1))
        for run in range(arguments.runs):
            try:
                with standin.counted() as counts:
                    session.run_with_iobinding(binding, options)
            except Exception as error:
                print(f"{text or 'run'} #{run + 1}: {str(error)[:600]}")
                break
            print(f"{text or 'run'} #{run + 1}:", summary(counts))
            if arguments.kernels and not run:
                for name, count in sorted(standin.kernels().items()):
                    print(f"  {count:3d} {name.removeprefix('void ')[:110]}")
    before = standin.counts()
    binding = session = None
    after = standin.counts()
    print(
        f"closing: {before['device_bytes']} -> {after['device_bytes']} B on the device, "
        f"{before['pinned_bytes']} -> {after['pinned_bytes']} B pinned, "
        f"{after['streams']} streams, {after['events']} events, {after['graph_execs']} graphs left"
    )


if __name__ == "__main__":
    main()
