"""Figure 2: training loss by round, all methods at one target epsilon.

python -m experiments.dp_pfeddsu.figure_2 --scale cpu
"""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.dp_pfeddsu.setting import LOCAL, METHODS, Entry, Shown, run


def draw(shown: Shown) -> None:
    """Mean over participants and seeds of the loss in local steps, which holds the penalty of those who have one."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in shown.rows:
        loss = np.array([[entry["train_loss"] for entry in metrics] for metrics in row.metrics])
        axes.plot([entry["round"] for entry in row.metrics[0]], loss.mean(0), marker=".", label=row.method)
    axes.set(title=shown.title, xlabel="round", ylabel="training loss")
    axes.legend(fontsize="small")
    figure.savefig(shown.folder / "loss.png", dpi=120)
    print(f"training loss: {shown.folder / 'loss.png'}")


if __name__ == "__main__":
    # The paper does not say how many classes; the study of budgets beside it has five.
    for one in run("figure_2", __doc__, {"cifar10": (5,)}, lambda _: [LOCAL, *(Entry(method) for method in METHODS)]):
        draw(one)
