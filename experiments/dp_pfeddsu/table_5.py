"""Table V: the share S of the sparse layer's weights that is kept, with one sparse layer and no adaptive norm.

python -m experiments.dp_pfeddsu.table_5 --scale cpu
"""

from experiments.dp_pfeddsu.setting import Entry, run

if __name__ == "__main__":
    # The paper names neither; its accuracy at S = 0.05 is that of one layer in table VI.
    rest = {"sparse_layers": 1, "penalty_weight": 0.0}
    run(
        "table_5",
        __doc__,
        {"cifar10": (10,)},
        lambda _: [Entry("DP-pFedDSU", options=rest, swept={"density": (0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9)})],
    )
