"""The CPU's stand-in for thread-block clusters finds barriers that are missing or that not all threads reach."""

import struct

import pytest
import torch

from tests.ops.emulation import CpuKernel
from tests.ops.helpers import device

pytestmark = pytest.mark.skipif(device.type == "cuda", reason="stands in for a device")

SOURCE = """
struct Arguments { int* sums; };

// Each block adds up what the threads of all blocks have written to their shared memory, its own block's last.
KERNEL(add)(Arguments a) {
  int* own = (int*)dynamic_shared();
  own[thread_index()] = cluster_rank() * THREADS + thread_index();
  BARRIERS
  if (thread_index() == 0) {
    int sum = 0;
    for (int rank = 1; rank <= CLUSTER; rank++) {
      const int* other = (int*)cluster->blocks[(cluster_rank() + rank) % CLUSTER].shared;
      for (int i = 0; i < THREADS; i++) sum += other[i];
    }
    a.sums[block_y() * blocks_x() + block_x()] = sum;
  }
}
"""


def sums(folder, barriers):
    """Return the sum of each block of three clusters of two blocks."""
    source = folder / "add.cu"
    source.write_text(SOURCE.replace("BARRIERS", barriers))
    found = torch.zeros(6, dtype=torch.int32)
    kernel = CpuKernel((str(source),), (("THREADS", 64), ("CLUSTER", 2)), "add")
    kernel((3, 1), 0, 0, struct.pack("<Q", found.data_ptr()))
    return found.tolist()


@pytest.mark.parametrize(
    "barriers", ["arrive_cluster(); wait_cluster();", "arrive_cluster(); sync_block(); wait_cluster();"]
)
def test_all_threads_of_a_cluster_have_written_before_one_goes_on(tmp_path, barriers):
    assert sums(tmp_path, barriers) == [sum(range(128))] * 6


@pytest.mark.parametrize("barriers", ["", "sync_warp();", "sync_block();"])
def test_a_barrier_that_is_missing_shows(tmp_path, barriers):
    wrong = [found != sum(range(128)) for found in sums(tmp_path, barriers)]
    assert any(wrong)


def test_threads_that_wait_for_each_other_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="63 threads of a cluster wait for each other"):
        sums(tmp_path, "if (thread_index() == 0 && cluster_rank() == 0) return; sync_block();")
