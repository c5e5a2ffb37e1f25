import gc
import os
import pathlib

# Without fused multiply-adds, which are placed as operations happen to be fused, equal sums are equal to the bit.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"

# Many tests compile the same programs: once for all workers and what they start, and not again in the next run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest

import jaxfl
from jaxfl.backend import compile_quickly
from jaxfl.engine import memo

compile_quickly()  # small models run once: compiling them well would take most of the time

# `configure` would take one device per core. Here there are two, whatever the machine has.
jax.config.update("jax_num_cpu_devices", 2)
jaxfl.configure()
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Let several workers (`-n`) keep the tests of a group together."""
    if getattr(config.option, "numprocesses", None) and config.option.dist in ("no", "load"):
        config.option.dist = "loadgroup"


MOST_MAPS = 20_000
"""Memory maps of a process, which compiled programs hold; XLA crashes at Linux's default limit of 65,530."""

MOST_GROWTH = 1.5e9
"""Bytes that traced functions of former tests may take: JAX keeps all of them."""

RESIDENT = [0.0]
"""Bytes in memory when JAX's caches were cleared for the last time."""


@pytest.fixture(autouse=True)
def _bounded_caches():
    """Bound what JAX keeps, and give no test the programs of another one, which may have replaced a part of us."""
    yield
    memo.forget()
    process = pathlib.Path("/proc/self")
    if not process.exists():
        return
    maps = (process / "maps").read_bytes().count(b"\n")
    if maps > MOST_MAPS or resident(process) - RESIDENT[0] > MOST_GROWTH:
        jax.clear_caches()
        gc.collect()
        RESIDENT[0] = resident(process)


def resident(process: pathlib.Path) -> float:
    """Return the bytes of a process that are in memory."""
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def tfds_dir() -> str:
    """Folder with prepared real datasets; tests that need it skip where it is absent."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder or not os.path.isdir(os.path.join(folder, "cifar10")):
        pytest.skip("no prepared datasets: set TFDS_DATA_DIR to a folder that holds them")
    return os.path.abspath(folder)
