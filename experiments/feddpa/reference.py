"""FedDPA at its published code's setting: 10 clients, all in every round, Dirichlet(100), 15 rounds.

python -m experiments.feddpa.reference --dataset cifar10 --scale cpu
"""

import dataclasses
import pathlib
from typing import Any, Literal

import optax

from experiments.common import Scale, cli, dirichlet_clients, model_for, run_methods, seeds_of, show
from jaxfl import LocalSGD
from jaxfl._validate import checked
from jaxfl.algorithms import dp_fedavg_fb, fedavg, feddpa, feddpa_paper, local_only
from jaxfl.algorithms.feddpa import paper_noise_multiplier
from jaxfl.data import load
from jaxfl.privacy import Full, Mechanism, calibrate
from jaxfl.types import Algorithm, Clients


@dataclasses.dataclass(frozen=True)
class Setting:
    """The published defaults; a scale changes the data and the number of rounds only."""

    clients: int = 10
    examples: int | None = None
    """Training examples of all clients together (None: all there are)."""
    rounds: int = 15
    alpha: float = 100.0
    clip: float = 0.5
    batch_size: int = 16
    epochs: int = 2
    """Passes per stage of FedDPA; the other methods take as many passes as its two stages."""
    learning_rate: float = 1e-3
    epsilon: float = 1.0
    claimed_delta: float = 0.1
    delta: float = 1e-5


SCALES: dict[Scale, Setting] = {
    "smoke": Setting(examples=400, rounds=2),
    "cpu": Setting(examples=500),
    "paper": Setting(),
    "large": Setting(clients=100),
}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which data, how much of it, how often."""

    dataset: Literal["cifar10", "fashion_mnist", "mnist", "svhn_cropped", "digits"] = "cifar10"
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: a part of the data; paper: all of it; large: 100 clients."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/feddpa/reference")


def main(config: Config) -> None:
    """Run all methods and print their table."""
    setting = SCALES[config.scale]
    data = load("digits" if config.scale == "smoke" else config.dataset)
    seeds = config.seeds[:1] if config.scale == "smoke" else config.seeds
    model = model_for("feddpa_cnn", data)
    stage = LocalSGD(optax.adam(setting.learning_rate), setting.batch_size, setting.epochs)
    whole = dataclasses.replace(stage, epochs=2 * setting.epochs)
    sampling, count = Full(), setting.clients

    def make(seed: int) -> Clients:
        return dirichlet_clients(data, count, setting.alpha, seed=seed, minimum=1, examples=setting.examples)

    sigma = paper_noise_multiplier(
        setting.epsilon,
        delta=setting.claimed_delta,
        examples=min(setting.examples or len(data.train_labels), len(data.train_labels)),
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        rounds=setting.rounds,
        rate=1.0,
    )
    run = {"clients": count, "rounds": setting.rounds, "delta": setting.delta}
    z = calibrate(setting.epsilon, sampling=sampling, accountant="rdp", **run)

    private: dict[str, Any] = {"clip": setting.clip, "sampling": sampling, "delta": setting.delta}
    published: dict[str, Any] = {"noise_multiplier": sigma, "clients": count, "claim": setting.epsilon} | private

    def head_tuned(noise: float) -> Algorithm:
        head = LocalSGD(optax.adam(1e-3), epochs=15)
        return dp_fedavg_fb(model, noise_multiplier=noise, head=head, local=whole, **private)

    rows = run_methods(
        {
            "local-only": lambda _: local_only(model, local=whole),
            "FedAvg, no privacy": lambda _: fedavg(model, mechanism=Mechanism(sampling=sampling), local=whole),
            "DP-FedAvg-fb, published noise": lambda _: head_tuned(sigma),
            "FedDPA, published noise": lambda _: feddpa_paper(model, local=stage, **published),
            "DP-FedAvg-fb, honest noise": lambda _: head_tuned(z),
            "FedDPA, honest noise": lambda _: feddpa(model, noise_multiplier=z, local=stage, **private),
        },
        make,
        rounds=setting.rounds,
        seeds=seeds,
        out=config.out / data.name,
        config=dataclasses.asdict(setting) | {"scale": config.scale, "dataset": data.name},
        eval_every=max(1, setting.rounds // 3),
    )
    show(f"{data.name}, {config.scale}: {count} clients, {setting.rounds} rounds", rows, config.out / data.name)


if __name__ == "__main__":
    main(cli(Config, __doc__))
