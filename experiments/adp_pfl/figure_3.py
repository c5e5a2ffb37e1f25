"""Figure 3: accuracy by epsilon of ADP-PFL, DP-FedAvg and DP-LG, beside training alone and FedAvg without noise.

python -m experiments.adp_pfl.figure_3 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import HONEST, LOCAL, PER_ROUND, PLAIN, RELEASED, Entry, run

if __name__ == "__main__":
    epsilons, methods = (1.0, 5.0, 10.0), ("ADP-PFL", "DP-FedAvg", "DP-LG")
    run(
        "figure_3",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, epsilons) for method in (*methods, RELEASED)),
            *(Entry(method, PER_ROUND, epsilons) for method in methods),
        ],
    )
