import gc
import itertools
import os
import pathlib

# AVX has no fused multiply-adds, whose places differ by program. So equal sums are equal to the bit.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"

# The tests' workers keep all cores busy. LLVM's work on a program is not worth dividing then.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

# Many tests compile the same programs. All workers and the next run share this cache.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest

import jaxfl
from jaxfl._support.backend import compile_quickly
from jaxfl.engine import memo

compile_quickly()  # small models run once, so that good compilation would take most of the time

# `configure` would take one device per core. Here there are two, whatever the machine has.
jax.config.update("jax_num_cpu_devices", 2)
jaxfl.configure()
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects that live on. Looking for garbage among them takes a seventh of a test.
gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Give all tests of a group to one worker with `-n`, unless `--dist` names another mode."""
    if getattr(config.option, "numprocesses", None) and config.option.dist in ("no", "load"):
        config.option.dist = "loadgroup"


MOST_MAPS = 30_000
"""Number of this process's memory maps above which JAX's caches are cleared.

Compiled programs hold memory maps. XLA crashes at Linux's default limit of 65,530.
"""

MOST_GROWTH = 3e9
"""Growth of memory in bytes above which JAX's caches are cleared.

The caches keep the traced functions of earlier tests.
"""

BETWEEN_CHECKS = 25
"""Number of tests of a process between two counts of its memory maps, because a count takes 20 ms."""

TESTS = itertools.count(1)
"""Numbers of this process's tests."""

RESIDENT = [0.0]
"""Bytes in memory after JAX's caches were cleared for the last time. 0 before the first time."""


@pytest.fixture(autouse=True)
def _bounded_caches():
    """Forget compiled programs after each test, and clear JAX's caches when memory has grown.

    A program of another test may contain a part of the library that the test replaced.
    """
    yield
    memo.forget()
    process = pathlib.Path("/proc/self")
    if next(TESTS) % BETWEEN_CHECKS or not process.exists():
        return
    maps = (process / "maps").read_bytes().count(b"\n")
    if maps > MOST_MAPS or resident(process) - RESIDENT[0] > MOST_GROWTH:
        jax.clear_caches()
        gc.collect()
        RESIDENT[0] = resident(process)


def resident(process: pathlib.Path) -> float:
    """Return the bytes that a process has in memory, from its folder in /proc."""
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def tfds_dir() -> str:
    """Return the folder with prepared real datasets, or skip the test if it has no CIFAR-10."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder or not os.path.isdir(os.path.join(folder, "cifar10")):
        pytest.skip("no prepared datasets: set TFDS_DATA_DIR to a folder that holds them")
    return os.path.abspath(folder)
