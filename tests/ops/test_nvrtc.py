"""Compiled CUDA C++ is kept on disk, whole or not at all."""

import pytest
from hf_sparse_attn_kernels import _nvrtc

SOURCES = ("_cluster.cuh", "_cluster_step.cuh", "_cluster_pages.cuh", "quest/cluster.cu")


class _Nvrtc:
    """Stands in for NVRTC; every program compiles to its number."""

    def __init__(self):
        self.programs = 0

    def nvrtcVersion(self, *parts):  # noqa: N802 - NVRTC's name
        return 0


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    library = _Nvrtc()

    def compile_program(library, text, options):
        library.programs += 1
        return b"%d" % library.programs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_nvrtc, "_nvrtc", lambda: library)
    monkeypatch.setattr(_nvrtc, "_compile", compile_program)
    _nvrtc.compiled.cache_clear()
    yield library
    _nvrtc.compiled.cache_clear()


def test_a_kernel_is_compiled_once_and_found_on_disk_by_the_next_process(nvrtc, tmp_path):
    macros = (("CLUSTER", 8),)
    for _ in range(2):
        assert _nvrtc.compiled(SOURCES, (9, 0), macros) == b"1"
    _nvrtc.compiled.cache_clear()
    assert _nvrtc.compiled(SOURCES, (9, 0), macros) == b"1"
    others = [(SOURCES[:1], (9, 0), macros), (SOURCES, (10, 0), macros), (SOURCES, (9, 0), (("CLUSTER", 4),))]
    assert [_nvrtc.compiled(*other) for other in others] == [b"2", b"3", b"4"]
    files = sorted(path.read_bytes() for path in (tmp_path / "hf_sparse_attn_kernels").iterdir())
    assert files == [b"1", b"2", b"3", b"4"]


def test_a_write_that_fails_leaves_no_file(nvrtc, tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(_nvrtc.os, "replace", fail)
    assert _nvrtc.compiled(SOURCES, (9, 0), ()) == b"1"
    assert not list((tmp_path / "hf_sparse_attn_kernels").iterdir())


def test_a_folder_that_cannot_be_made_is_no_error(nvrtc, tmp_path):
    (tmp_path / "hf_sparse_attn_kernels").write_text("a file")
    assert _nvrtc.compiled(SOURCES, (9, 0), ()) == b"1"


def test_without_a_home_folder_nothing_is_kept(nvrtc, tmp_path, monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(_nvrtc.Path, "home", classmethod(no_home))
    assert _nvrtc.compiled(SOURCES, (9, 0), ()) == b"1"
    assert not list(tmp_path.iterdir())


def test_without_nvrtc_the_error_says_where_it_comes_from(monkeypatch):
    _nvrtc._nvrtc.cache_clear()
    monkeypatch.setattr(_nvrtc, "find_spec", lambda name: None)
    monkeypatch.setattr(_nvrtc.torch.version, "cuda", "99.0")
    with pytest.raises(_nvrtc.CudaError, match=r"libnvrtc.so.99 is not found; it comes with torch's CUDA packages"):
        _nvrtc._nvrtc()
