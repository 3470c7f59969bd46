"""CUDA's managed memory, by a driver that only notes its calls: what is freed, and when there is none."""

import ctypes
import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from hf_sparse_attn.cache.host import managed, release


def test_without_a_driver_no_memory_is_managed(monkeypatch):
    monkeypatch.setattr(managed, "_driver", lambda: None)
    assert managed.managed_bytes(16, torch.device("cuda", 0)) is None


class Driver:
    """The calls of CUDA's driver that manage memory, over a buffer of the test; one of them may fail."""

    def __init__(self, is_concurrent=True, failing=""):
        self.is_concurrent, self.failing = is_concurrent, failing
        self.buffer = (ctypes.c_ubyte * 64)(*range(64))
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.is_concurrent
            if name == "cuMemAllocManaged":
                arguments[0]._obj.value = ctypes.addressof(self.buffer)
            if name == "cuMemsetD8Async":
                ctypes.memset(*(argument.value for argument in arguments[:3]))
            return 2 if name == self.failing else 0

        return call


@dataclass
class DeviceMemory:
    """Free bytes of a device, and bytes that PyTorch keeps for later."""

    free: int = 1 << 20
    kept: int = 0

    def empty_cache(self):
        self.free, self.kept = self.free + self.kept, 0


@pytest.fixture
def memory():
    return DeviceMemory()


@pytest.fixture
def of_driver(memory, monkeypatch):
    """A function that returns 64 bytes of a driver's managed memory for a device 3, or None."""

    class Stream:
        cuda_stream = 7

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (memory.free, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 32 + memory.kept)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 32)
    monkeypatch.setattr(torch.cuda, "empty_cache", memory.empty_cache)
    monkeypatch.setattr(managed, "release", lambda free, device: free())
    monkeypatch.setattr(managed, "_managed_bytes", Counter())

    def allocate(driver):
        monkeypatch.setattr(managed, "_driver", lambda: driver)
        return managed.managed_bytes(64, torch.device("cuda", 3))

    return allocate


def test_managed_memory_is_zeros_that_are_freed_with_the_last_view(of_driver):
    driver = Driver()
    host = of_driver(driver)
    assert host.tolist() == [0] * 64
    view = host[8:]
    del host
    gc.collect()
    assert "cuMemFree_v2" not in driver.calls
    view[0] = 5
    assert driver.buffer[8] == 5
    del view
    gc.collect()
    assert driver.calls.count("cuMemFree_v2") == 1


@pytest.mark.parametrize("failing", ["cuMemAdvise", "cuMemPrefetchAsync", "cuMemsetD8Async", "cuMemAllocManaged"])
def test_managed_memory_that_is_refused_in_part_is_freed(failing, of_driver):
    driver = Driver(failing=failing)
    assert of_driver(driver) is None
    gc.collect()
    assert driver.calls.count("cuMemFree_v2") == (failing != "cuMemAllocManaged")


def test_no_memory_is_managed_where_host_and_device_may_not_share_it(of_driver):
    driver = Driver(is_concurrent=False)
    assert of_driver(driver) is None
    assert driver.calls == ["cuDeviceGetAttribute"]


def test_no_more_memory_is_managed_than_the_device_has_free(memory, of_driver):
    memory.free = 150
    held = [of_driver(Driver()) for _ in range(3)]
    assert [each is None for each in held] == [False, False, True]
    held.pop(0)
    gc.collect()
    assert of_driver(Driver()) is not None


@pytest.mark.parametrize(("kept", "given_back"), [(23, False), (24, True)])
def test_memory_that_pytorch_keeps_is_given_back_if_that_suffices(kept, given_back, memory, of_driver):
    memory.free, memory.kept = 40, kept
    assert (of_driver(Driver()) is not None) == given_back
    assert memory.kept == (0 if given_back else kept)


def test_what_cannot_be_freed_while_a_graph_is_recorded_waits(monkeypatch):
    freed, is_recording = [], True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_recording)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: freed.append("after the device's work"))
    release.release(lambda: freed.append("memory"), torch.device("cuda", 0))
    release.release_postponed()
    assert freed == []
    is_recording = False
    release.release_postponed()
    release.release_postponed()
    assert freed == ["after the device's work", "memory"]
