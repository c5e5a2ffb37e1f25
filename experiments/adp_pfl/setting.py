"""Setting and methods of ADP-PFL's table and figures, and the functions that run and test them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from experiments.common import evaluated, model_for, row_of, sweep_each, trained_alone
from experiments.study import Options
from jaxfl import LocalSGD, grid
from jaxfl.algorithms import adp_pfl, adp_pfl_paper, dp_lg, fedavg
from jaxfl.algorithms.adp_pfl import MaskFn, fisher_percentile
from jaxfl.data import hold_out, label_share, load, make_clients
from jaxfl.privacy import (
    FixedSize,
    Mechanism,
    Poisson,
    calibrate,
    fixed_budgets,
    paper_noise,
    round_budgets,
)
from jaxfl.types import Algorithm, ClientData, Clients, Params, Tree

Build = Callable[..., Algorithm]
Row = dict[str, Any]
TUNING = 100
"""Seed of tuning runs. Results have other seeds."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of the paper, except for `examples`.

    Batch, clip bound, beta and delta are ours, because the paper omits them.
    """

    data: str
    clients: int = 100
    share: float = 0.2
    """Share of all labels that each client has."""
    cohort: int = 10
    rounds: int = 100
    examples: int = 100
    """Greatest number of training examples of a client.

    The paper's clients have all of theirs, on average 500 or 600.
    """
    batch_size: int = 20
    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.5
    clip: float = 1.0
    """Clip bound of rows with the published noise, which do not tune it."""
    percentile: float = 80.0
    beta: float = 1.0
    delta: float = 1e-5


SMOKE: dict[str, Any] = {
    "data": "digits",
    "clients": 10,
    "cohort": 3,
    "rounds": 4,
    "examples": 40,
    "epochs": 1,
}


class Bench:
    """Clients of a dataset, and the functions that run and test methods on them.

    Args:
        data: Name of the dataset.
        options: Options of the study. A smoke run replaces parts of the setting by `SMOKE`.
        changes: Other values of the setting.
    """

    def __init__(self, data: str, options: Options, **changes: Any) -> None:
        self.setting = dataclasses.replace(
            Setting(data, **changes), **SMOKE if options.smoke else {}
        )
        self.options, self.seeds = options, options.seeds
        self.data = load(self.setting.data)
        self.model = model_for("lenet", self.data)
        self.config = dataclasses.asdict(self.setting)

    # The bench lives as long as the program, so the cache leaks nothing.
    @functools.cache  # noqa: B019
    def clients(self, seed: int) -> Clients:
        """Make clients with a share of the labels each, tested on examples of the same labels.

        A client trains on at most `examples` examples, which are drawn by the seed.
        """
        own, labels = (
            self.setting,
            {"labels": self.data.train_labels, "test_labels": self.data.test_labels},
        )
        train, test = label_share(clients=own.clients, share=own.share, seed=seed, **labels)
        rng = np.random.default_rng(seed)
        return make_clients(
            self.data, [np.sort(rng.permutation(rows)[: own.examples]) for rows in train], test
        )

    @functools.cache  # noqa: B019
    def held_out(self, seed: int) -> Clients:
        """Make clients that are tested on a held-out fifth of their training examples."""
        return hold_out(self.clients(seed), 0.2, seed=seed)

    def passes(self, learning_rate: Any = None, epochs: int | None = None) -> LocalSGD:
        """Return the training of a client in a round. None stands for the setting's number."""
        own = self.setting
        rate = own.learning_rate if learning_rate is None else learning_rate
        return LocalSGD(
            optax.sgd(rate, momentum=own.momentum),
            own.batch_size,
            own.epochs if epochs is None else epochs,
        )

    def budgets(self, schedule: str) -> Float[np.ndarray, "T"]:
        """Return the budgets of the rounds with mean 1, so that schedules have equal totals."""
        rounds = self.setting.rounds
        if schedule == "fixed":
            return fixed_budgets(float(rounds), rounds)
        return round_budgets(float(rounds), rounds, beta=self.setting.beta)

    def published(
        self,
        schedule: str,
        mask: Callable[[Any], MaskFn | None] = fisher_percentile,
        **options: Any,
    ) -> Build:
        """Return a builder of ADP-PFL with the paper's noise, of sensitivity C/m.

        The builder takes `epsilon`, the mean budget of a round, the `percentile` of the mask, and
        `thinner`, a factor on the noise (theorem 2).

        Args:
            schedule: "fixed" or "round-level".
            mask: Function from a percentile to a mask. None stands for no mask.
            options: Further arguments of `adp_pfl_paper`, in place of those of the setting.
        """
        own, noise = self.setting, paper_noise(self.budgets(schedule), delta=self.setting.delta)

        def build(epsilon: Any, percentile: Any = own.percentile, thinner: Any = 1.0) -> Algorithm:
            fixed: dict[str, Any] = {
                "sampling": FixedSize(own.cohort),
                "clip": own.clip,
                "delta": own.delta,
            }
            fixed |= {"local": self.passes(), "mask": mask(percentile)} | options
            return adp_pfl_paper(self.model, noise=noise * (thinner / epsilon), **fixed)

        return build

    def published_dp_lg(self, epsilon: Any) -> Algorithm:
        """Build DP-LG with the paper's noise, for a budget of `epsilon` in every round."""
        own = self.setting
        options: dict[str, Any] = {
            "sampling": FixedSize(own.cohort),
            "clip": own.clip,
            "delta": own.delta,
        }
        method = dp_lg(self.model, noise_multiplier=0.0, local=self.passes(), **options)
        noise = paper_noise(np.ones(1), delta=own.delta) / own.cohort
        return method._replace(
            mechanism=dataclasses.replace(method.mechanism, client_noise=noise / epsilon)
        )

    @property
    def fisher(self) -> MaskFn:
        """Return the paper's mask, by Fisher information, at the setting's percentile."""
        return fisher_percentile(self.setting.percentile)

    def honest(self, schedule: str, mask: MaskFn | None) -> Build:
        """Return a builder of ADP-PFL with noise of the server.

        The builder takes `clip`, and `least`, the noise multiplier in the rounds of the largest
        budget. The noise multiplier of each round is in proportion to 1 / budget.
        """
        budgets = self.budgets(schedule)

        def build(least: Any, clip: Any) -> Algorithm:
            options: dict[str, Any] = {"mask": mask, "noise": least * (budgets.max() / budgets)}
            return adp_pfl(self.model, clip=clip, **options, **self.sampled)

        return build

    def honest_dp_lg(self, least: Any, clip: Any) -> Algorithm:
        """Build DP-LG with noise of the server. `least` is the noise multiplier of all rounds."""
        return dp_lg(self.model, noise_multiplier=least, clip=clip, **self.sampled)

    @property
    def sampled(self) -> dict[str, Any]:
        """Return the arguments `sampling`, `delta` and `local` of methods with honest noise."""
        own = self.setting
        return {
            "sampling": Poisson(own.cohort / own.clients),
            "delta": own.delta,
            "local": self.passes(),
        }

    def least_noise(self, schedule: str, epsilon: float) -> float:
        """Return the argument `least` of `honest` for an epsilon against an observer of sums."""
        own, budgets = self.setting, self.budgets(schedule)
        run: dict[str, Any] = {"clients": own.clients, "rounds": own.rounds, "delta": own.delta}
        return calibrate(
            epsilon,
            sampling=Poisson(own.cohort / own.clients),
            shape=budgets.max() / budgets,
            **run,
        )

    def rows(
        self,
        name: str,
        build: Build,
        values: Mapping[str, Sequence[float]],
        *,
        tuning: bool = False,
        **shown: Any,
    ) -> list[Row]:
        """Return a row for each point, with epsilons and accuracies of local and global models.

        Args:
            name: Name of the runs' folder.
            build: Function from a point's values to the algorithm. All points share one program.
            values: Columns of numbers by argument.
            tuning: Whether to run only the tuning seed, tested on held-out training examples.
            shown: Further entries of each row, such as another `method`.

        Returns:
            Rows with `method`, the point's values, and the epsilons `aggregate` and `upload`. The
            lists `local` and `global` have an accuracy for each seed. `dropped` is the share of
            updates that were not finite.
        """
        seeds, make = ((TUNING,), self.held_out) if tuning else (self.seeds, self.clients)
        run: dict[str, Any] = {
            "rounds": self.setting.rounds,
            "eval_every": self.setting.rounds,
            "seeds": seeds,
        }
        run |= {"out": self.options.out, "config": self.config | {"tuning": tuning}}
        results = sweep_each(name, build, values, make, **run)
        left = [
            [(result.server, result.states) for result in of_seed]
            for of_seed in zip(*results, strict=True)
        ]
        local = [
            self.local(build, values, make(seed), seed, own)
            for seed, own in zip(seeds, left, strict=True)
        ]
        rows = []
        for point, (of_point, scores) in enumerate(
            zip(results, zip(*local, strict=True), strict=True)
        ):
            row: Row = {"method": name, **shown} | {
                column: float(of[point]) for column, of in values.items()
            }
            honest = of_point[0].statement["honest"]
            row |= {who: float(honest[who]["epsilon"]) for who in ("aggregate", "upload")}
            row |= {"local": list(scores), "global": row_of(name, of_point).mean}
            sent = [result.metrics[-1]["participants"] * self.setting.rounds for result in of_point]
            lost = [result.metrics[-1]["nonfinite"] for result in of_point]
            rows.append(row | {"dropped": float(np.sum(lost) / np.sum(sent))})
        return rows

    def local(
        self,
        build: Build,
        values: Mapping[str, Sequence[float]],
        clients: Clients,
        seed: int,
        left: list[Tree],
    ) -> list[float]:
        """Return each point's accuracy after clients train its final model on their own data.

        Args:
            build: Function from a point's values to the algorithm.
            values: Columns of numbers by argument.
            clients: Clients of the runs.
            seed: Seed of the runs.
            left: Final states of server and clients, one pair for each point.
        """
        return evaluated(
            lambda **point: self.tested_locally(build(**point)), values, clients, seed, left
        )

    def tested_locally(self, method: Algorithm) -> Algorithm:
        """Return the method, tested after each client has trained further on its own data.

        Nothing of this training is sent.
        """

        def personalize(
            key: Key[Array, ""], server: Tree, client: Tree, data: ClientData
        ) -> Params:
            params = method.personalize(key, server, client, data)
            return self.passes().train(key, method.model, params, data)[0]

        return method._replace(personalize=personalize)

    def tuned(
        self,
        name: str,
        build: Build,
        epsilons: Sequence[float],
        clips: Sequence[float],
        schedule: str = "fixed",
    ) -> list[Row]:
        """Return a row for each epsilon, at the clip bound that is best on held-out examples.

        Args:
            name: Name of the method.
            build: Function from noise and clip bound to the algorithm, see `honest`.
            epsilons: Epsilons against an observer of sums.
            clips: Clip bounds to choose from.
            schedule: Schedule of the budgets.
        """
        least = [self.least_noise(schedule, epsilon) for epsilon in epsilons]
        tried = self.rows(
            f"honest, {name}", build, grid(least=least, clip=list(clips)), tuning=True
        )
        by_epsilon = [tried[i : i + len(clips)] for i in range(0, len(tried), len(clips))]
        chosen = [max(rows, key=lambda row: row["local"][0])["clip"] for rows in by_epsilon]
        rows = self.rows(f"honest, {name}", build, {"least": least, "clip": chosen}, method=name)
        scores = [
            {f"{row['clip']:g}": row["local"][0] for row in of_epsilon} for of_epsilon in by_epsilon
        ]
        return [
            row | {"epsilon": epsilon, "validation": validation}
            for row, epsilon, validation in zip(rows, epsilons, scores, strict=True)
        ]

    def floors(self) -> dict[str, Row]:
        """Return the rows of references by name: `untrained`, `alone` and `without noise`.

        Clients test an untrained model, as any other, after their own passes.
        """

        def without_noise(learning_rate: Any) -> Algorithm:
            mechanism = Mechanism(
                sampling=FixedSize(self.setting.cohort), denominator="participants"
            )
            return fedavg(self.model, mechanism=mechanism, local=self.passes(learning_rate))

        values, untrained = {"learning_rate": [self.setting.learning_rate]}, []
        for seed in self.seeds:
            first = without_noise(self.setting.learning_rate).init(
                jax.random.key(seed), self.setting.clients
            )
            untrained += self.local(without_noise, values, self.clients(seed), seed, [first])
        (ceiling,) = self.rows("FedAvg without noise", without_noise, values)
        return {"untrained": {"local": untrained}, "alone": self.alone(), "without noise": ceiling}

    def alone(self) -> Row:
        """Run local-only at the rate and number of passes that are best on held-out examples.

        Returns:
            The chosen `learning_rate` and `passes`, the rate's scores on held-out examples by
            passes (`validation`), and an accuracy for each seed (`local`).
        """
        rows, facts = trained_alone(
            self.model,
            self.passes,
            [0.03, 0.1, 0.3],
            self.clients,
            rounds=2 if self.options.smoke else 8,
            seeds=self.seeds,
            tuning_seed=TUNING,
            out=self.options.out,
            config=self.config,
        )
        shown = {
            "learning_rate": facts["chosen"]["rate"],
            "passes": facts["passes"],
            "validation": facts["validation"],
        }
        return shown | {"local": [row["accuracy"] for row in rows]}
