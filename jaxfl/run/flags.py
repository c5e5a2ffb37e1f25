"""Flags of JAX: those of the process, which the user sets, and those that a run needs."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxfl._support.backend import backend, cores, count_is_set, with_flags
from jaxfl.engine import compilation_cache

_LOG = logging.getLogger("jaxfl")


def configure() -> None:
    """Configure JAX for simulations, in the whole process.

    - CPUs are split into one device per core, up to 16, which run small models about 1.6 times as
      fast as one device. Accelerators ignore the number.
    - XLA compiles operations that no other operation is fused with to faster code on CPUs.
    - Compiled programs are cached in a folder, so that another process does not compile them again.
      `JAXFL_COMPILATION_CACHE=0` turns this cache off, and `JAXFL_CACHE_DIR` names its parent.

    Call the function before JAX starts, which happens with the first array, key or list of devices.
    Later it cannot split CPUs, and logs a warning. Options that are set already, by JAX's
    configuration or by environment variables, stay. The command `jaxfl` calls this function.
    Results do not depend on it, up to rounding.
    """
    # XLA reads this variable when JAX starts its first backend.
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""))
    compilation_cache.enable()
    if count_is_set():
        return
    try:
        jax.config.update("jax_num_cpu_devices", backend("cpu").devices)
    # JAX accepts no other number once its devices exist.
    except RuntimeError:
        _LOG.warning(
            "jaxfl.configure() cannot use all cores, because JAX has started already. "
            "Call it before the first array."
        )


@functools.cache
def _advise() -> None:
    """Log once per process that `configure` would split several cores into several devices.

    Nothing is logged if JAX has no CPU, one core, or a number of devices that the user has set.
    """
    if jax.default_backend() != "cpu" or count_is_set() or cores() == 1:
        return
    _LOG.warning(
        "This run uses one device for %d cores. jaxfl.configure(), called before JAX starts, "
        "splits them into several devices, and caches compiled programs.",
        cores(),
    )


def under_own_flags(run: Callable) -> Callable:
    """Wrap a function so that it runs under the flags of JAX that programs need.

    A run's results then do not depend on the caller's values of these flags.

    Numbers have 32 bits and are promoted in the standard way, and a seed gives the bits that JAX
    draws by default. A run is one compiled program, which moves its own arrays. Neither
    `jax_disable_jit` nor `jax_transfer_guard` applies to this program.
    """

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # pyrefly: ignore[missing-attribute]
            _LOG.warning(
                "jax_disable_jit does not apply to a run, which is one program. "
                "Use jax.debug.print in it."
            )
        _advise()
        # JAX reads these flags while it traces and compiles, which both happen in the call.
        with (
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.disable_jit(False),
            jax.transfer_guard("allow"),
            jax.threefry_partitionable(True),
        ):
            return run(*args, **kwargs)

    return call


@contextlib.contextmanager
def scores_may_be_undefined() -> Iterator[None]:
    """Turn `jax_debug_nans` and `jax_debug_infs` off in the block, because scores may be NaN."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield
