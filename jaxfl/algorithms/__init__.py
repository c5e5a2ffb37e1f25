"""Recipes: one small file per paper or family."""

from jaxfl.algorithms.adp_pfl import adp_pfl
from jaxfl.algorithms.blur_lus import blur_lus
from jaxfl.algorithms.dp_fedsam import dp_fedsam
from jaxfl.algorithms.dp_lg import dp_lg
from jaxfl.algorithms.dp_pfeddsu import dp_pfeddsu
from jaxfl.algorithms.fed_smp import fed_smp
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.algorithms.feddpa import feddpa
from jaxfl.algorithms.fedrep import centaur, fedrep
from jaxfl.algorithms.padpfl import padpfl
from jaxfl.algorithms.pdp_fl import pdp_fl
from jaxfl.algorithms.pmtl import pmtl
from jaxfl.algorithms.ppsgd import ppsgd

__all__ = [
    "adp_pfl", "blur_lus", "centaur", "dp_fedavg", "dp_fedavg_fb", "dp_fedsam", "dp_lg", "dp_pfeddsu", "fed_smp",
    "fedavg", "feddpa", "fedprox", "fedrep", "local_only", "padpfl", "pdp_fl", "pmtl", "ppsgd",
]  # fmt: skip
