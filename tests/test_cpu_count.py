"""CPUs that a process may use: its affinity and its control groups' quota, not the machine's."""

import os
import subprocess
import sys

import pytest

from specedge import cpu_count as cpus


def file_tree(root, cgroup, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1_QUOTA, V1_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("cgroup", "files", "quotas"),
    [
        ("0::/\n", {}, []),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [1.5]),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, [3.0]),
        ("0::/seen/by/host\n", {"cpu.max": "50000 100000\n"}, [0.5]),
        (
            "5:cpuset:/\n4:cpu,cpuacct:/docker/x\n0::/\n",
            {f"cpu/{V1_QUOTA}": "200000\n", f"cpu/{V1_PERIOD}": "100000\n"},
            [2.0],
        ),
        ("1:cpu:/\n", {f"cpu/{V1_QUOTA}": "-1\n", f"cpu/{V1_PERIOD}": "100000\n"}, []),
        ("1:cpu:/\n", {f"cpu/{V1_QUOTA}": "10\n", f"cpu/{V1_PERIOD}": "0\n"}, []),
        ("0::/\n", {"cpu.max": "nonsense"}, []),
    ],
)
def test_quotas_of_control_group_and_ancestors_are_read(tmp_path, cgroup, files, quotas):
    assert list(cpus.cpu_quotas(file_tree(tmp_path, cgroup, files))) == quotas


def test_system_without_control_groups_has_no_quota(tmp_path):
    assert list(cpus.cpu_quotas(tmp_path)) == []


@pytest.mark.parametrize(
    ("quotas", "count"), [([], 8), ([0.2], 1), ([1.5], 2), ([16.0], 8), ([6.0, 3.0], 3)]
)
def test_count_is_the_least_of_affinity_and_quotas_rounded_up(monkeypatch, quotas, count):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpus, "cpu_quotas", lambda: quotas)
    assert cpus.cpu_count() == count
    assert cpus.default_threads() == (count if count < 8 else 0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_process_confined_to_one_cpu_runs_and_is_measured_with_one_thread():
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs")
    code = """if True:
        import importlib.util, os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import specedge
        from specedge.bundle import store
        from specedge.runtime.backend.sessions import Device
        from specedge.cpu_count import processor_name
        assert processor_name().endswith(", 1 cores"), processor_name()
        bundle = specedge.Bundle.read(store.embedded_folder())
        session = Device().open(bundle.path(bundle.draft.graph("step", "onnx").file))
        assert session.get_session_options().intra_op_num_threads == 1
        if importlib.util.find_spec("onnx"):
            from specedge.exporter.verification import subgraph
            graph = subgraph.int8_products.PRODUCT_GRAPH
            session = subgraph.open_session(graph, subgraph.ort.SessionOptions())
            assert session.get_session_options().intra_op_num_threads == 1
        try:
            Device(threads=2)
        except specedge.DeviceError as error:
            print(error)
    """
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "may not use more CPUs" in child.stdout
