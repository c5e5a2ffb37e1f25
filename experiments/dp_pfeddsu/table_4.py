"""Table IV: neither component (CENTAUR), reparameterised training alone (lambda = 0), and with the adaptive norm.

python -m experiments.dp_pfeddsu.table_4 --dataset cifar10 --scale cpu
"""

from experiments.dp_pfeddsu.setting import Entry, run

if __name__ == "__main__":
    run(
        "table_4",
        __doc__,
        {"cifar10": (10, 5), "emnist": (10,)},
        lambda setting: [
            Entry("CENTAUR"),
            Entry("DP-pFedDSU", swept={"penalty_weight": (0.0, setting.penalty_weight)}),
        ],
    )
