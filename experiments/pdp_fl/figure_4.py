"""Figure 4: number of clients, learning rate, share of clients in a round, and global budget, in case 3 on MNIST.

python -m experiments.pdp_fl.figure_4 --scale paper
"""

import dataclasses

from experiments.common import cli
from experiments.pdp_fl.setting import Config, Setting, budgets, printed, run, scaled
from jaxfl.data import Dataset
from jaxfl.types import Algorithm

STUDIES: dict[str, tuple[float, ...]] = {
    "clients": (20, 50, 100, 200),
    "learning_rate": (0.01, 0.03, 0.05, 0.1),
    "fraction": (0.05, 0.1, 0.3, 0.5),
    "epsilon_max": (5.0, 10.0, 50.0, 100.0),
}


def methods(setting: Setting, data: Dataset) -> dict[str, Algorithm]:
    """PDP-FL as printed."""
    return {"PDP-FL": printed(setting, data, budgets(3, setting.clients))}


def main(config: Config) -> None:
    """A table for each value of each parameter, the others as they are."""
    for parameter, values in STUDIES.items():
        for value in values[:1] if config.scale == "smoke" else values:
            base = scaled(config.scale, rounds=20, epsilon_max=50.0)
            setting = dataclasses.replace(base, **{parameter: type(getattr(base, parameter))(value)})
            run(f"figure_4/{parameter}={value:g}", f"Figure 4, {parameter} = {value:g}", setting, methods, config)


if __name__ == "__main__":
    main(cli(Config, __doc__))
