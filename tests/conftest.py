import os

import jax
import pytest

# As the library does by default on CPU: one device per core, here two whatever the machine has.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="session")
def tfds_dir() -> str:
    """Folder with prepared real datasets; tests that need it skip where it is absent."""
    folder = os.environ.get("TFDS_DATA_DIR") or os.path.join(os.path.dirname(__file__), "..", "..", "shared", "tfds")
    if not os.path.isdir(os.path.join(folder, "cifar10")):
        pytest.skip("no prepared datasets: set TFDS_DATA_DIR to a folder that holds them")
    return os.path.abspath(folder)
