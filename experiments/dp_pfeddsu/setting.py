"""Setting and methods of DP-pFedDSU's studies, and the functions that run them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from experiments.common import (
    fine_tuned,
    model_for,
    row_of,
    run_each,
    starred,
    sweep_each,
    trained_alone,
)
from experiments.study import Options, facts_of
from jaxfl import LocalSGD
from jaxfl.algorithms import (
    centaur,
    dp_fedavg,
    dp_fedavg_fb,
    dp_pfeddsu,
    dp_pfeddsu_paper,
    local_only,
    pmtl_ft,
    ppsgd_centaur,
)
from jaxfl.data import classes_per_client, hold_out, load, make_clients
from jaxfl.models import mlp
from jaxfl.privacy import Full, calibrate
from jaxfl.types import Algorithm, Clients, Model

Row = dict[str, Any]
TUNING = 100
"""Seed of tuning runs. Results have other seeds."""
PICTURES = 250
"""Number of pictures that an extractor processes at a time."""
NO_CLIP = 1e6
"""Clip bound that is longer than any update."""
METHODS = ("DP-FedAvg-fb", "PPSGD", "PMTL-FT", "CENTAUR", "DP-pFedDSU")
"""Methods of the paper, in its order."""
PRINTED = "DP-pFedDSU as printed"
WHOLE = "DP-FedAvg, whole network tuned"
BY_EPSILON = {2: (1.0,), 5: (0.5, 1.0, 2.0), 10: (1.0,)}
"""Epsilons of tables II and III, by the number of classes of a client."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of the paper for CIFAR-10, with another network and fewer examples and rounds.

    Batch, momentum, decay, delta and full participation are CENTAUR's, because the paper omits
    them.
    """

    data: str = "cifar10"
    model: str = "lenet_groupnorm"
    clients: int = 20
    examples: int = 200
    """Number of training examples per client, 2,500 in the paper."""
    test: int = 100
    """Number of test examples per client."""
    rounds: int = 12
    batch_size: int = 25
    head_batch: int = 100
    epochs: int = 1
    """Passes for the extractor, or for the full network in DP-FedAvg-fb."""
    head_epochs: int = 15
    alone: int = 80
    """Greatest number of passes of clients that train alone."""
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 0.01
    density: float = 0.05
    sparse_layers: int = 2
    """Sparse layers among LeNet's four layers before the head. These two hold most weights."""
    penalty_weight: float = 0.2
    mean_weight: float = 2.0
    """Weight of PMTL-FT's penalty. CENTAUR's experiments have lambda = 1, which is not halved."""
    delta: float = 1e-5


PUBLISHED: dict[str, Any] = {"model": "resnet20", "examples": 2500, "test": 500}
"""Changes to the paper's network and numbers of examples."""
SMOKE: dict[str, Any] = {
    "data": "digits",
    "examples": 20,
    "test": 10,
    "rounds": 2,
    "alone": 2,
    "head_epochs": 1,
}


class Bench:
    """Clients of some classes each, and the functions that run methods on them."""

    def __init__(self, options: Options, **numbers: Any) -> None:
        self.setting = dataclasses.replace(Setting(), **numbers | (SMOKE if options.smoke else {}))
        self.options, self.seeds = options, options.seeds
        self.data = load(self.setting.data)
        self.model = model_for(self.setting.model, self.data)

    # The bench lives as long as the program, so the cache leaks nothing.
    @functools.cache  # noqa: B019
    def clients(self, classes: int, seed: int) -> Clients:
        """Make clients of equal sizes, tested on disjoint examples of the same classes."""
        own, labels = self.setting, (self.data.train_labels, self.data.test_labels)
        train, test = classes_per_client(*labels, own.clients, classes, seed=seed)
        rng = np.random.default_rng(seed)
        kept = (
            [np.sort(rng.permutation(rows)[:most]) for rows in lists]
            for lists, most in self._sizes(train, test)
        )
        return make_clients(self.data, *kept)

    def _sizes(
        self, train: Sequence[np.ndarray], test: Sequence[np.ndarray]
    ) -> list[tuple[Sequence, int]]:
        return [(train, self.setting.examples), (test, self.setting.test)]

    def held_out(self, classes: int, seed: int) -> Clients:
        """Make clients that are tested on a held-out fifth of their training examples."""
        return hold_out(self.clients(classes, seed), 0.2, seed=seed)

    @functools.cache  # noqa: B019
    def noise(self, epsilon: float) -> float:
        """Return the least noise multiplier for an epsilon over all rounds, and 0 for infinity."""
        run: dict[str, Any] = {
            "clients": self.setting.clients,
            "rounds": self.setting.rounds,
            "sampling": Full(),
        }
        return 0.0 if math.isinf(epsilon) else calibrate(epsilon, delta=self.setting.delta, **run)

    def local(self, epochs: int, rate: Any = None, *, head: bool = False) -> LocalSGD:
        """Return training for some passes. A head has larger batches and no weight decay.

        Args:
            epochs: Number of passes.
            rate: Learning rate. None takes the paper's.
            head: Whether only the head trains.
        """
        own = self.setting
        sgd = optax.sgd(own.learning_rate if rate is None else rate, momentum=own.momentum)
        if head:
            return LocalSGD(sgd, own.head_batch, epochs)
        return LocalSGD(
            optax.chain(optax.add_decayed_weights(own.weight_decay), sgd), own.batch_size, epochs
        )

    def build(
        self,
        method: str,
        *,
        head_epochs: int | None = None,
        sparse_layers: int | None = None,
        **numbers: Any,
    ) -> Algorithm:
        """Build a method of the paper, or one of its variants.

        Args:
            method: Name of the method in the tables.
            head_epochs: Passes of the head in a round and before evaluation. None takes the
                paper's number.
            sparse_layers: Number of sparse layers. None takes that of the setting.
            numbers: `noise_multiplier`, `clip`, and for DP-pFedDSU `penalty_weight` and `density`.
                A sweep may vary them.
        """
        own, model = self.setting, self.model
        passes = own.head_epochs if head_epochs is None else head_epochs
        local, head = self.local(own.epochs), self.local(passes, head=True)
        options: dict[str, Any] = {"sampling": Full(), "delta": own.delta, "local": local} | numbers
        tuned: dict[str, Any] = {"head": head} | options
        sparse: dict[str, Any] = {
            "density": own.density,
            "penalty_weight": own.penalty_weight,
        } | tuned
        sparse["sparse_layers"] = own.sparse_layers if sparse_layers is None else sparse_layers
        # CENTAUR's experiments fit PPSGD's added head for a pass in a round, at a rate of its own.
        added = LocalSGD(optax.sgd(0.1, momentum=own.momentum), own.head_batch, head_epochs or 1)
        builders: dict[str, Callable[[], Algorithm]] = {
            "DP-FedAvg-fb": lambda: dp_fedavg_fb(model, **tuned),
            "PPSGD": lambda: ppsgd_centaur(model, **options, head=added, evaluation_epochs=passes),
            "PMTL-FT": lambda: pmtl_ft(model, penalty_weight=own.mean_weight, **tuned),
            "CENTAUR": lambda: centaur(model, **tuned),
            "DP-pFedDSU": lambda: dp_pfeddsu(model, **sparse),
            PRINTED: lambda: dp_pfeddsu_paper(model, clients=own.clients, **sparse),
            WHOLE: lambda: fine_tuned(dp_fedavg(model, **options), self.local(passes)),
            "head alone": lambda: centaur(
                model, **options | {"head": head, "local": self.local(0)}
            ),
        }
        return builders[method]()

    def rows(
        self,
        method: str,
        classes: int,
        points: Mapping[str, Sequence[float]],
        *,
        tuning: bool = False,
        **fixed: Any,
    ) -> list[Row]:
        """Return a row for each point. All points of a seed run in one program.

        Args:
            method: Name of the method in the tables.
            classes: s, number of classes of each client.
            points: Columns of numbers by argument of `build`. `epsilon` replaces the noise
                multiplier.
            tuning: Whether to run only the tuning seed, tested on held-out training examples.
            fixed: Other arguments of `build`.

        Returns:
            Rows with `facts_of`, `method`, `classes`, the point's numbers, its epsilon as `target`,
            and `train_loss` and `update_norm` by seed and round.
        """
        own = self.setting
        columns = {name: list(column) for name, column in points.items() if name != "epsilon"}
        columns["noise_multiplier"] = [self.noise(epsilon) for epsilon in points["epsilon"]]
        columns.setdefault("clip", [own.clip] * len(columns["noise_multiplier"]))
        make = functools.partial(self.held_out if tuning else self.clients, classes)
        results = sweep_each(
            method,
            functools.partial(self.build, method, **fixed),
            columns,
            make,
            rounds=own.rounds,
            seeds=(TUNING,) if tuning else self.seeds,
            out=self.options.out,
            config=dataclasses.asdict(own) | {"classes": classes, "tuning": tuning} | fixed,
            eval_every=max(1, own.rounds // (1 if tuning or method == WHOLE else 4)),
            devices=jax.devices()[:1],
            chunk=1,
            progress=False,
        )
        rows = []
        for index, of_point in enumerate(results):
            facts = (
                facts_of(row_of(method, of_point)) | {"method": method, "classes": classes} | fixed
            )
            facts |= {name: float(column[index]) for name, column in columns.items()}
            facts["target"] = float(points["epsilon"][index])
            facts["train_loss"] = [
                [row["train_loss"] for row in result.metrics] for result in of_point
            ]
            facts["update_norm"] = [
                [row["update_norm"] for row in result.metrics] for result in of_point
            ]
            rows.append(facts)
        return rows

    def at_paper_clip(
        self, classes: int, methods: Sequence[str] = (*METHODS, PRINTED)
    ) -> list[Row]:
        """Return rows of methods at the paper's clip bound, for each epsilon of the tables."""
        epsilons = BY_EPSILON[classes]
        return [
            row for method in methods for row in self.rows(method, classes, {"epsilon": epsilons})
        ]

    def floors(self, classes: int) -> dict[str, Row]:
        """Return the references: `local-only`, and `head alone`, on an untrained extractor."""
        (head,) = self.rows("head alone", classes, {"epsilon": [math.inf]})
        return {"local-only": self.alone(classes), "head alone": head}

    @functools.cache  # noqa: B019
    def features(self, seed: int) -> np.ndarray:
        """Compute the untrained extractor's features of all pictures in the store of `clients`."""
        model = self.model
        init_key = jax.random.split(jax.random.key(seed), 3)[0]
        weights = model.init(init_key)
        extract = jax.jit(
            lambda pictures: model.extract(weights, model.prepare(pictures))  # pyrefly: ignore
        )
        pictures = self.clients(2, seed).inputs
        parts = np.split(pictures, range(PICTURES, len(pictures), PICTURES))
        return np.concatenate([extract(part) for part in parts])

    def on_features(self, classes: int, passes: Sequence[int]) -> list[Row]:
        """Fit each client's head to `features`, and return a row for each number of passes."""
        width = self.features(self.seeds[0]).shape[1]
        head = mlp((width,), self.data.classes, hidden=())

        def fitted(number: int) -> Callable[[Clients], Algorithm]:
            return lambda clients: local_only(head, local=self.local(number, head=True))

        results = run_each(
            {f"head, {number} passes": fitted(number) for number in passes},
            lambda seed: self.clients(classes, seed)._replace(inputs=self.features(seed)),
            rounds=1,
            seeds=self.seeds,
            out=self.options.out,
            config=dataclasses.asdict(self.setting) | {"classes": classes},
            devices=jax.devices()[:1],
            chunk=1,
            progress=False,
        )
        return [
            facts_of(row_of(name, own)) | {"passes": number, "classes": classes}
            for number, (name, own) in zip(passes, results.items(), strict=True)
        ]

    def alone(self, classes: int) -> Row:
        """Run local-only at the rate and number of passes that are best on held-out examples."""
        rates = [0.001, 0.003, 0.01, 0.03, 0.1][: 2 if self.options.smoke else None]
        rows, chosen = trained_alone(
            self.model,
            functools.partial(self.local, 1),
            rates,
            functools.partial(self.clients, classes),
            rounds=self.setting.alone,
            seeds=self.seeds,
            tuning_seed=TUNING,
            out=self.options.out,
            config=dataclasses.asdict(self.setting) | {"classes": classes},
        )
        facts = {name: [row[name] for row in rows] for name in ("accuracy", "loss")}
        return facts | {"worst10": [row["accuracy_worst10"] for row in rows]} | chosen

    def tuned(
        self,
        method: str,
        classes: int,
        epsilons: Sequence[float],
        heads: Sequence[int],
        clips: Sequence[float],
    ) -> list[Row]:
        """Return a row for each epsilon, at the head passes and clip bound that tuning chooses.

        The choice is the best pair on held-out examples, for the tuning seed.

        Args:
            method: Name of the method in the tables.
            classes: Number of classes of each client.
            epsilons: Target epsilons.
            heads: Numbers of head passes to try.
            clips: Clip bounds to try.
        """
        targets, bounds = zip(*itertools.product(epsilons, clips), strict=True)
        columns = {"epsilon": targets, "clip": bounds}
        tried = [
            row
            for passes in heads
            for row in self.rows(method, classes, columns, tuning=True, head_epochs=passes)
        ]
        pairs = list(itertools.product(heads, clips))
        points = {
            "head passes": [passes for passes, _ in pairs],
            "clip": [clip for _, clip in pairs],
        }
        rows = []
        for epsilon in epsilons:
            scores = [row["accuracy"][0] for row in tried if row["target"] == epsilon]
            passes, clip = pairs[int(np.argmax(scores))]
            (row,) = self.rows(
                method, classes, {"epsilon": [epsilon], "clip": [clip]}, head_epochs=passes
            )
            chosen = starred({"head passes": passes, "clip": clip}, points)
            rows.append(row | {"validation": scores, "points": points, "chosen": chosen})
        return rows


def sent_share(model: Model, density: float, sparse_layers: int) -> float:
    """Return the share of an extractor's coordinates that DP-pFedDSU sends."""
    local = LocalSGD(optax.sgd(0.1))
    private: dict[str, Any] = {
        "sampling": Full(),
        "noise_multiplier": 1.0,
        "local": local,
        "head": local,
    }
    method = dp_pfeddsu(model, density=density, sparse_layers=sparse_layers, **private)
    leaves = jax.tree.leaves(method.init(jax.random.key(0), 1)[0].support)
    return float(sum(np.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves))
