"""Recipes: one small file per paper or family."""

from jaxfl.algorithms.adp_pfl import adp_pfl, adp_pfl_paper
from jaxfl.algorithms.blur_lus import blur_lus
from jaxfl.algorithms.dp_fedsam import dp_fedsam
from jaxfl.algorithms.dp_lg import dp_lg
from jaxfl.algorithms.dp_pfeddsu import dp_pfeddsu, dp_pfeddsu_paper
from jaxfl.algorithms.fed_smp import fed_smp
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.algorithms.feddpa import feddpa, feddpa_paper
from jaxfl.algorithms.fedrep import centaur, fedrep
from jaxfl.algorithms.padpfl import padpfl, padpfl_paper
from jaxfl.algorithms.pdp_fl import pdp_fl, pdp_fl_paper
from jaxfl.algorithms.pmtl import pmtl, pmtl_ft
from jaxfl.algorithms.ppsgd import ppsgd, ppsgd_centaur

__all__ = [
    "adp_pfl", "adp_pfl_paper", "blur_lus", "centaur", "dp_fedavg", "dp_fedavg_fb", "dp_fedsam", "dp_lg", "dp_pfeddsu",
    "dp_pfeddsu_paper", "fed_smp", "fedavg", "feddpa", "feddpa_paper", "fedprox", "fedrep", "local_only", "padpfl",
    "padpfl_paper", "pdp_fl", "pdp_fl_paper", "pmtl", "pmtl_ft", "ppsgd", "ppsgd_centaur",
]  # fmt: skip
