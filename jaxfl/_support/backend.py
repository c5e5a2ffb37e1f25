"""Choices that depend on the kind of device: forms of networks, and options of compilation.

All forms give the same results, up to rounding.
"""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jaxlib.version
from jax.sharding import Mesh

Form = Literal["winograd", "im2col", "lax", "grouped", "blocks", "pallas"]
"""Form in which a convolution is computed (see `jaxfl.models.layers`)."""

Network = Literal["usual", "narrow", "residual"]
"""Kind of network: with pooling, with pooling and at most 16 channels, or with residual blocks."""


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    # A scheduler may bind the process to some of the cores that `os.cpu_count` counts.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Backend(NamedTuple):
    """Choices for one kind of device."""

    devices: int | None
    """Number of devices that a host is split into. None leaves the devices that it has."""
    chunk: int | Literal["auto"]
    """Number of clients vectorised at a time on each device. "auto" measures it."""
    chunks: tuple[int, ...]
    """Chunks that "auto" tries, the smallest one first."""
    forms: Mapping[Network, Form]
    """Form of convolutions, by kind of network, for models that name none."""
    joined: bool
    """Whether a client's state is one row of numbers for each dtype, or one for each array."""
    few_kernels: bool
    """Whether vectorised loops are written for few kernels (see `jaxfl.local.lanes`)."""
    microbatch: int | None
    """Largest number of examples in a pass of a network whose feature maps exceed the caches.

    None stands for the batch.
    """
    compiler: Mapping[str, Any]
    """Options of XLA for all programs, by name."""
    compiler_split: Mapping[str, Any]
    """Further options of XLA if a host is split into devices."""


_CPU = Backend(
    # One device per core runs small models about 1.6 times as fast as one device with a thread per
    # core.
    devices=min(16, cores()),
    chunk=1,
    chunks=(1, 8, 32, 128, 512),
    forms=dict.fromkeys(get_args(Network), "winograd"),
    joined=False,
    few_kernels=False,
    microbatch=8,
    # On processors with vectors of this width, a FedDPA round on two cores takes 0.8 of the time.
    compiler={"xla_cpu_prefer_vector_width": 512},
    # Threads within an operation would only compete with the other devices.
    compiler_split={
        "xla_cpu_multi_thread_eigen": False,
        "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
    },
)

# An H200 decided on forms and chunks, by clients per second
# (`benchmarks/results/accelerator_h200.json`):
# LeNet, chunk 512: pallas 13,716, im2col 7,622, grouped 4,725, blocks 2,095, lax 1,287.
# pfl-research's CNN, chunk 128: im2col 5,913, grouped 4,601, lax 2,109. FEMNIST's: 2,506, 1,731,
# 950. FedDPA: im2col 2,025, grouped 1,557, pallas 1,526. ResNet20: grouped 1,367, im2col 809,
# lax 199.
_GPU = Backend(
    devices=None,
    # LeNet by chunk: 128: 12,599, 512: 13,716, 2,048: 14,178. MLP: 128: 50,465, 512: 65,698.
    # "auto" would take 36 s to find out.
    chunk=512,
    chunks=(128, 512, 2048, 8192),
    forms={"usual": "im2col", "narrow": "pallas", "residual": "grouped"},
    joined=True,
    few_kernels=True,
    microbatch=None,
    compiler={},
    compiler_split={},
)

# The compiler's estimates chose these (see `benchmarks.plan`), because no TPU was measured.
# Pixels of few channels waste registers. The weights of 64 MLPs fit next to these, and those of 128
# do not.
_TPU = _GPU._replace(
    chunk="auto",
    forms=dict.fromkeys(get_args(Network), "blocks"),
    chunks=(64, 128, 512),
    few_kernels=False,
)


def with_flags(flags: str) -> str:
    """Return the text of XLA_FLAGS with an option that disables XLA's tiled emitter on CPUs.

    XLA takes this option for all compilations of a process, not for a single one. The emitter
    compiles operations that are fused with no other, such as params - server, for tiles of 16
    numbers. They then take four times as long. Flags that name a file stay unchanged, because XLA
    reads all of the text as the name.

    >>> with_flags("/etc/xla_flags")
    '/etc/xla_flags'
    """
    option = "--xla_backend_extra_options=xla_cpu_disable_tiled_emitter"
    file = bool(flags.strip()) and not flags.lstrip().startswith("--")
    if file or option in flags:
        return flags
    return f"{flags} {option}"


COUNT_FLAG = "--xla_force_host_platform_device_count"
"""XLA's flag for the number of CPU devices. JAX's option overrides it without a warning."""


def count_is_set() -> bool:
    """Return whether the number of CPU devices is set, by JAX's option or by XLA's flag."""
    if jax.config.values["jax_num_cpu_devices"] >= 1:
        return True
    return COUNT_FLAG in os.environ.get("XLA_FLAGS", "")


def visible_gpus() -> int:
    """Return the number of GPUs that this process may use, or 0 if JAX is set to other platforms.

    JAX's backend must not start yet, so this function looks for devices and variables itself. It
    does not check whether the installed JAX supports the GPUs.
    """
    platforms = jax.config.values["jax_platforms"]
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return 0
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in os.environ:
            listed = os.environ[name].split(",")
            # CUDA hides all devices that follow an invalid one.
            valid = itertools.takewhile(re.compile(r"\s*(?:\d|GPU-|MIG-)").match, listed)
            return len(list(valid))
    # Other files of the driver, such as nvidiactl, stand for no GPU.
    nvidia = [path for path in pathlib.Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    if nvidia:
        return len(nvidia)
    # The folder also has files such as `bind`, and only addresses of devices have a colon.
    amd = list(pathlib.Path("/sys/module/amdgpu/drivers").glob("pci:amdgpu/*:*"))
    return len(amd)


_TRACED_FOR = jax.make_user_context(None)
"""Platform that programs are traced for, or None for JAX's default.

It is part of the key of JAX's caches of traces.
"""


def backend(platform: str | None = None) -> Backend:
    """Return the choices for a platform.

    Args:
        platform: "cpu", "tpu", or any name of a GPU's platform. None stands for the platform that
            a program is traced for (see `traced_for`), and otherwise for JAX's default.

    >>> backend("cpu").forms["usual"], backend("tpu").forms["usual"]
    ('winograd', 'blocks')
    """
    # The default comes last, because JAX starts its backend to find it.
    name = platform or _TRACED_FOR.value or jax.default_backend()
    return {"cpu": _CPU, "tpu": _TPU}.get(name, _GPU)


def traced_for(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Return a context in which programs are traced for the platform of a mesh's devices."""
    return _TRACED_FOR(mesh.devices.flat[0].platform)


def on_gpu() -> bool:
    """Return whether programs are traced for GPUs.

    On other devices, kernels for GPUs are interpreted.
    """
    return (_TRACED_FOR.value or jax.default_backend()) == "gpu"


def of_devices(devices: Sequence[jax.Device] | None) -> Backend:
    """Return the choices for the platform of the first device.

    None or an empty sequence stands for JAX's default platform.
    """
    if not devices:
        return backend()
    return backend(devices[0].platform)


def of_mesh(mesh: Mesh) -> Backend:
    """Return the choices for a mesh's devices."""
    return backend(mesh.devices.flat[0].platform)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return the options of XLA for programs on a mesh, by name."""
    kind = of_mesh(mesh)
    if mesh.size > 1:
        return {**kind.compiler, **kind.compiler_split}
    return {**kind.compiler}


def compile_quickly() -> None:
    """Set flags of XLA, by which programs compile in a third of the time, but to slower code.

    The flags serve runs at a small scale on CPUs. Call this function before JAX starts.
    """
    quick = ["--xla_backend_optimization_level=0"]
    # Later versions have no other emitters, and do not accept the name.
    if jaxlib.version.__version_info__ < (0, 11):
        quick.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick])
