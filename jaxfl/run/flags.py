"""Flags of JAX that a run sets for its programs, because the caller's flags may differ."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

_LOG = logging.getLogger("jaxfl")


def under_own_flags(run: Callable) -> Callable:
    """Set the flags that programs need, so that a run's results do not depend on the caller's.

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
    """Allow undefined scores, for which `jax_debug_nans` and `jax_debug_infs` raise errors."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield
