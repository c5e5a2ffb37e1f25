"""Differentially private, personalized federated learning with thousands of simulated clients."""

import contextlib

import jax

from jaxfl.backend import backend

if jax.config.values["jax_num_cpu_devices"] < 1:
    # Accelerators ignore it. Once JAX's backend has started it is too late, and JAX raises.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", backend("cpu").devices)

from jaxfl import algorithms, data, models, privacy
from jaxfl.simulation import Result, simulate, sweep
from jaxfl.types import Algorithm, ClientData, Clients, Ledger, Message, Model

__all__ = [
    "Algorithm", "ClientData", "Clients", "Ledger", "Message", "Model", "Result",
    "algorithms", "data", "models", "privacy", "simulate", "sweep",
]  # fmt: skip
