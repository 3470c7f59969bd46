from pathlib import Path

import pytest

from hf_sparse_attn.cli.estimate import SAMPLE_TOKENS, expected_seconds
from hf_sparse_attn.cli.models import load_model
from tests.tiny import save_model


def test_work_is_scaled_from_a_short_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(str(save_model(tmp_path)))
    assert 0 < expected_seconds(model, list(range(50)), 2) < 60  # shorter than the sample
    monkeypatch.setattr("hf_sparse_attn.cli.estimate._timed", lambda *_: 1.0)
    sample = [1] * SAMPLE_TOKENS
    assert expected_seconds(model, sample, 0) == 1.0
    assert expected_seconds(model, sample, 5) == 6.0
    assert expected_seconds(model, sample * 4, 0) > 4.0  # attention grows with the square
    assert expected_seconds(model, sample * 4, 5) - expected_seconds(model, sample * 4, 0) > 5.0  # and a step's reads
