"""Files that a method's parameter names: refused with their name, and read anew when they are other files."""

import os

import pytest

from hf_sparse_attn.methods.channels import channels_of_file
from hf_sparse_attn.methods.head_patterns import read_patterns
from hf_sparse_attn.methods.retrieval_heads import read_values


def read_channels(path):
    return channels_of_file(path, 0, "qk", (2, 1), 4)


JSON = {"calibration": read_channels, "patterns": read_patterns}
EVERY = {**JSON, "heads": read_values}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00", b"0.1\xe9"], ids=["npy", "latin-1"])
def test_a_file_that_is_no_text_is_named(name, content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{name}='.*/file' must be a text file in UTF-8: 'utf-8' codec"):
        EVERY[name](str(path))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=ascii)
def test_a_path_that_no_file_may_have_is_named(name, path):
    with pytest.raises(ValueError, match=rf"^{name}='.*' must be the path of a file: "):
        EVERY[name](path)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "maximum recursion depth"),
        ('{"a": ' + "[" * 100_000, "maximum recursion depth"),
        ('{"a": 1, "b": 2, "a": 1}', "'a' is there twice"),
        ('[{"0": 1, "0": 2}]', "'0' is there twice"),
    ],
    ids=["deep", "deep-entry", "twice", "twice-within"],
)
def test_json_that_is_too_deep_or_ambiguous_is_refused(name, content, message, tmp_path):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^{name}='.*/file' must be a JSON file: .*{message}"):
        JSON[name](str(path))


def test_files_of_one_relative_path_and_time_are_told_apart(tmp_path, monkeypatch):
    for folder, value in (("first", "0.9"), ("second", "0.1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "heads.tsv").write_text(value)
        os.utime(tmp_path / folder / "heads.tsv", (315_532_800, 315_532_800))
        monkeypatch.chdir(tmp_path / folder)
        assert read_values("heads.tsv") == ((float(value),),)


@pytest.mark.parametrize("value", ["0.1", "0.25"], ids=["another-file", "another-size"])
def test_a_file_replaced_within_one_time_is_read_anew(value, tmp_path):
    path, other = tmp_path / "heads.tsv", tmp_path / "other"
    for each, content in ((path, "0.9"), (other, value)):
        each.write_text(content)
        os.utime(each, (315_532_800, 315_532_800))
    assert read_values(str(path)) == ((0.9,),)
    other.replace(path)
    assert read_values(str(path)) == ((float(value),),)
