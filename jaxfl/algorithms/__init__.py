"""Recipes: one small file per paper or family."""

from jaxfl.algorithms.dp_pfeddsu import dp_pfeddsu
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.algorithms.feddpa import feddpa
from jaxfl.algorithms.fedrep import centaur, fedrep

__all__ = [
    "centaur", "dp_fedavg", "dp_fedavg_fb", "dp_pfeddsu", "fedavg", "feddpa", "fedprox", "fedrep", "local_only",
]  # fmt: skip
