"""The long run, for a short time."""

import json

import pytest

from tests.reliability.soak import are_flat, soak
from tests.reliability.tables import soak_table

pytestmark = pytest.mark.usefixtures("exact")


def test_some_hundred_tokens(tmp_path):
    report = soak("keycodes", tokens=300, chat_tokens=120, checks=2, seconds=60)
    assert report["tokens"] >= 300
    assert all(report["operations"].values())
    assert report["checks"] >= 1
    assert report["largest_error"] < 1e-9
    machine = {"device": "a processor", "date": "2026-01-01", "versions": {"torch": "2"}}
    (tmp_path / "soak-keycodes.json").write_text(json.dumps({"machine": machine, **report}))
    assert f"| `keycodes` | {report['tokens']:,} |" in soak_table(tmp_path)
    with pytest.raises(ValueError, match="holds no soak"):
        soak_table(tmp_path / "nowhere")


def test_what_is_flat():
    def samples(**grown):
        first = {"tokens": 0, "rss_bytes": 2**30, "device_bytes": 0, "tensors": 50, "objects": 20}
        return [first] * 4 + [{name: value + grown.get(name, 0) for name, value in first.items()}]

    assert are_flat(samples())
    assert are_flat(samples(rss_bytes=2**20))
    assert not are_flat(samples(rss_bytes=2**26))
    for name in ("tensors", "objects", "device_bytes"):
        assert not are_flat(samples(**{name: 1}))
