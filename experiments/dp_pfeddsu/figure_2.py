"""Figure 2: training loss by round, all methods at one target epsilon.

python -m experiments.dp_pfeddsu.figure_2 --scale cpu
"""

from experiments.common import plot_metric
from experiments.dp_pfeddsu.setting import LOCAL, METHODS, Entry, run

if __name__ == "__main__":
    # The paper does not say how many classes; the study of budgets beside it has five.
    for table in run("figure_2", __doc__, {"cifar10": (5,)}, lambda _: [LOCAL, *(Entry(method) for method in METHODS)]):
        # Mean over participants of the loss in local steps, which holds the penalty of those who have one.
        plot_metric(table.folder / "loss.png", table.title, table.rows, "train_loss", "training loss")
