"""Files of a public repository: fetched once, checked by their hash, and not fetched offline."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.fetch import fetch_file, github_url
from tests.eval.hub_stand_in import hub_stand_in

CONTENT = b"some rows\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = "/datasets/owner/name/resolve/main/rows.jsonl"


def fetch(address: str, file: Path, sha256: str | None = SHA256) -> Path:
    return fetch_file("rows", address + PATH, file, "name it with --data-dir", sha256)


def test_a_file_is_fetched_once_and_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    file, requests = tmp_path / "cache/rows.jsonl", list[str]()
    with hub_stand_in({"owner/name/rows.jsonl": CONTENT}, requests) as address:
        assert fetch(address, file).read_bytes() == CONTENT
        assert fetch(address, file) == file
        assert len(requests) == 1
        file.write_bytes(b"damaged")
        assert fetch(address, file).read_bytes() == CONTENT
        with pytest.raises(EvalError, match=r"rows: .*rows\.jsonl cannot be fetched: .*--data-dir"):
            fetch(address, tmp_path / "other/rows.jsonl", "0" * 64)
        assert fetch(address, tmp_path / "third/rows.jsonl", None).read_bytes() == CONTENT
    with pytest.raises(EvalError, match=r"cannot be fetched: .*put the file at .*fourth"):
        fetch(address, tmp_path / "fourth/rows.jsonl")
    assert "Downloading" not in capfd.readouterr().err


def test_offline_only_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "rows.jsonl"
    with pytest.raises(EvalError, match=r"is not fetched because HF_HUB_OFFLINE is set; put the file at .*--data-dir"):
        fetch("http://nowhere.invalid", file)
    file.write_bytes(CONTENT)
    assert fetch("http://nowhere.invalid", file) == file
    file.write_bytes(b"damaged")
    with pytest.raises(EvalError, match="the one in the cache has another sha256, and HF_HUB_OFFLINE is set"):
        fetch("http://nowhere.invalid", file)


def test_address_is_that_of_a_commit() -> None:
    address = github_url("owner/name", "a" * 40, "folder/file.py")
    assert address == f"https://raw.githubusercontent.com/owner/name/{'a' * 40}/folder/file.py"
