"""FedDPA and its baselines with 1,000 clients and Poisson cohorts: more clients to hide among.

python -m experiments.feddpa.cross_device --dataset cifar10 --scale cpu
"""

import dataclasses
import pathlib
from typing import Literal

import optax

from experiments.common import (
    Method,
    Scale,
    claiming,
    cli,
    dirichlet_clients,
    model_for,
    run_methods,
    seeds_of,
    show,
)
from jaxfl import LocalSGD
from jaxfl._validate import checked
from jaxfl.algorithms import dp_fedavg_fb, fedavg, feddpa, local_only
from jaxfl.algorithms.feddpa import paper_epsilon
from jaxfl.data import load
from jaxfl.privacy import Mechanism, Poisson, calibrate
from jaxfl.types import Algorithm, Clients


@dataclasses.dataclass(frozen=True)
class Setting:
    """Chosen beforehand, not tuned; the same clip bound, cohorts and passes for every method."""

    model: str = "lenet"
    clients: int = 1000
    alpha: float = 0.5
    rate: float = 0.05
    rounds: int = 60
    clip: float = 0.5
    batch_size: int = 20
    epochs: int = 1
    """Passes per stage of FedDPA; the other methods take as many passes as its two stages."""
    local_epochs: int = 10
    """Passes of local-only each time a client takes part; it costs no privacy, so it may train for longer."""
    epsilons: tuple[float, ...] = (2.0, 8.0)
    delta: float = 1e-5


SCALES: dict[Scale, Setting] = {
    "smoke": Setting(clients=60, rate=0.2, rounds=2, epsilons=(8.0,)),
    "cpu": Setting(),
    "paper": Setting(model="feddpa_cnn", rounds=300, epsilons=(1.0, 2.0, 8.0)),
    "large": Setting(model="feddpa_cnn", clients=5000, rounds=500, epsilons=(1.0, 2.0, 8.0)),
}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which data, how many clients, how often."""

    dataset: Literal["cifar10", "fashion_mnist", "mnist", "svhn_cropped", "digits"] = "cifar10"
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: LeNet, 60 rounds; paper: FedDPA's network, 300; large: 5,000 clients."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/feddpa/cross_device")


def main(config: Config) -> None:
    """Run all methods and print their table."""
    setting = SCALES[config.scale]
    data = load("digits" if config.scale == "smoke" else config.dataset)
    seeds = config.seeds[:1] if config.scale == "smoke" else config.seeds
    model, sampling = model_for(setting.model, data), Poisson(setting.rate)
    sgd = LocalSGD(optax.sgd(0.02, momentum=0.9), setting.batch_size, 2 * setting.epochs)

    def make(seed: int) -> Clients:
        return dirichlet_clients(data, setting.clients, setting.alpha, seed=seed, minimum=5)

    def private(epsilon: float) -> dict:
        run = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
        z = calibrate(epsilon, sampling=sampling, accountant="rdp", **run)
        return {"clip": setting.clip, "noise_multiplier": z, "sampling": sampling, "delta": setting.delta}

    def dpa(clients: Clients, epsilon: float) -> Algorithm:
        options = private(epsilon)
        rule = {"batch_size": setting.batch_size, "epochs": setting.epochs, "rounds": setting.rounds}
        claim = paper_epsilon(
            options["noise_multiplier"],
            delta=setting.delta,
            examples=int(clients.train_size.sum()),
            rate=setting.rate,
            **rule,
        )
        adam = LocalSGD(optax.adam(1e-3), setting.batch_size, setting.epochs)
        method = feddpa(model, local=adam, evaluate="adapt", **options)
        return claiming(method, claim, "by the paper's rule, per example and local step")

    def head_tuned(epsilon: float) -> Algorithm:
        head = LocalSGD(optax.sgd(0.01), setting.batch_size, 15)
        return dp_fedavg_fb(model, head=head, local=sgd, **private(epsilon))

    plain = Mechanism(sampling=sampling, denominator="participants")
    methods: dict[str, Method] = {
        "local-only": lambda _: local_only(
            model, sampling=sampling, local=dataclasses.replace(sgd, epochs=setting.local_epochs)
        ),
        "FedAvg, no privacy": lambda _: fedavg(model, mechanism=plain, local=sgd),
    }
    for epsilon in setting.epsilons:
        methods[f"DP-FedAvg-fb, ε = {epsilon:g}"] = lambda _, e=epsilon: head_tuned(e)
        methods[f"FedDPA, ε = {epsilon:g}"] = lambda c, e=epsilon: dpa(c, e)
    rows = run_methods(
        methods,
        make,
        rounds=setting.rounds,
        seeds=seeds,
        out=config.out / data.name,
        config=dataclasses.asdict(setting) | {"scale": config.scale, "dataset": data.name},
        eval_every=max(1, setting.rounds // 3),
    )
    title = f"{data.name}, {config.scale}: {setting.clients} clients, Poisson {setting.rate:g}, {setting.rounds} rounds"
    show(title, rows, config.out / data.name)


if __name__ == "__main__":
    main(cli(Config, __doc__))
