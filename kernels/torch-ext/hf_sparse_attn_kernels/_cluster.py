"""Kernels launched on thread-block clusters through the CUDA driver."""

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ._nvrtc import CudaError, compiled

# Of the driver's enumerations.
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
CLUSTER_DIMENSION, CLUSTER_SCHEDULING_POLICY, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 5, 6
SPREAD = 1
INVALID_CONTEXT = 201
LEAST_CAPABILITY = (9, 0)
PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
ALIGNMENT = 16  # bytes that a thread loads at once
MOST_STRIDE = (1 << 32) - 1  # of tokens and pages, in elements
MOST_CLOCKED, CLOCKS_STRIDE = 1024, 16  # blocks whose clocks are kept, and room for each block's


_Parameters = ctypes.c_char_p * 1


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class ClusterKernel:
    """A kernel on the current device whose blocks come in clusters, one after another in the grid.

    Parameters
    ----------
    sources, macros
        As for `compiled`.
    name : str
        The kernel's name.
    cluster, threads : int
        Blocks of a cluster, 1 for a kernel that has none, and threads of a block.

    Raises
    ------
    CudaError
        NVRTC or the driver is missing, or refuses the kernel.
    """

    def __init__(
        self,
        sources: tuple[str, ...],
        macros: tuple[tuple[str, int], ...],
        name: str,
        *,
        cluster: int,
        threads: int,
    ) -> None:
        torch.cuda.current_stream()  # creates the context
        self._driver = _driver()
        self._cluster, self._threads = cluster, threads
        image = compiled(sources, torch.cuda.get_device_capability(), macros)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), image)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        most_shared = most_shared_bytes(torch.device("cuda", torch.cuda.current_device()))
        self._call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, most_shared)
        if cluster > PORTABLE_CLUSTER:
            self._call("cuFuncSetAttribute", self._function, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        self._launch = lru_cache(maxsize=256)(_launch)

    def max_clusters(self, shared: int) -> int:
        """Return how many clusters the device runs at once; 0 if it has no room for one with so much shared memory."""
        count = ctypes.c_int()
        launch = _launch(self._cluster, (1, 1), self._threads, shared, 0)
        self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._function, ctypes.byref(launch))
        return count.value

    def __call__(self, clusters: tuple[int, int], shared: int, stream: int, arguments: bytes) -> None:
        """Launch clusters in x and y on a stream, by its handle, with `shared` bytes of shared memory for each block.

        `arguments` is the kernel's only parameter, a struct. The kernel may start before the previous one ends.
        """
        parameters = _Parameters(arguments)
        launch = self._launch(self._cluster, clusters, self._threads, shared, stream)
        code = self._driver.cuLaunchKernelEx(ctypes.byref(launch), self._function, parameters, None)
        if code == INVALID_CONTEXT:  # a thread that has not used the device yet
            torch.cuda.set_device(torch.cuda.current_device())
            code = self._driver.cuLaunchKernelEx(ctypes.byref(launch), self._function, parameters, None)
        if code:
            raise _failure(self._driver, "cuLaunchKernelEx", code)

    def read(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a variable of the kernel's sources, when all launches have ended."""
        torch.cuda.synchronize()
        address, found = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(found), self._module, name.encode())
        if size > found.value:
            raise ValueError(f"size={size} for {name}; allowed: at most {found.value}")
        buffer = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", buffer, address, ctypes.c_size_t(size))
        return buffer.raw

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._driver, name, *arguments)


def _launch(cluster: int, clusters: tuple[int, int], threads: int, shared: int, stream: int) -> _Launch:
    attributes = (_Attribute * 3)()
    attributes[0].id = CLUSTER_DIMENSION
    attributes[0].value[:3] = [cluster, 1, 1]
    attributes[1].id = CLUSTER_SCHEDULING_POLICY
    attributes[1].value[0] = SPREAD
    attributes[2].id = PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[2].value[0] = 1
    return _Launch(cluster * clusters[0], clusters[1], 1, threads, 1, 1, shared, stream, attributes, len(attributes))


@lru_cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver is not found: {error}") from error


def _call(driver: Any, name: str, *arguments: Any) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise _failure(driver, name, code)


def _failure(driver: Any, name: str, code: int) -> CudaError:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return CudaError(f"{name} failed: {(text.value or b'unknown error').decode()}")


@lru_cache
def most_shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have on a CUDA device, named by its index.

    227 KB on compute capability 9.0, 99 KB on 12.0.

    Raises
    ------
    CudaError
        The driver is missing, or refuses to say.
    """
    driver, ordinal, size = _driver(), ctypes.c_int(), ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(ordinal), device.index)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(size), MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ordinal)
    return size.value


class Plan(NamedTuple):
    """How a shape is launched."""

    kernel: ClusterKernel
    cluster: int
    """Blocks of a cluster."""
    threads: int
    """Threads of a block."""
    shared: int
    """Bytes of shared memory of a block."""
    local_pages: int
    """Maximum number of pages that a block scores."""
    max_clusters: int
    """Clusters that the device runs at once; the others start late."""


class Room(NamedTuple):
    """Resources of one block of a cluster."""

    shared: int
    """Bytes of shared memory."""
    local_pages: int
    """Maximum number of pages that it scores."""


def plan_launch(
    device: torch.device,
    cluster: int,
    threads: int,
    room_of: Callable[[int, int], Room | RuntimeError],
    kernel_of: Callable[[int], ClusterKernel],
) -> Plan | RuntimeError:
    """Plan a launch with clusters of so many blocks, or of others if these do not fit, or return why none does.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    cluster, threads : int
        Blocks of the cluster to try first, and threads of a block.
    room_of : callable
        Returns what a block needs in clusters of so many blocks, or why they do not serve; also takes the most bytes of
        shared memory that a block may have.
    kernel_of : callable
        Returns the kernel for clusters of so many blocks; may raise `CudaError`.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        allowed = f"allowed: {LEAST_CAPABILITY} and later"
        return RuntimeError(f"impl='cluster' on compute capability {capability}; {allowed}")
    try:
        most_shared = most_shared_bytes(device)
    except CudaError as error:
        return error
    refused = RuntimeError("impl='cluster' does not fit the device")
    for size in dict.fromkeys((cluster, MOST_CLUSTER, PORTABLE_CLUSTER, 4)):
        room = room_of(size, most_shared)
        if isinstance(room, RuntimeError):
            refused = room if size == MOST_CLUSTER else refused  # smaller clusters hold less
            continue
        try:
            kernel = kernel_of(size)
            max_clusters = kernel.max_clusters(room.shared)
        except CudaError as error:
            refused = error
            continue
        if max_clusters > 0:
            return Plan(kernel, size, threads, room.shared, room.local_pages, max_clusters)
        refused = RuntimeError(f"impl='cluster': {device} has no room for a cluster of {size} blocks")
    return refused


def step_macros(
    cluster: int, threads: int, group: int, reduction: int, fixed_bytes: int, clocks: int, **others: int
) -> tuple[tuple[str, int], ...]:
    """Return the macros that a step's kernel is compiled with; `clocks` of 1 for those of its stages."""
    macros = {
        "CLUSTER": cluster,
        "THREADS": threads,
        # Registers for 512 threads of 128 each, or for 256 where the scores of a large group take more.
        "BLOCKS": 1 if group > 4 else 512 // threads,
        "GROUP": group,
        "REDUCE": reduction,
        "FIXED_BYTES": fixed_bytes,
        **others,
    }
    if clocks:
        macros["CLOCKS"] = MOST_CLOCKED
    return tuple(macros.items())


def stage_clocks(plan: Plan, blocks: int, stages: int) -> list[tuple[int, ...]]:
    """Return clocks of the last launch of a kernel compiled with `CLOCKS`, of its first `MOST_CLOCKED` blocks at most.

    They are those of a block's multiprocessor at the block's start and at the end of each of its stages.
    """
    clocks = struct.Struct(f"{CLOCKS_STRIDE}Q")
    stored = plan.kernel.read("stage_clocks", clocks.size * min(blocks, MOST_CLOCKED))
    return [each[: stages + 1] for each in clocks.iter_unpack(stored)]


def misplaced(strided: dict[str, torch.Tensor], contiguous: dict[str, torch.Tensor]) -> ValueError | None:
    """Return the error of tensors that a kernel cannot load, or None. Of the contiguous ones only addresses matter."""
    for name, tensor in strided.items():
        if tensor.data_ptr() % ALIGNMENT or not _are_loadable(tensor.stride(), tensor.element_size()):
            return _misplaced(name, tensor, tensor.stride())
    for name, tensor in contiguous.items():
        if tensor.data_ptr() % ALIGNMENT:
            return _misplaced(name, tensor, ())
    return None


@lru_cache(maxsize=1024)
def _are_loadable(strides: tuple[int, ...], element_size: int) -> bool:
    """Return whether a kernel can load a tensor of these strides, in elements, at an aligned address."""
    return _are_aligned(strides, element_size) and (len(strides) != 4 or strides[2] <= MOST_STRIDE)


def _are_aligned(strides: tuple[int, ...], element_size: int) -> bool:
    return not any(element_size * stride % ALIGNMENT for stride in strides[:-1])


def _misplaced(name: str, tensor: torch.Tensor, strides: tuple[int, ...]) -> ValueError:
    """Return the error of a tensor of which these strides matter, and one of them or the address cannot be loaded."""
    if tensor.data_ptr() % ALIGNMENT or not _are_aligned(strides, tensor.element_size()):
        # Not the address itself: a debug log says each text once, and a cache moves when it grows.
        past = tensor.data_ptr() % ALIGNMENT
        return ValueError(
            f"{name} has strides {list(tensor.stride())} and begins {past} bytes past a multiple of {ALIGNMENT}; "
            f"allowed for impl='cluster': multiples of {ALIGNMENT} bytes"
        )
    stride = f"{name} has stride {strides[2]} in dimension 2"
    return ValueError(f"{stride}; allowed for impl='cluster': at most {MOST_STRIDE}")


def unequal(*required: tuple[str, object, str | None, object]) -> TypeError | ValueError | None:
    """Return the error of the first value that is not the allowed one, or None.

    Each is a name, its value, the argument whose property it is or None, and what is allowed.
    """
    for name, value, argument, allowed in required:
        if value != allowed:
            of_argument = "" if argument is None else f" of {argument}"
            error = TypeError if name == "dtype" else ValueError
            return error(f"{name}={value!r}{of_argument}; allowed for impl='cluster': {allowed!r}")
    return None


def exceeding(*limited: tuple[str, int, int]) -> ValueError | None:
    """Return the error of the first number that is too large, or None. Each is a name, its value, and the maximum."""
    for name, value, most in limited:
        if value > most:
            return ValueError(f"{name}={value}; allowed for impl='cluster': at most {most}")
    return None


def unlaunchable(
    query: torch.Tensor, keys: torch.Tensor, plan_of: Callable[[], Plan | RuntimeError], by_name: bool
) -> Exception | None:
    """Return why a step's clusters cannot be launched, or, unless they are named, do not all run at once, or None."""
    if not query.is_cuda:
        return RuntimeError(f"impl='cluster' with tensors on {str(query.device)!r}; allowed: CUDA tensors")
    plan = plan_of()
    if not isinstance(plan, Plan):
        return plan
    pairs = query.shape[0] * keys.shape[1]
    if not by_name and plan.max_clusters < pairs:
        return ValueError(f"the device runs {plan.max_clusters} of {pairs} clusters at once")
    return None
