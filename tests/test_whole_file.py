"""Files that are written whole or not at all."""

import errno
import os
import stat

import pytest
import torch

from hf_sparse_attn import whole_file
from hf_sparse_attn.tensor_file import open_tensors, write_tensors
from hf_sparse_attn.whole_file import replacing, write_whole


def write_a_tensor(path):
    write_tensors(path, "numbers 1", {}, {"x": torch.zeros(2)})
    with open_tensors(path, "numbers 1", "numbers") as file:
        assert file.read("x").tolist() == [0, 0]


def write_bytes(path):
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


writers = pytest.mark.parametrize("write", [write_a_tensor, write_bytes])


@writers
def test_a_new_file_has_the_permissions_of_any_new_file(write, tmp_path):
    former = os.umask(0o027)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@writers
@pytest.mark.parametrize("mode", [0o664, 0o600])
def test_a_file_keeps_its_permissions(write, mode, tmp_path):
    path = tmp_path / "file"
    path.write_text("former")
    path.chmod(mode)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@writers
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_leads_to_the_new_file(write, exists, tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_text("former")
    link.symlink_to("folder/target")
    write(link)
    assert link.is_symlink()
    assert link.read_bytes() == target.read_bytes() != b"former"


@writers
@pytest.mark.parametrize("name", ["n" * 255, "ö" * 127])
def test_a_name_may_be_as_long_as_names_may_be(write, name, tmp_path):
    write(tmp_path / name)


def test_a_write_that_fails_leaves_the_former_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("former")

    def write_half():
        with replacing(path) as name:
            name.write_text("n")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_half()
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_what_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("former")
    monkeypatch.setattr(whole_file.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="file"):
        write_whole(path, b"new")
    assert path.read_text() == "former"


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, b"new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_tensors_need_a_regular_file(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="pipe could not be written: it is no regular file"):
        write_tensors(path, "numbers 1", {}, {})
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_folder_that_does_not_exist_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/file'"):
        write_whole(tmp_path / "nowhere" / "file", b"new")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        write_whole(tmp_path, b"new")
