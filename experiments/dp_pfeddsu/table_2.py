"""Table II: all methods by classes per client, at one target epsilon.

python -m experiments.dp_pfeddsu.table_2 --dataset cifar10 --classes 2 5 10 --scale cpu
"""

from experiments.dp_pfeddsu.setting import LOCAL, METHODS, Entry, run

if __name__ == "__main__":
    run(
        "table_2",
        __doc__,
        {"cifar10": (2, 5, 10), "cifar100": (3, 5, 10), "emnist": (5, 10)},
        lambda _: [LOCAL, *(Entry(method) for method in METHODS)],
    )
