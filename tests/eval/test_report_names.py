"""Names of variants in a report, and plots of many of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from eval.report.names import with_variant_names
from eval.report.plots import draw
from eval.report.sections import Section, make_sections
from eval.report.style import Styles
from tests.eval.report_records import record, ten_methods

BASE: dict[str, Any] = {"page_size": 16, "levels": 1, "group_reduce": "max", "sink_tokens": 4}


def named(*parameters: dict[str, Any]) -> list[str]:
    records = [record("b", "t", 0, "quest", 64, parameters=each | {"token_budget": 64}) for each in parameters]
    return [each["method"] for each in with_variant_names(records)]


def test_variants_are_named_by_what_tells_them_apart() -> None:
    assert named(BASE) == ["quest"]
    assert named(BASE, BASE) == ["quest", "quest"]
    assert named(BASE, BASE | {"page_size": 32}) == ["quest (page_size=16)", "quest (page_size=32)"]


def test_a_value_that_most_variants_have_is_left_out() -> None:
    """As in an ablation of one hyperparameter at a time."""
    changes: list[dict[str, Any]] = [{}, {"page_size": 32}, {"levels": 2}, {"group_reduce": "mean"}, {"sink_tokens": 0}]
    assert named(*(BASE | change for change in changes)) == [
        "quest",
        "quest (page_size=32)",
        "quest (levels=2)",
        "quest (group_reduce=mean)",
        "quest (sink_tokens=0)",
    ]


def test_hyperparameters_that_change_together_are_named_once() -> None:
    both = BASE | {"page_size": 32, "levels": 2}
    names = named(BASE, both, both | {"page_size": 64})
    assert names == ["quest (page_size=16)", "quest (page_size=32)", "quest (page_size=64)"]


def test_a_hyperparameter_that_older_records_lack_is_named() -> None:
    older = {name: value for name, value in BASE.items() if name != "levels"}
    assert named(BASE, older) == ["quest (levels=1)", "quest (without levels)"]
    assert named(BASE, older | {"page_size": 8}) == ["quest (page_size=16)", "quest (page_size=8)"]
    assert len(set(named(BASE, older, BASE | {"page_size": 8}, BASE | {"page_size": 32}))) == 4


def test_runs_of_one_benchmark_do_not_name_those_of_another() -> None:
    records = [
        record(name, "t", 0, "quest", 64, parameters=BASE | {"page_size": size}) for name, size in (("a", 8), ("b", 16))
    ]
    assert [section.columns for section in make_sections(records)] == [[("quest", 64)]] * 2


def ten_variants() -> Section:
    records = []
    for number in range(10):
        parameters = BASE | {"page_size": 8 * (number + 1), "group_reduce": f"a rather long name {number}"}
        for length in (1000, 2000):
            for depth in (0.1, 0.5, 0.9):
                fields = {"parameters": parameters, "length": length, "depth": depth, "score": number / 10}
                records.append(record("needle", "t", int(10 * depth), "quest", 64, divergence=0.1, **fields))
    (section,) = make_sections(records)
    return section


def ten_methods_in_two_budgets() -> Section:
    (section,) = make_sections(ten_methods())
    return section


@pytest.mark.parametrize(("make", "columns"), [(ten_variants, 10), (ten_methods_in_two_budgets, 1 + 2 * 11)])
def test_ten_variants_keep_their_axes_and_whole_legends(make: Callable[[], Section], columns: int) -> None:
    section = make()
    assert len(section.columns) == columns
    assert all(len(method) < 50 for method, _ in section.columns)
    pictures = draw(section, Styles(section.columns))
    assert len({picture.name for picture in pictures}) == len(pictures) >= 4  # names are those of files
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if there is no room for an axis
        for picture in pictures:
            picture.png()
    for picture in pictures:
        width, height = picture.figure.bbox.size
        for legend in picture.figure.legends:
            box = legend.get_window_extent()
            assert -1 <= box.x0 <= box.x1 <= width + 1, picture.name
            assert -1 <= box.y0 <= box.y1 <= height + 1, picture.name
            if len(picture.figure.axes) == 1:  # a long legend stands beside the panel, which keeps its size
                assert picture.figure.axes[0].get_window_extent().height > 0.4 * height, picture.name
        for axis in picture.figure.axes[:-1]:
            assert axis.get_window_extent().height > 0.1 * height / len(picture.figure.axes), picture.name


@pytest.mark.parametrize("count", [10, 40])
def test_no_two_variants_look_the_same(count: int) -> None:
    styles = Styles([(f"quest (page_size={size})", 64) for size in range(count)])
    looks = {(styles.colour(name), styles.marker(name)) for name in (f"quest (page_size={n})" for n in range(count))}
    assert len(looks) == count
