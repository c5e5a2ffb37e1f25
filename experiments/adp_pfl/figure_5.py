"""Figure 5: masks of Fisher information, of the largest updates, and at random, by epsilon.

python -m experiments.adp_pfl.figure_5 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import FEW_EPSILONS, HONEST, HONEST_EPSILONS, PER_ROUND
from experiments.adp_pfl.tables import LOCAL, Entry, run

if __name__ == "__main__":
    run(
        "figure_5",
        __doc__,
        lambda _: [
            LOCAL,
            Entry("Fisher", HONEST, HONEST_EPSILONS),
            *(Entry(mask, HONEST, FEW_EPSILONS) for mask in ("top-k", "random")),
            *(Entry(mask, PER_ROUND, (1.0, 5.0, 10.0)) for mask in ("Fisher", "top-k", "random")),
        ],
    )
