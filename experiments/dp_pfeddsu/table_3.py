"""Table III: all methods by privacy budget.

python -m experiments.dp_pfeddsu.table_3 --scale cpu
"""

from experiments.dp_pfeddsu.setting import LOCAL, METHODS, Entry, run

if __name__ == "__main__":
    run(
        "table_3",
        __doc__,
        {"cifar10": (5,)},
        lambda _: [LOCAL, *(Entry(method, epsilon) for epsilon in (0.5, 1.0, 2.0) for method in METHODS)],
    )
