"""Recipes: one small file per paper or family."""

from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.algorithms.feddpa import feddpa

__all__ = ["dp_fedavg", "dp_fedavg_fb", "fedavg", "feddpa", "fedprox", "local_only"]
