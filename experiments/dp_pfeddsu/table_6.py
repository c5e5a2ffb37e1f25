"""Table VI: the number of sparse layers, without the adaptive norm.

python -m experiments.dp_pfeddsu.table_6 --scale cpu
"""

from experiments.dp_pfeddsu.setting import Entry, run

if __name__ == "__main__":
    # The paper names no weight; its accuracy with four layers is that of weight 0 in table IV.
    run(
        "table_6",
        __doc__,
        {"cifar10": (10,)},
        lambda setting: [
            Entry("DP-pFedDSU", options={"sparse_layers": layers, "penalty_weight": 0.0})
            for layers in setting.layer_sweep
        ],
    )
