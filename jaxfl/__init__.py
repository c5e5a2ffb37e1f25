"""Differentially private, personalized federated learning with thousands of simulated clients."""

import contextlib
import os

import jax

if jax.config.values["jax_num_cpu_devices"] < 1:
    # One device per core runs small models about 1.6 times as fast as one device with a thread per core.
    # Accelerators ignore it. Once JAX's backend has started it is too late, and JAX raises.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(16, len(os.sched_getaffinity(0))))

from jaxfl import algorithms, data, models, privacy
from jaxfl.simulation import Result, simulate, sweep
from jaxfl.types import Algorithm, ClientData, Clients, Ledger, Message, Model

__all__ = [
    "Algorithm", "ClientData", "Clients", "Ledger", "Message", "Model", "Result",
    "algorithms", "data", "models", "privacy", "simulate", "sweep",
]  # fmt: skip
