"""Table VII: the weight lambda of the adaptive norm.

python -m experiments.dp_pfeddsu.table_7 --scale cpu
"""

from experiments.dp_pfeddsu.setting import Entry, run

if __name__ == "__main__":
    run(
        "table_7",
        __doc__,
        {"cifar10": (10,)},
        lambda _: [Entry("DP-pFedDSU", swept={"penalty_weight": [tenths / 10 for tenths in range(1, 8)]})],
    )
