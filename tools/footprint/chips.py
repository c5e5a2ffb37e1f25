"""Accelerators for which programs can be compiled without the hardware.

XLA's compilers for TPUs and NVIDIA's GPUs run on Linux machines without such a device. Install
them by `pip install jaxfl[plan-tpu]` and `pip install jaxfl[plan-gpu]`.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.experimental import topologies


class Chip(NamedTuple):
    """Data sheet of a chip."""

    platform: str
    """Name of the platform in JAX: "tpu" or "cuda"."""
    flops: float
    """Peak rate of matrix products, in operations per second.

    The products are in bfloat16 on a TPU, and in float32 without tensor cores on a GPU.
    """
    bandwidth: float
    """Bandwidth of the memory, in bytes per second."""
    memory: float
    """Size of the memory, in bytes."""
    clock: float
    """Clock rate, in cycles per second."""
    described: Mapping[str, str]
    """Device description passed to the compiler."""


def _gpu(
    architecture: str,
    cores: int,
    shared: int,
    cache: int,
    flops: float,
    bandwidth: float,
    clock: float,
    memory: float = 80e9,
) -> Chip:
    """Return a GPU, which XLA's compiler knows by the text of a `GpuTargetConfig`.

    Args:
        architecture: Fields of the compute capability, as text.
        cores: Number of multiprocessors.
        shared: Bytes of shared memory that a block can have.
        cache: Bytes of the L2 cache.
        flops: Peak rate, see `Chip`.
        bandwidth: Bytes per second of the memory.
        clock: Cycles per second.
        memory: Bytes of the memory.
    """
    target = f"""
    gpu_device_info {{
      cuda_compute_capability {{ {architecture} }} core_count: {cores} fpus_per_core: 128
      clock_rate_ghz: {clock / 1e9} memory_bandwidth: {bandwidth:.0f}
      device_memory_size: {memory:.0f} l2_cache_size: {cache}
      shared_memory_per_core: {shared + 1024} shared_memory_per_block_optin: {shared}
      shared_memory_per_block: 49152 registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
      dnn_version: "9.10.0" device_address_bits: 64
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
    """
    described = {"target_config": target, "topology": "1x1x1"}
    return Chip("cuda", flops, bandwidth, memory, clock, described)


_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES", 132, 232_448, 50 * 2**20, 66.9e12
"""Arguments of `_gpu` that the Hopper chips share, from the architecture to the peak rate."""

CHIPS = {
    "v5e": Chip("tpu", 197e12, 819e9, 16 * 2**30, 1.5e9, {"topology_name": "v5e:2x2"}),
    "v6e": Chip("tpu", 918e12, 1640e9, 32 * 2**30, 1.75e9, {"topology_name": "v6e:2x2"}),
    "a100": _gpu("major: 8", 108, 166_912, 40 * 2**20, 19.5e12, 2039e9, 1.41e9),
    "h100": _gpu(*_HOPPER, 3352e9, 1.98e9),
    "h200": _gpu(*_HOPPER, 4800e9, 1.98e9, 141e9),
}


def run_here() -> None:
    """Make JAX start on the CPU. Call this function before JAX starts.

    If a chip's compiler is installed, JAX would otherwise look for the chip.
    """
    jax.config.update("jax_platforms", "cpu")


def device_of(chip: str) -> jax.Device:
    """Return a device of a chip in `CHIPS`. Programs can be compiled for it, but not run.

    Raises:
        ValueError: The chip's compiler is not installed, or does not start.
    """
    sheet = CHIPS[chip]
    # Keep XLA from querying local hardware.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        topology = topologies.get_topology_desc(platform=sheet.platform, **sheet.described)
        return topology.devices[0]
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        extra = {"tpu": "plan-tpu", "cuda": "plan-gpu"}[sheet.platform]
        raise ValueError(
            f"chip must have a compiler that starts, got {chip!r}. "
            f"Install it by `pip install 'jaxfl[{extra}]'`."
        ) from error
