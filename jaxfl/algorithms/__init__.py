r"""Algorithms, one file per paper or family, and the adaptive optimizers of a server.

Equations have these letters, unless a method says otherwise: :math:`F_i` is the mean loss of client
i on its own examples, and :math:`w^t` or :math:`\theta^t` are the weights that round t broadcasts.
:math:`\Delta_i` is the update of client i, :math:`\Omega_t` are the participants, and q N of the N
clients are expected to take part. :math:`\eta` and :math:`\eta_g` are learning rates of clients and
of the server, :math:`\phi` is an extractor of features, and :math:`\odot` multiplies by coordinate.
"Aggregate" is what the mechanism returns to the server, for instance a noisy mean of clipped
updates.
"""

from jaxfl.algorithms.adp_pfl import adp_pfl, adp_pfl_paper
from jaxfl.algorithms.apfl import apfl
from jaxfl.algorithms.blur_lus import blur_lus
from jaxfl.algorithms.byzantine import byzantine
from jaxfl.algorithms.ditto import ditto
from jaxfl.algorithms.dp_fedavg_mixed import dp_fedavg_mixed
from jaxfl.algorithms.dp_fedsam import dp_fedsam
from jaxfl.algorithms.dp_lg import dp_lg
from jaxfl.algorithms.dp_pfeddsu import dp_pfeddsu, dp_pfeddsu_paper
from jaxfl.algorithms.fed_smp import fed_smp
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.algorithms.fedbuff import fedbuff
from jaxfl.algorithms.feddpa import feddpa, feddpa_paper
from jaxfl.algorithms.fedrep import centaur, fedrep
from jaxfl.algorithms.fedrod import fedrod
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.algorithms.ifca import ifca
from jaxfl.algorithms.matrix_scaled import matrix_scaled
from jaxfl.algorithms.mixed import mixed
from jaxfl.algorithms.one_shot import dp_prototypes, dp_ridge
from jaxfl.algorithms.padpfl import padpfl, padpfl_paper
from jaxfl.algorithms.pdp_fl import pdp_fl, pdp_fl_paper
from jaxfl.algorithms.per_fedavg import per_fedavg
from jaxfl.algorithms.pfedme import pfedme
from jaxfl.algorithms.pmtl import mr_mtl, pmtl, pmtl_ft
from jaxfl.algorithms.ppsgd import ppsgd, ppsgd_centaur
from jaxfl.algorithms.prior_corrected import prior_corrected
from jaxfl.algorithms.scaffold import scaffold
from jaxfl.algorithms.server import fedadagrad, fedadam, fedyogi

__all__ = [
    "adp_pfl", "adp_pfl_paper", "apfl", "blur_lus", "byzantine", "centaur", "ditto", "dp_fedavg",
    "dp_fedavg_fb", "dp_fedavg_mixed", "dp_fedsam", "dp_lg", "dp_pfeddsu", "dp_pfeddsu_paper",
    "dp_prototypes", "dp_ridge", "fed_smp", "fedadagrad", "fedadam", "fedavg", "fedbuff", "feddpa",
    "feddpa_paper", "fedprox", "fedrep", "fedrod", "fedyogi", "fine_tuned", "ifca", "local_only",
    "matrix_scaled", "mixed", "mr_mtl", "padpfl", "padpfl_paper", "pdp_fl", "pdp_fl_paper",
    "per_fedavg", "pfedme", "pmtl", "pmtl_ft", "ppsgd", "ppsgd_centaur", "prior_corrected",
    "scaffold",
]  # fmt: skip
