"""The figures of `specedge theory`: the numbers in them, and the files."""

import io
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import papers
from installed import run, run_process
from specedge.cli.drawing import _COLOURS, _LINES, draw, drawn_bytes
from specedge.cli.figures import NAMES, all_figures
from specedge.errors import MissingExtraError

FIGURES = dict(zip(NAMES, all_figures(), strict=True))


def curve(name, label):
    curves = {curve.label.split(":")[0]: curve for curve in FIGURES[name].curves}
    found = curves[label]
    return dict(zip(found.x, found.y, strict=True))


def test_every_figure_has_its_name():
    assert [figure.name for figure in FIGURES.values()] == list(NAMES)


def test_tokens_a_round_are_drawn_from_one_to_all_rows():
    for at, k in enumerate(papers.EXPECTED_TOKENS_K):
        if k not in (2, 4):
            tokens = curve("tokens", f"K = {k}")
            assert (tokens[0], tokens[1]) == (1, k + 1)
            for alpha, expected in papers.EXPECTED_TOKENS.items():
                assert tokens[alpha] == pytest.approx(expected[at], abs=1e-6)
    limit = curve("tokens", "any K, at most")
    assert max(limit.values()) == pytest.approx(10)


def test_the_best_k_is_drawn_for_each_cost():
    for at, cost in enumerate(papers.COSTS):
        if cost != 1.8 / 14.1:
            best = curve("best-k", f"c = {cost:g}")
            assert [best[alpha] for alpha in papers.ALPHAS] == [
                papers.BEST_K[alpha][at] for alpha in papers.ALPHAS
            ]


def test_speed_is_drawn_against_operations():
    for row in papers.OPERATIONS:
        points = list(curve("operations", f"α = {row.alpha:g}").items())
        assert points[0] == (1, 1)
        assert points[row.k] == pytest.approx((row.operations, row.speedup), abs=1e-6)


def test_the_price_of_verifying_is_drawn_from_the_target_alone():
    figure = FIGURES["verify-cost"]
    assert all(curve.y[0] == 1 for curve in figure.curves)
    assert curve("verify-cost", "v = 1 (free)")[8] == pytest.approx(3.092080, abs=1e-6)
    for one in figure.curves:
        best = int(one.label.split()[-1])
        assert one.y[best] == max(one.y)


def test_curves_are_told_apart_in_black_and_white_too():
    most = max(len(figure.curves) for figure in FIGURES.values())
    assert len(set(_COLOURS)) >= most <= len(set(_LINES))


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="needs the plot extra")


@pytest.mark.usefixtures("matplotlib")
def test_the_command_draws_beside_its_tables_and_says_where(tmp_path):
    result = run("theory", "--figures", tmp_path / "new")
    assert result.returncode == 0
    assert result.stdout == run("theory").stdout
    for name in NAMES:
        assert f"drew {tmp_path / 'new' / name}.svg\n" in result.stderr
    assert sorted(os.listdir(tmp_path / "new")) == sorted(f"{name}.svg" for name in NAMES)


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("name", NAMES)
def test_an_svg_has_the_axes_curves_and_legend_of_its_figure(name):
    figure, svg = FIGURES[name], "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawn_bytes(figure, "svg"))
    texts = {"".join(text.itertext()) for text in root.iter(f"{svg}text")}
    assert {figure.title, figure.x_label, figure.y_label} <= texts
    assert {curve.label for curve in figure.curves} <= texts
    inside = [path for path in root.iter(f"{svg}path") if path.get("clip-path")]
    colours = {re.search("stroke: (#[0-9a-f]+)", path.get("style"))[1] for path in inside}
    assert len(colours) == len(figure.curves) + 1  # and the grid


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("name", NAMES)
def test_a_png_opens_and_nothing_is_cut_off_at_its_edges(name):
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(drawn_bytes(FIGURES[name], "png")))
    assert pixels.shape == (660, 1200, 4)
    edges = pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]
    assert all((edge == 1).all() for edge in edges)
    assert (pixels.min(axis=2) < 0.5).mean() > 0.005


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_figure_is_the_same_bytes_each_time_whatever_the_users_style(matplotlib, form):
    once = drawn_bytes(FIGURES["verify-cost"], form)
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert drawn_bytes(FIGURES["verify-cost"], form) == once
        assert matplotlib.rcParams["font.size"] == 30
    assert b"atplotlib" not in once.split(b"<defs>")[0]  # as its version would change them


@pytest.mark.usefixtures("matplotlib")
def test_no_figure_is_replaced_unless_told(tmp_path):
    (tmp_path / "best-k.svg").write_text("mine", "utf-8")
    result = run("theory", "--figures", tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "best-k.svg exists; name another folder, or give --overwrite" in result.stderr
    assert os.listdir(tmp_path) == ["best-k.svg"]
    paths = draw(str(tmp_path), "svg", True)
    assert (tmp_path / "best-k.svg").read_text("utf-8").startswith("<?xml")
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)


@pytest.mark.usefixtures("matplotlib")
def test_a_variable_that_matplotlib_refuses_is_one_line(tmp_path):
    result = run_process("theory", "--figures", tmp_path / "new", MPLBACKEND="nonsense")
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("specedge: matplotlib does not start: ")


@pytest.mark.usefixtures("matplotlib")
def test_a_place_that_cannot_be_written_leaves_nothing_half_written(tmp_path):
    (tmp_path / "tokens.svg").mkdir()
    with pytest.raises(OSError, match="tokens"):
        draw(str(tmp_path), "svg", True)
    assert os.listdir(tmp_path) == ["tokens.svg"]


def test_without_matplotlib_the_tables_are_printed_and_one_line_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from specedge.cli import main\n"
        "sys.argv = ['specedge', 'theory', '--figures', sys.argv[1]]; main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new")], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stdout == run("theory").stdout
    [line] = result.stderr.splitlines()
    assert 'pip install "specedge[plot]"' in line
    assert not (tmp_path / "new").exists()


def test_drawing_from_python_names_the_extra_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="plot"):
        drawn_bytes(FIGURES["tokens"], "svg")
