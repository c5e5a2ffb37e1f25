"""Figure 5: masks of Fisher information, of the largest updates, and at random, by epsilon.

python -m experiments.adp_pfl.figure_5 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import HONEST, LOCAL, PER_ROUND, Entry, run

if __name__ == "__main__":
    epsilons, masks = (1.0, 5.0, 10.0), ("Fisher", "top-k", "random")
    run(
        "figure_5",
        __doc__,
        lambda _: [LOCAL, *(Entry(mask, reading, epsilons) for reading in (HONEST, PER_ROUND) for mask in masks)],
    )
