"""A thousand clients of 50 examples at honest budgets: where does federation beat training alone?

python -m experiments.dp_pfeddsu.large --dataset cifar10 --classes 2 5
"""

from experiments.dp_pfeddsu.setting import LOCAL, SOUND, Entry, run

if __name__ == "__main__":
    run(
        "large",
        __doc__,
        {"cifar10": (2, 5)},
        lambda _: [LOCAL, *(Entry(method, epsilon) for epsilon in (1.0, 2.0, 8.0) for method in SOUND)],
        scale="large",
    )
