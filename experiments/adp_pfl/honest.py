"""What honest epsilons 1, 3, 6 and 9 allow, with the paper's hundred clients and with two thousand.

python -m experiments.adp_pfl.honest --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import HONEST, HONEST_EPSILONS
from experiments.adp_pfl.tables import LOCAL, PLAIN, Entry, run

if __name__ == "__main__":
    run(
        "honest",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, HONEST_EPSILONS) for method in ("DP-FedAvg", "fixed", "round-level")),
        ],
        lambda setting: [setting.clients, setting.large],
    )
