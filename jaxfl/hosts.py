"""Several processes as one run: they take the same decisions, and none outlives the others.

Every process runs the same program; `jax.process_index() == 0` writes the reports.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def largest(*values: float | int) -> list[float | int]:
    """The largest of each value over all processes, as float32: what they decide by it is decided alike."""
    if jax.process_count() == 1:
        return list(values)
    return multihost_utils.process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


def of_first(array: np.ndarray) -> np.ndarray:
    """The first process's array, for all of them."""
    return array if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(array))
