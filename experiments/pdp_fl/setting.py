"""What the figures and tables of PDP-FL share: the setting, four cases of budgets, the methods, and how they run."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import optax

from experiments.common import Method, cli, plot_metric, run_methods, seeds_of, show
from jaxfl import LocalSGD
from jaxfl._validate import checked
from jaxfl.algorithms import dp_fedavg, fedavg, pdp_fl, pdp_fl_paper
from jaxfl.algorithms.pdp_fl import Budgets, personal_budgets, personal_examples
from jaxfl.data import Dataset, iid, load, make_clients, matching
from jaxfl.models import mlp
from jaxfl.privacy import FixedSize, Mechanism, calibrate
from jaxfl.types import Algorithm, Clients

Scale = Literal["smoke", "paper"]
Data = Literal["mnist", "cifar10", "digits"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The paper's; what it leaves open (clip, delta, batch, passes) is ours."""

    dataset: Data = "mnist"
    clients: int = 100
    fraction: float = 0.1
    rounds: int = 2
    hidden: tuple[int, ...] = (200, 200)
    learning_rate: float = 0.03
    batch_size: int = 10
    epochs: int = 5
    clip: float = 15.0
    """Of weights, whose norm is about 12 at first."""
    epsilon_max: float = 5.0
    total: float = 50.0
    """The baselines' budget."""
    update_clip: float = 1.0
    """Of updates, in GDP-FL and the sound twin."""
    example_clip: float = 1.0
    delta: float = 1e-5

    @property
    def cohort(self) -> int:
        """Participants in a round."""
        return max(1, round(self.fraction * self.clients))


SMOKE: dict[str, Any] = {"dataset": "digits", "clients": 20, "fraction": 0.2, "rounds": 2, "hidden": (16,), "epochs": 1}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """How much, and how often."""

    scale: Scale = "paper"
    """smoke: seconds, on digits; paper: 100 clients, 10 of them in a round."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/pdp_fl")


def scaled(scale: Scale, **changes: Any) -> Setting:
    """The paper's setting with changes, or its small twin in place of those."""
    return Setting(**changes | (SMOKE if scale == "smoke" else {}))


def budgets(case: int, clients: int, equal: float | None = None) -> Budgets:
    """Budgets of a case; (7) with base 2, so that preferences are budgets. The same in every run.

    Args:
        case: 1: equal and small; 2: equal and large; 3: normal of mean 5 and variance 2; 4: chi-square, 2 degrees.
        clients: N.
        equal: the budget of cases 1 and 2 (default: 3 and 8).
    """
    rng = np.random.default_rng(0)
    draws: dict[int, Callable[[], np.ndarray]] = {
        1: lambda: np.full(clients, 3.0 if equal is None else equal),
        2: lambda: np.full(clients, 8.0 if equal is None else equal),
        3: lambda: rng.normal(5.0, math.sqrt(2.0), clients),
        4: lambda: rng.chisquare(2, clients),
    }
    return personal_budgets(draws[case](), floor=1.0)  # the least that the paper names


def plain(setting: Setting, data: Dataset) -> Algorithm:
    """FedAvg without noise."""
    mechanism = Mechanism(sampling=FixedSize(setting.cohort), denominator="participants")
    return fedavg(_model(setting, data), mechanism=mechanism, local=_local(setting))


def printed(setting: Setting, data: Dataset, asked: Budgets, epsilon_max: float | None = None) -> Algorithm:
    """PDP-FL with the paper's noise."""
    return pdp_fl_paper(
        _model(setting, data),
        budgets=asked,
        epsilon_max=setting.epsilon_max if epsilon_max is None else epsilon_max,
        smallest=len(data.train_labels) // setting.clients,
        clip=setting.clip,
        **_shared(setting),
    )


def baselines(setting: Setting, data: Dataset) -> dict[str, Algorithm]:
    """FedAvg, GDP-FL and LDP-Fed, the latter two at the total budget."""
    sampling = FixedSize(setting.cohort)
    run = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
    z = calibrate(setting.total, sampling=sampling, accountant="rdp", **run)
    gdp: dict[str, Any] = {"clip": setting.update_clip, "noise_multiplier": z, "sampling": sampling}
    same = Budgets(np.full(setting.clients, setting.total), np.ones(setting.clients))
    return {
        "FedAvg": plain(setting, data),
        "GDP-FL": dp_fedavg(_model(setting, data), delta=setting.delta, local=_local(setting), **gdp),
        "LDP-Fed": printed(setting, data, same, epsilon_max=math.inf),
    }


def honest(setting: Setting, data: Dataset, case: int) -> dict[str, Algorithm]:
    """PDP-FL whose clients get what they asked for: for all of their data, or for single examples."""
    asked, shared = budgets(case, setting.clients), _shared(setting) | {"rounds": setting.rounds}
    examples = len(data.train_labels) // setting.clients
    private = personal_examples(
        np.minimum(asked.epsilon, setting.epsilon_max),
        clip=setting.example_clip,
        rate=min(1.0, setting.batch_size / examples),
        steps=max(1, setting.epochs * examples // setting.batch_size),
        rounds=setting.rounds,
        optimizer=optax.sgd(setting.learning_rate),
        delta=setting.delta,
        accountant="rdp",
    )
    free = Budgets(np.full(setting.clients, math.inf), asked.level)
    sound: dict[str, Any] = {"epsilon_max": setting.epsilon_max, "clip": setting.update_clip, "accountant": "rdp"}
    whole: dict[str, Any] = {"epsilon_max": math.inf, "clip": math.inf, "local": private}
    return {
        f"PDP-FL, case {case}, clients": pdp_fl(_model(setting, data), budgets=asked, **shared | sound),
        f"PDP-FL, case {case}, examples": pdp_fl(_model(setting, data), budgets=free, **shared | whole),
    }


def run(
    name: str,
    title: str,
    setting: Setting,
    methods: Callable[[Setting, Dataset], Mapping[str, Algorithm]],
    config: Config,
) -> None:
    """Run methods on IID clients for all seeds, and show their table and curves."""
    data = load(setting.dataset)
    rows = run_methods(
        {name: _same(method) for name, method in methods(setting, data).items()},
        lambda seed: split(setting, data, seed),
        rounds=setting.rounds,
        seeds=config.seeds[:1] if config.scale == "smoke" else config.seeds,
        out=config.out / "runs",
        config=dataclasses.asdict(setting),
        eval_every=max(1, setting.rounds // 10),
    )
    size = f"{setting.clients} clients, {setting.cohort} in a round, {setting.rounds} rounds"
    folder = config.out / name / config.scale / data.name
    show(f"{title}: {data.name}, {size}", rows, folder)
    plot_metric(folder / "loss.png", title, rows, "loss", "test loss")


def split(setting: Setting, data: Dataset, seed: int) -> Clients:
    """IID clients of equal sizes."""
    size = len(data.train_labels) // setting.clients
    lists = iid(data.train_labels, setting.clients, seed=seed, size=size)
    return make_clients(data, lists, matching(lists, data.train_labels, data.test_labels, seed=seed))


def cases(dataset: Data, rounds: int, figure: int, description: str | None) -> None:
    """Figure 2 or 3: accuracy by round in all cases, at several budgets where they are equal."""

    def methods(setting: Setting, data: Dataset) -> dict[str, Algorithm]:
        equal = {(1, 1.0), (1, 3.0), (1, 5.0), (2, 6.0), (2, 8.0), (2, 10.0)}
        rows = {
            f"case {case}, ε = {budget:g}": printed(setting, data, budgets(case, setting.clients, budget))
            for case, budget in sorted(equal)
        }
        rows |= {f"case {case}": printed(setting, data, budgets(case, setting.clients)) for case in (3, 4)}
        return {"FedAvg": plain(setting, data)} | rows

    config = cli(Config, description)
    setting = scaled(config.scale, dataset=dataset, rounds=rounds)
    run(f"figure_{figure}", f"Figure {figure}", setting, methods, config)


def comparison(dataset: Data, rounds: int, table: int, description: str | None) -> None:
    """Table 2 or 3: the baselines, PDP-FL in all cases as printed, and its honest twins."""

    def methods(setting: Setting, data: Dataset) -> dict[str, Algorithm]:
        rows = {f"PDP-FL, case {case}": printed(setting, data, budgets(case, setting.clients)) for case in (1, 2, 3, 4)}
        return baselines(setting, data) | rows | honest(setting, data, 3)

    config = cli(Config, description)
    setting = scaled(config.scale, dataset=dataset, rounds=rounds)
    run(f"table_{table}", f"Table {table}", setting, methods, config)


def _model(setting: Setting, data: Dataset) -> Any:
    return mlp(data.train_inputs.shape[1:], data.classes, hidden=setting.hidden)


def _local(setting: Setting) -> LocalSGD:
    return LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size, setting.epochs)


def _shared(setting: Setting) -> dict[str, Any]:
    return {"delta": setting.delta, "sampling": FixedSize(setting.cohort), "local": _local(setting)}


def _same(method: Algorithm) -> Method:
    """The algorithm whatever the clients."""
    return lambda clients: method
