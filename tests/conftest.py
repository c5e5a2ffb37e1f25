import os
import pathlib

# Without fused multiply-adds, which are placed as operations happen to be fused, equal sums are equal to the bit.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"

# Many tests compile the same programs: once for all workers and what they start, and not again in the next run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest

from jaxfl.backend import compile_quickly

compile_quickly()  # small models run once: compiling them well would take most of the time

# As the library does by default on a CPU: one device per core, here two whatever the machine has.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _few_memory_maps():
    """Compiled programs that are kept hold memory maps; XLA crashes where they exceed Linux's default of 65,530."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def tfds_dir() -> str:
    """Folder with prepared real datasets; tests that need it skip where it is absent."""
    folder = os.environ.get("TFDS_DATA_DIR")
    if not folder or not os.path.isdir(os.path.join(folder, "cifar10")):
        pytest.skip("no prepared datasets: set TFDS_DATA_DIR to a folder that holds them")
    return os.path.abspath(folder)
