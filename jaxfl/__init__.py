"""Differentially private, personalized federated learning with thousands of simulated clients."""

import contextlib
import os

import jax

from jaxfl.backend import backend, count_is_set, with_flags

# JAX reads the flags and the number of devices when its backend starts. Options that are set
# already stay.
os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""))
if not count_is_set():
    # Accelerators ignore the number. JAX raises if its backend has started already.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", backend("cpu").devices)

from jaxfl import algorithms, callbacks, data, models, privacy, tasks
from jaxfl.engine import compilation_cache
from jaxfl.engine.memo import clear_caches
from jaxfl.local import LocalSGD
from jaxfl.run.attack import membership
from jaxfl.run.compare import Candidate, compare, grid, spread
from jaxfl.run.comparison import Comparison
from jaxfl.run.evaluate import evaluate
from jaxfl.run.page import write_report
from jaxfl.run.recorder import Result
from jaxfl.run.simulate import simulate, sweep
from jaxfl.tasks import Metric, Task
from jaxfl.types import Algorithm, ClientData, Clients, Ledger, Message, Model, Terms

__version__ = "0.1.0"

compilation_cache.keep()

__all__ = [
    "Algorithm",
    "Candidate",
    "ClientData",
    "Clients",
    "Comparison",
    "Ledger",
    "LocalSGD",
    "Message",
    "Metric",
    "Model",
    "Result",
    "Task",
    "Terms",
    "algorithms",
    "callbacks",
    "clear_caches",
    "compare",
    "data",
    "evaluate",
    "grid",
    "membership",
    "models",
    "privacy",
    "simulate",
    "spread",
    "sweep",
    "tasks",
    "write_report",
]
