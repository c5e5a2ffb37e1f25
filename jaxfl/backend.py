"""What depends on the kind of device: how networks are formulated and programs compiled.

Only this file names platforms. All formulations give the same results, up to rounding.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jaxlib.version
from jax.sharding import Mesh

Form = Literal["winograd", "im2col", "lax", "grouped", "packed", "blocks", "pallas"]
"""How a convolution is computed; see `jaxfl.models.layers`."""


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Backend(NamedTuple):
    """The formulation for one kind of device."""

    devices: int | None
    """How many devices a host is split into; None: those that it has."""
    chunk: int | Literal["auto"]
    """Clients vectorised at a time on each device; "auto": measured."""
    chunks: tuple[int, ...]
    """What "auto" measures, as far as time falls and memory holds it."""
    convolution: Form
    """The form of convolutions whose model names none."""
    joined: bool
    """Whether a client's state is one row of numbers, or one for each of its arrays."""
    few_kernels: bool
    """Whether vectorised loops are written for few kernels; see `jaxfl.local.lanes`."""
    microbatch: int | None
    """Examples at once through a network whose maps of a whole batch exceed the caches; None: the whole batch."""
    compiler: Mapping[str, Any]
    """Options of XLA."""
    compiler_split: Mapping[str, Any]
    """Further options if a host is split into devices."""


_CPU = Backend(
    # One device per core runs small models about 1.6 times as fast as one device with a thread per core.
    devices=min(16, cores()),
    chunk=1,
    chunks=(1, 8, 32, 128, 512),
    convolution="winograd",
    joined=False,
    few_kernels=False,
    microbatch=8,
    # A FedDPA round on two cores takes 0.8 of the time with this width, if the processor has such vectors.
    compiler={"xla_cpu_prefer_vector_width": 512},
    # Threads within an operation would only compete with the other devices.
    compiler_split={
        "xla_cpu_multi_thread_eigen": False,
        "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
    },
)

# The forms are by plan, not by measurement (see `benchmarks.plan`): products write every patch, and the gradients of
# plain convolutions copy the maps. "pallas" moves fewer bytes than "grouped", but no plan tells what its kernels take
# besides bytes, and they have not run on a device yet.
_GPU = Backend(None, "auto", (128, 512, 2048, 8192), "grouped", True, True, None, {}, {})

# By the compiler's cycles, too: pixels of few channels waste registers, and the weights of 64 MLPs stay beside these,
# where those of 128 do not fit.
_TPU = _GPU._replace(convolution="blocks", chunks=(64, 128, 512), few_kernels=False)


def with_flags(flags: str) -> str:
    """XLA_FLAGS with an option for the whole process, since single compilations do not take it.

    Without it, an operation that is fused with no other, such as params - server, is compiled for tiles of 16 numbers
    and takes four times as long. Flags that name a file are unchanged: XLA reads all of them as the name.

    >>> with_flags("/etc/xla_flags")
    '/etc/xla_flags'
    """
    option = "--xla_backend_extra_options=xla_cpu_disable_tiled_emitter"
    file = bool(flags.strip()) and not flags.lstrip().startswith("--")
    return flags if file or option in flags else f"{flags} {option}"


COUNT_FLAG = "--xla_force_host_platform_device_count"
"""XLA's flag for the number of CPU devices, which JAX's option silently overrides."""


def count_is_set() -> bool:
    """Return whether the number of CPU devices is set already, by JAX's option or by XLA's flag."""
    return jax.config.values["jax_num_cpu_devices"] >= 1 or COUNT_FLAG in os.environ.get(
        "XLA_FLAGS", ""
    )


def visible_gpus() -> int:
    """Return the number of GPUs that JAX would find, without a start of its backend, which must wait."""
    platforms = jax.config.values["jax_platforms"]
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return 0
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in os.environ:
            return len(re.findall(r"(?:^|,)\s*(?:\d+|GPU-|MIG-)", os.environ[name]))
    nvidia = [path for path in pathlib.Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return len(nvidia) or len(
        list(pathlib.Path("/sys/module/amdgpu/drivers").glob("pci:amdgpu/*:*"))
    )


_TRACED_FOR = jax.make_user_context(None)


def backend(platform: str | None = None) -> Backend:
    """The formulation for a platform.

    Args:
        platform: "cpu", or an accelerator's ("gpu", "tpu"); None: the one that a program is traced for (see
            `traced_for`), else JAX's default.

    >>> backend("cpu").convolution, backend("tpu").convolution
    ('winograd', 'blocks')
    """
    name = platform or _TRACED_FOR.value or jax.default_backend()
    return {"cpu": _CPU, "tpu": _TPU}.get(name, _GPU)


def traced_for(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Within it, models take the form for these devices, whatever JAX's default is."""
    return _TRACED_FOR(mesh.devices.flat[0].platform)


def on_gpu() -> bool:
    """Whether programs are traced for GPUs; elsewhere, kernels that are written for them are interpreted."""
    return (_TRACED_FOR.value or jax.default_backend()) == "gpu"


def of_devices(devices: Sequence[jax.Device] | None) -> Backend:
    """The formulation for some devices; None: for JAX's default."""
    return backend(devices[0].platform if devices else None)


def of_mesh(mesh: Mesh) -> Backend:
    """The formulation for a mesh's devices."""
    return backend(mesh.devices.flat[0].platform)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Options of XLA for programs on a mesh."""
    kind = of_mesh(mesh)
    return {**kind.compiler, **kind.compiler_split} if mesh.size > 1 else {**kind.compiler}


def compile_quickly() -> None:
    """Let programs of this process be compiled in a third of the time, and run slowly: for smoke scales, on a CPU.

    Call it before JAX starts.
    """
    quick = ["--xla_backend_optimization_level=0"]
    if jaxlib.version.__version_info__ < (
        0,
        11,
    ):  # later ones have no other emitters, and stop at the name
        quick.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick])
