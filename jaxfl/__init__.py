"""Differentially private, personalized federated learning with thousands of simulated clients."""

import os

import jax

if "jax_num_cpu_devices" in jax.config.values and jax.config.jax_num_cpu_devices < 1:
    # One device per core runs small models about 1.6 times as fast as one device with a thread per core.
    # JAX ignores it on accelerators; after its backend has started it is too late, and it says so.
    try:
        jax.config.update("jax_num_cpu_devices", min(16, len(os.sched_getaffinity(0))))
    except RuntimeError:
        pass

from jaxfl import algorithms, data, models, privacy
from jaxfl.simulation import Result, simulate
from jaxfl.types import Algorithm, ClientData, Clients, Ledger, Message, Model

__all__ = [
    "Algorithm", "ClientData", "Clients", "Ledger", "Message", "Model", "Result",
    "algorithms", "data", "models", "privacy", "simulate",
]  # fmt: skip
