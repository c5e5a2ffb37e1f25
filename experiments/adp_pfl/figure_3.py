"""Figure 3: accuracy by epsilon of ADP-PFL, DP-FedAvg and DP-LG, beside training alone and FedAvg without noise.

python -m experiments.adp_pfl.figure_3 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import FEW_EPSILONS, HONEST, HONEST_EPSILONS, NOISE_ALONE, PER_ROUND
from experiments.adp_pfl.tables import LOCAL, PLAIN, RELEASED, Entry, run

if __name__ == "__main__":
    run(
        "figure_3",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, HONEST_EPSILONS) for method in ("ADP-PFL", "DP-FedAvg")),
            *(Entry(method, HONEST, FEW_EPSILONS) for method in ("DP-LG", RELEASED)),
            Entry(NOISE_ALONE, HONEST, (1.0,)),
            *(Entry(method, PER_ROUND, (1.0, 5.0, 10.0)) for method in ("ADP-PFL", "DP-FedAvg", "DP-LG")),
        ],
    )
