"""The figures of a comparison: what is drawn, hostile names, and reproducible bytes."""

from __future__ import annotations

import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comparisons import comparison, mean_of, noisy, trial

from arpo.errors import ArpoError
from arpo.figures.style import figure_style, require_matplotlib
from arpo.studies.compare import figures
from arpo.studies.compare.figures import draw_comparison, draw_curves, draw_final
from arpo.studies.compare.report import write_comparison

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

MANY = [f"algorithm {number}" for number in range(7)]


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with figure_style(figures.STYLE):
        yield


def lines(panel: Axes) -> dict[str, np.ndarray]:
    """The lines of a panel that the legend names."""
    handles, labels = panel.get_legend_handles_labels()
    return {label: handle.get_xydata() for handle, label in zip(handles, labels, strict=True)}


def scaled(curve: list[tuple[float, float]], unit: float) -> np.ndarray:
    """A curve with its costs in this unit."""
    return np.array(curve) / (unit, 1)


def texts(picture: Figure) -> list[str]:
    """Every text in a figure."""
    return [found.get_text() for found in picture.findobj(matplotlib.text.Text) if found.get_text()]


def test_a_few_are_drawn_together() -> None:
    whole = noisy(["grpo", "arpo", "other"], 2)
    figure = draw_curves(whole)["curves"]
    calls, time = figure.axes
    assert list(lines(calls)) == list(lines(time)) == ["grpo", "arpo", "other", "cold start"]
    for name in whole.algorithms:
        own = [each for each in whole.trials if each.algorithm == name]
        assert lines(calls)[name] == pytest.approx(scaled(mean_of(own), 1))
        assert lines(time)[name] == pytest.approx(scaled(mean_of(own, "seconds"), 60))
    assert lines(calls)["cold start"][:, 1] == pytest.approx(0.4)
    looks = [
        (line.get_color(), line.get_linestyle(), line.get_marker()) for line in calls.get_legend_handles_labels()[0]
    ]
    assert len({colour for colour, _, _ in looks}) == len({marker for _, _, marker in looks}) == 4
    assert "lines: means over 2 seeds; thin lines: single seeds" in texts(figure)


def test_the_line_styles_differ_in_every_way() -> None:
    styles = [figures.BASELINE, *figures.OTHERS]
    assert len(styles) == figures.MAX_IN_ONE_PANEL
    assert all(len({str(part) for part in parts}) == len(styles) for parts in zip(*styles, strict=True))


@pytest.mark.parametrize(("seeds", "thin", "bands"), [(1, 0, 0), (2, 2, 0), (3, 3, 0), (4, 0, 1)])
def test_few_seeds_are_thin_lines_and_more_a_band(seeds: int, thin: int, bands: int) -> None:
    panel = draw_curves(noisy(["grpo"], seeds))["curves"].axes[0]
    assert sum(line.get_linewidth() < 1 for line in panel.lines) == thin
    assert len(panel.collections) == bands


def test_many_are_small_panels_over_the_baseline() -> None:
    usual = noisy(MANY, 2)
    whole = replace(usual, trials=(*usual.trials[:-1], trial(MANY[-1], 1, [(0, 0.4), (50_000, 0.7)])))
    drawn = draw_curves(whole)
    assert list(drawn) == ["curves", "time"] and list(draw_curves(noisy(MANY[:6], 1))) == ["curves"]
    for figure, cost, unit in zip(drawn.values(), ("tool_calls", "seconds"), (1, 60), strict=True):
        assert len(figure.axes) == 6
        for panel, name in zip(figure.axes, MANY[1:], strict=True):
            own = mean_of([each for each in whole.trials if each.algorithm == name], cost)
            base = mean_of([each for each in whole.trials if each.algorithm == MANY[0]], cost)
            found = lines(panel)
            assert found["the panel's algorithm"] == pytest.approx(scaled(own, unit))
            assert found["algorithm 0, the baseline"] == pytest.approx(scaled(base, unit))
            ends = [each.curve[-1].accuracy for each in whole.trials if each.algorithm == name]
            assert panel.get_title("left") == f"{name}\n{50 * sum(ends):.1f} %"
            furthest = max(each.curve[-1].tool_calls if unit == 1 else each.curve[-1].seconds for each in whole.trials)
            assert panel.get_xlim()[1] >= furthest / unit


def test_bars_are_sorted_and_hold_every_seed() -> None:
    figure = draw_final(
        comparison(
            trial("grpo", 1, [(0, 0.2), (9, 0.5)]),
            trial("grpo", 2, [(0, 0.2), (9, 0.6)]),
            trial("best", 1, [(0, 0.2), (9, 0.8)]),
            trial("best", 2, [(0, 0.2), (9, 0.9)], "stopped"),
            trial("lost", 1, [], "down"),
        )
    )
    panel = figure.axes[0]
    names = ["best (1 of 2 seeds)", "grpo", "lost (0 of 2 seeds)"]
    assert [label.get_text() for label in panel.get_yticklabels()] == names
    bottom, top = panel.get_ylim()
    assert top < 0 < 2 < bottom  # the first is above
    points = [[round(float(x), 6) for x in line.get_xdata()] for line in panel.lines if len(line.get_xdata())]
    assert [0.8] in points and [0.55] in points and [0.5, 0.6] in points and [0.2, 0.2] in points
    assert [0.0, 1.0] in points  # the interval of two seeds, cut at what is possible
    assert not any(0.9 in line for line in points)
    assert {"80.0 %", "55.0 %"} <= set(texts(figure))
    assert list(lines(panel)) == ["mean, 95 % interval", "one seed", "cold start", "grpo, the baseline"]


NASTY = ["$x^2$", "a & b <i>", "_hidden", "--><script>", "\x00\x1b[31m\ud800\u202e", "$\\frac{$", "名前" + "x" * 90]


def nasty(names: list[str]) -> dict[str, bytes]:
    """All figures of a comparison of these names, as files."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return draw_comparison(noisy(names, 2, tests=3, title="$\\alpha$ & <b>"))


@pytest.mark.slow
@pytest.mark.parametrize("names", [NASTY[:6], NASTY])
def test_names_are_shown_as_they_are_and_break_nothing(names: list[str]) -> None:
    files = nasty(names)
    stems = ("final", "curves", "time")[: 2 + (len(names) > 6)]
    assert list(files) == [f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")]
    for name, content in files.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(content)
            assert b"<script" not in content
        else:
            assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20]) == 1500


def test_names_are_not_mathematics_nor_left_out() -> None:
    figure = draw_curves(noisy(NASTY[:6], 1))["curves"]
    found = texts(figure)
    for name in ("$x^2$", "a & b <i>", " _hidden", "--><script>", "$\\frac{$"):
        assert name in found
    signs = [text for text in figure.findobj(matplotlib.text.Text) if "$" in text.get_text()]
    assert len(signs) == 2 and not any(text.get_parse_math() for text in signs)


def test_long_names_are_cut_in_the_middle() -> None:
    assert figures._shorten("abcdefghijkl", 12) == "abcdefghijkl"
    assert figures._shorten("abcdefghijklm", 12) == "abcdef…ijklm"
    assert figures._shorten("two\n lines", 12) == "two lines"


@pytest.mark.slow
def test_the_same_comparison_gives_the_same_bytes() -> None:
    found = []
    for size in (9, 30):
        with matplotlib.rc_context({"xtick.labelsize": size, "svg.hashsalt": None}):
            found.append(nasty(["grpo", "arpo"]))
            assert matplotlib.rcParams["xtick.labelsize"] == size
    assert found[0] == found[1]
    assert not re.search(rb"<dc:date>", found[0]["curves.svg"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [["grpo", "arpo"], MANY])
def test_nothing_to_draw_is_no_failure(names: list[str]) -> None:
    nothing = comparison(*(trial(name, 1, [], "down") for name in names), baseline=names[0])
    starts = comparison(*(trial(name, 1, [(0, 0.4)]) for name in names), baseline=names[0])
    for whole in (nothing, starts):
        for figure in (draw_final(whole), *draw_curves(whole).values()):
            figure.draw_without_rendering()  # raises if anything in it cannot be drawn
            assert figure.axes


@pytest.mark.parametrize(
    ("top", "value", "shown"),
    [(9000, 5000, "5,000"), (12_000, 5000, "5k"), (3e7, 15e6, "15M"), (12_000, 0, "0"), (3, 0.5, "0.5")],
)
def test_numbers_are_short(top: float, value: float, shown: str) -> None:
    assert figures._count_format(top)(value, 0) == shown


@pytest.mark.slow
def test_everything_is_written(tmp_path: Path) -> None:
    write_comparison(tmp_path, noisy(["grpo", "arpo"], 2, tests=3))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "results.md", "final.svg", "final.png", "curves.svg", "curves.png"}
    linked = re.findall(r"\]\((\S+)\)", (tmp_path / "results.md").read_text(encoding="utf-8"))
    assert linked == ["final.png", "curves.png"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (require_matplotlib, lambda: draw_comparison(noisy(["grpo"], 1))):
        with pytest.raises(ArpoError, match="figures need matplotlib: pip install matplotlib"):
            draw()
