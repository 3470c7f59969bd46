"""The profile of the host's part of a token, on a tiny model: its parts, counts and tables, not its times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_sparse_attn_kernels
import pytest
from transformers import AttentionInterface
from typer.testing import CliRunner

from eval.cli import app
from eval.errors import EvalError
from eval.host_clock import PARTS, PartsClock
from eval.host_profile import FIRST_CALLS, HostConfig
from eval.host_table import COMPILED_HEAD, FIRST_HEAD, STEP_HEAD, compiled_lines, first_lines, step_lines
from eval.markdown import host_tables
from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.patch.hook import DecoderHooks
from hf_sparse_attn.patch.patch import IMPLEMENTATIONS

pytestmark = pytest.mark.usefixtures("quick_collections")

OPTIONS = "--shape tiny --layers 3 --context 150 --token-budget 48 --new-tokens 8 --backend eager --device cpu"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("host") / "report.json"
    before = DecoderHooks.before
    wide = {"COLUMNS": "140"}  # so that no heading is broken
    result = CliRunner(env=wide).invoke(app, ["host-profile", *OPTIONS.split(), "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "uncompiled step" in result.output
    assert DecoderHooks.before is before
    assert all(AttentionInterface()[name] is sparse_attention_forward for name in IMPLEMENTATIONS)
    dispatch = hf_sparse_attn_kernels.append_and_attend.dispatch  # type: ignore[attr-defined]
    assert dispatch.check is hf_sparse_attn_kernels.append_and_attend.__wrapped__  # type: ignore[attr-defined]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_sides_and_settings(report: dict[str, Any]) -> None:
    assert [side["name"] for side in report["sides"]] == ["dense, StaticCache", "quest, 48"]
    assert report["settings"]["layers"] == 3
    assert report["settings"]["backend"] == "eager"


def test_uncompiled_parts_add_up_and_a_patched_step_skips_the_checks(report: dict[str, Any]) -> None:
    dense, quest = (side["uncompiled"]["parts_ms"] for side in report["sides"])
    assert list(quest) == ["loop", *PARTS]
    assert [part for part in PARTS if dense[part] > 0] == ["modules"]
    assert [part for part in PARTS if quest[part] > 0] == ["modules", "cache", "dispatch", "launch"]
    assert dense["loop"] > 0
    assert quest["loop"] > 0


def test_compiled_steps_have_one_graph_and_count_the_guards_of_the_cache(report: dict[str, Any]) -> None:
    for side in report["sides"]:
        first, guards = side["first_call"], side["compiled"]["guards"]
        assert (first["graphs"], first["recompilations"], first["graph_breaks"]) == (1, 0, 0)
        assert len(first["calls_seconds"]) == FIRST_CALLS
        assert 0 < guards["of_cache"] < guards["number"]
        assert guards["microseconds"] > 0  # they still hold
        assert min(first["phases_seconds"].values()) >= -1e-3
        assert sum(first["phases_seconds"].values()) < first["calls_seconds"][0]
        assert first["traced_seconds"]["transformers"] > 0
    dense, quest = (side["first_call"]["traced_seconds"] for side in report["sides"])
    assert "hf_sparse_attn" not in dense
    assert quest["hf_sparse_attn"] > 0
    assert quest["hf_sparse_attn_kernels"] > 0


def test_tables(report: dict[str, Any], tmp_path: Path) -> None:
    for head, lines in ((STEP_HEAD, step_lines), (COMPILED_HEAD, compiled_lines), (FIRST_HEAD, first_lines)):
        assert {len(cells) for cells in lines(report)} == {len(head)}
    assert "No measurements" in host_tables(tmp_path)
    (tmp_path / "host").mkdir()
    (tmp_path / "host/tiny.json").write_text(json.dumps(report), encoding="utf-8")
    page = host_tables(tmp_path)
    assert "### Tiny\n\ntiny, 3 layers, 150 tokens, float32, eager, " in page
    assert "`python -m eval host-profile --shape tiny --layers 3 --context 150 --method quest" in page
    assert page.count("| quest, 48 |") == 3


def test_parts_exclude_the_parts_that_they_call() -> None:
    clock = PartsClock()
    inner = clock.timed("inner", lambda: sum(range(200_000)))
    clock.timed("outer", inner)()
    assert 0 < clock.seconds["outer"] < clock.seconds["inner"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": FIRST_CALLS}, "new_tokens=4 is not allowed: a whole number, at least 5"),
        ({"context": 0}, "context=0 is not allowed"),
        ({"layers": 0}, "layers=0 is not allowed"),
        ({"layers": 2}, "layers=2 is not allowed with method='quest': more than its dense_layers=2"),
        ({"backend": "triton"}, "backend='triton' is unknown; known: inductor, aot_eager, eager"),
        ({"shape": "huge"}, "shape='huge' is unknown"),
        ({"method": ("streaming_llm",)}, "it evicts tokens"),
        ({"parameters": {"offload": True, "gpu_cache_tokens": 4096}}, "its steps are not compiled"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        HostConfig(**{"shape": "tiny", "context": 100, **options})
