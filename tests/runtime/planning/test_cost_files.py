"""Cost tables in memory and on disk."""

import dataclasses
import os
import random
import types

import pytest

from specedge.attention_kernels import VARIABLE, batch_invariant_attention
from specedge.bundle import Bundle, store
from specedge.bundle.manifest import State
from specedge.runtime.backend.sessions import Device
from specedge.runtime.planning import cost_files
from specedge.runtime.planning.cost_files import CostFile
from specedge.runtime.planning.cost_table import CostTable, ModeCosts
from specedge.runtime.planning.measurement import on_grid
from virtual import table

pytestmark = pytest.mark.usefixtures("own_costs")


def stored(key):
    """The last stored table, of a file without a note."""
    file, note = cost_files.read(key)
    assert note is None
    return file.costs


def written_first(key, costs):
    """The table of whoever writes the next one first."""
    file = CostFile(cost_files.FORMAT, key, costs, cost_files.CONFIRMED, was_contradicted=False)
    return cost_files.write_first(key.path, file).costs


@pytest.fixture
def key():
    bundle = Bundle.read(store.embedded_folder())
    return cost_files.cost_key(bundle, Device(), Device(), "gqa")


def test_cost_table_round_trip(key):
    costs = table(prior={"model": 0.7})
    assert cost_files.read(key) == (None, None)
    path = cost_files.write(key, costs)
    assert stored(key) == costs
    assert path.parent == store.data_folder() / "costs"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        *({"threads": 1}, {"ops": "onnx"}, {"onnxruntime": "9"}, {"specedge": "9"}),
        *({"processor": "x"}, {"gpus": "x"}, {"kernels": "x"}),
    ],
)
def test_each_setting_has_its_cache_key(key, change):
    cost_files.write(key, table())
    assert cost_files.read(dataclasses.replace(key, **change)) == (None, None)


@pytest.mark.parametrize("change", ["binary", "features", "variable"])
def test_whatever_selects_kernels_is_part_of_the_cache_key(change, monkeypatch, tmp_path):
    before = cost_files.kernels_fingerprint()
    assert cost_files.kernels_fingerprint() == before
    if change == "binary":
        module = types.SimpleNamespace(__file__=str(tmp_path))
        monkeypatch.setattr(cost_files.importlib, "import_module", lambda name: module)
    elif change == "features":
        monkeypatch.setattr(cost_files, "cpu_features", lambda: "fpu sse2")
    else:
        monkeypatch.setenv(VARIABLE, "0")
    assert cost_files.kernels_fingerprint() != before


def test_the_cache_key_does_not_depend_on_sessions_that_are_created_meanwhile():
    before = cost_files.kernels_fingerprint()
    with batch_invariant_attention([State("0.key", "rows", "float32", ("B", 1, "S", 256))]):
        assert cost_files.kernels_fingerprint() == before


def test_gpu_and_driver_are_part_of_the_cache_key(monkeypatch):
    bundle = Bundle.read(store.embedded_folder())
    seen = {"version": "580.95", "gpus": [{"name": "A", "capability": [8, 6]}] * 2}
    seen["gpus"][1] = {"name": "B", "capability": [9, 0]}
    monkeypatch.setattr(cost_files.driver, "query", lambda: seen)

    def gpus(*names):
        return cost_files.cost_key(bundle, *map(Device, names), "gqa").gpus

    assert gpus("cuda", "cpu") == "A, 8.6, driver 580.95"
    assert gpus("cuda:1", "cuda") == "B, 9.0 and A, 8.6, driver 580.95"
    assert gpus("cuda:2", "cuda:2") == "unknown, driver 580.95"
    assert gpus("cpu", "cpu") == ""


def _damage():
    yield "cut", lambda text: text[: len(text) // 2]
    yield "empty", lambda text: ""
    yield "no object", lambda text: "[]"
    format_key = f'"format": {cost_files.FORMAT}'
    yield "of an older format", lambda text: text.replace(format_key, '"format": 9')
    yield "without a format", lambda text: text.replace(f"{format_key},", "")
    yield "in an unknown state", lambda text: text.replace("confirmed", "guessed")
    yield "with a key more", lambda text: text.replace('"format"', '"more": 1, "format"')
    yield "free passes", lambda text: text.replace("0.09", "0.0")
    yield "negative", lambda text: text.replace("0.09", "-1.0")
    yield "NaN", lambda text: text.replace("0.09", "NaN")
    yield "of another bundle", lambda text: text.replace('"bundle": "', '"bundle": "0')


@pytest.mark.parametrize("damage", [d for _, d in _damage()], ids=[name for name, _ in _damage()])
def test_a_damaged_file_is_ignored_with_one_note(key, damage):
    path = cost_files.write(key, table(0.09))
    path.write_text(damage(path.read_text("utf-8")), "utf-8")
    found, note = cost_files.read(key)
    assert found is None
    assert str(path) in note
    assert "measured again" in note
    assert "\n" not in note


def test_a_folder_or_binary_file_is_ignored(key):
    key.path.mkdir(parents=True)
    assert cost_files.read(key)[0] is None
    key.path.rmdir()
    key.path.write_bytes(b"\xff\xfe")
    assert "is not used" in cost_files.read(key)[1]


def test_a_write_that_fails_leaves_the_old_table(key, monkeypatch):
    cost_files.write(key, table(0.1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="space"):
        cost_files.write(key, table(0.2))
    assert stored(key) == table(0.1)
    assert os.listdir(key.path.parent) == [key.path.name]


def test_costs_are_interpolated():
    greedy = ModeCosts(
        target=((1.0, 1.25, 2.0), (3.0, 3.75, 6.0)),
        draft=((0.1, 0.25), (0.3, 0.75)),
        prefill=(0.01, 0.03),
        host=0.5,
        token=0.25,
        acceptance={},
    )
    sampled = dataclasses.replace(greedy, host=0.0)
    costs = CostTable("tune", (0, 100), (1, 2, 5), greedy, sampled, threads=0)
    middle = costs.at(50, greedy=True)
    assert middle.verify == pytest.approx([2.5, 3.0, 3.5, 4.0, 4.5])
    assert (middle.token, middle.prefill) == pytest.approx((0.25, 0.02))
    assert middle.draft == pytest.approx([0.0, 0.2, 0.3, 0.4, 0.5])
    assert costs.at(200, greedy=False).plain == pytest.approx(5.0)
    assert costs.at(0, greedy=False).plain == pytest.approx(1.0)


def test_the_lower_costs_of_two_measurements():
    def measured(target, draft, prefill, host, token):
        mode = ModeCosts(((target, 9.0),), ((draft,),), (prefill,), host, token, {"model": 0.5})
        greedy = dataclasses.replace(mode, token=0.0)
        return CostTable("load", (64,), (1, 2), greedy, mode, threads=2, invariant_length=18)

    first, second = measured(5.0, 2.0, 0.3, 0.25, 0.5), measured(4.0, 3.0, 0.2, 0.25, 0.75)
    assert first.minimum(second) == measured(4.0, 2.0, 0.2, 0.25, 0.5)
    # Drafts are times of rounds, of which host work was subtracted.
    disturbed = measured(5.0, 0.5, 0.3, 8.0, 0.0)
    assert second.minimum(disturbed) == disturbed.minimum(second) == second
    other = dataclasses.replace(second, lengths=(32,))
    assert first.minimum(other) == other.minimum(first) == other


def rounded(unit):
    """A table with costs on the grid, as they are measured."""
    passes, host, token = (on_grid(x * unit) for x in (5e-3, 1.3e-4, 3e-5))
    draft = tuple(on_grid(9e-4 * unit) + k * on_grid(8e-4 * unit) for k in range(2))
    mode = ModeCosts(((passes,) * 3,), (draft,), (on_grid(1e-4 * unit),), host, token, {})
    return CostTable("load", (64,), (1, 2, 3), dataclasses.replace(mode, token=0.0), mode, 0)


def test_slower_measurements_leave_costs_equal():
    rng = random.Random(0)
    for _ in range(100):
        unit = rng.uniform(0.2, 5)
        costs, slower = rounded(unit), rounded(unit * rng.uniform(1.2, 3))
        assert costs.minimum(slower) == slower.minimum(costs) == costs


def test_the_lower_costs_without_a_draft_model():
    costs = rounded(1.0)
    mode = dataclasses.replace(costs.greedy, draft=(), prefill=())
    without = dataclasses.replace(costs, greedy=mode, sampled=mode)
    assert without.minimum(without) == without
    # Draft passes are timed if enough pass lengths are batch-invariant.
    slower = rounded(2.0)
    assert without.minimum(slower) == slower.minimum(without) == without


@pytest.mark.parametrize(
    "change", [{"origin": "guess"}, {"lengths": (5, 5)}, {"lengths": ()}, {"rows": (2, 3)}]
)
def test_an_inconsistent_table_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        CostTable(**vars(table(rows=2)) | change)


@pytest.mark.parametrize(
    "change",
    [
        {"target": ((1.0,),)},
        {"draft": ((0.1, 0.1),)},
        {"draft": ((float("inf"),),)},
        {"prefill": (0.1, 0.1)},
        {"host": -1.0},
        {"token": -1.0},
        {"acceptance": {"model": 1.5}},
    ],
)
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_an_inconsistent_mode_is_refused(mode, change):
    costs = table(rows=2)
    with pytest.raises(ValueError, match=r"."):
        dataclasses.replace(costs, **{mode: dataclasses.replace(costs.greedy, **change)})


def test_costs_without_a_draft_model_are_of_the_target_only():
    costs = table(0.1)
    mode = dataclasses.replace(costs.greedy, draft=(), prefill=())
    without = dataclasses.replace(costs, greedy=mode, sampled=mode).at(10, greedy=True)
    assert without.verify == costs.at(10, greedy=True).verify
    assert (set(without.draft), without.catch_up(9)) == ({0.0}, 0.0)


def test_processes_that_measure_at_once_agree(key, monkeypatch):
    """Whoever loses the race between looking and writing takes the winner's table."""
    link = os.link

    def late(temporary, path):
        monkeypatch.setattr(os, "link", link)
        written_first(key, table(0.1))
        link(temporary, path)

    monkeypatch.setattr(os, "link", late)
    assert written_first(key, table(0.2)) == table(0.1)
    assert stored(key) == table(0.1)


def test_file_systems_without_hard_links_store_the_first_measurement_too(key, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert written_first(key, table(0.1)) == table(0.1)
    assert written_first(key, table(0.2)) == table(0.1)


def test_files_of_older_formats_are_ignored_silently(key, monkeypatch):
    monkeypatch.setattr(cost_files, "FORMAT", cost_files.FORMAT - 1)
    cost_files.write(key, table(0.1))
    monkeypatch.undo()
    assert cost_files.read(key) == (None, None)
