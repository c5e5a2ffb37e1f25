"""What honest epsilons 1, 3, 6 and 9 allow, with the paper's hundred clients and with two thousand.

python -m experiments.adp_pfl.honest --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import HONEST, LOCAL, PLAIN, Entry, run

if __name__ == "__main__":
    run(
        "honest",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, (1.0, 3.0, 6.0, 9.0)) for method in ("DP-FedAvg", "fixed", "round-level")),
        ],
        lambda setting: [setting.clients, setting.large],
    )
