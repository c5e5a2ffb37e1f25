"""The methods of the map, each with its points, and the ways in which a run is evaluated."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments import common
from experiments.map.places import GROUPS, Place, passes_between
from jaxfl import LocalSGD, spread
from jaxfl.algorithms import (
    centaur,
    ditto,
    dp_fedavg,
    dp_pfeddsu,
    dp_prototypes,
    dp_ridge,
    feddpa,
    fedrod,
    fine_tuned,
    ifca,
    local_only,
    matrix_scaled,
    mixed,
    pmtl,
    ppsgd,
    prior_corrected,
)
from jaxfl.models import mlp
from jaxfl.models.extended import extended
from jaxfl.privacy import Poisson
from jaxfl.tasks import Metric
from jaxfl.types import Algorithm, ClientData, Model, Params

MIXTURE_PASSES = 20
"""Greatest number of passes of a mixture's local models."""

POINTS = 20
"""Number of points of each private method, before tuning adds points beyond the grid."""

MOST_INPUTS = 512
"""Largest number of inputs for which DP ridge is measured."""

SMOOTHING = 0.1
"""Number of examples that the correction adds to every class of a client."""

FINE_TUNING_PASSES = 5
"""Number of passes over a client's examples in fine-tuning, and in training of heads."""

PERSONAL_PASSES = 2
"""Passes of Ditto's and MR-MTL's personal models in a round."""

START = (0.01, 0.5)
"""Range of learning rates for training from the initial weights."""

FURTHER = (0.003, 0.3)
"""Range of learning rates for heads, and for fine-tuning."""

CLIPS = (0.1, 3.0)
PENALTIES = (0.01, 1.0)
"""Range of weights of the distance to the shared model."""

STEPS = (0.3, 5.0)
"""Range of learning rates for a single step in a round."""

SCALING = (4.0, 40.0)
"""Penalties of the map with which a client translates logits before the test, in examples."""

SCALING_IN_ROUNDS = (2.0, 60.0)
"""Range of the penalties of these maps in rounds, in examples."""

Way = Callable[[Algorithm], Algorithm]


class Family(NamedTuple):
    """Training runs of one kind."""

    build: Callable[..., Algorithm]
    """Function from a point's numbers to an algorithm. A private method also takes
    `noise_multiplier`. Each way of scoring is a metric of the algorithm's task."""
    points: Mapping[str, Sequence[float]]
    rounds: int
    private: bool = True
    ceiling: bool = False
    """Whether the map also shows the method without noise."""
    mixtures: Mapping[str, Callable[..., Algorithm]] = {}
    """Builders by way. The same runs are scored as a mixture of the way and the local model."""


class Alone(NamedTuple):
    """Local training that suits clients that each train alone."""

    rate: float
    """Learning rate."""
    passes: int
    """Number of passes over a client's examples."""


def stopped(alone: Mapping[str, Any], place: Place) -> Alone:
    """Return the chosen rate of clients that train alone, and the passes after which they stop.

    There are at most `MIXTURE_PASSES` passes.

    Args:
        alone: Result of `tuning.study` for a family of `trained_alone`.
        place: Place on the map.
    """
    (tuned,) = alone["tuning"]
    passes = (tuned["evaluation"] + 1) * passes_between(place.passes)
    return Alone(tuned["chosen"]["rate"], min(passes, MIXTURE_PASSES))


def scored(base: Algorithm, after: Mapping[str, Way], around: Mapping[str, Way] = {}) -> Algorithm:
    """Return a method whose clients are scored in several ways after one training run.

    Each way is a metric of the method's task, by the way's name.

    Args:
        base: The method, whose messages are sent.
        after: Wrappers by name. Each starts from the weights that `base` would evaluate.
        around: Wrappers by name. Each personalizes `base` again, for instance without some
            examples.
    """
    model = base.model
    ways = {**after, **around}
    models = [way(base).model for way in ways.values()]

    def personalize(key: jax.Array, server: Any, client: Any, data: ClientData) -> Params:
        params = base.personalize(key, server, client, data)
        finished = base._replace(personalize=lambda *_: params)
        starts = {name: finished if name in after else base for name in ways}
        own = {
            name: way(starts[name]).personalize(key, server, client, data)
            for name, way in ways.items()
        }
        return {**params, "ways": tuple(own.values())}

    def outputs(own: Sequence[Params], plain: jax.Array, x: jax.Array) -> jax.Array:
        del plain
        of_each = [one.apply(params, x) for one, params in zip(models, own, strict=True)]
        return jnp.concatenate(of_each, axis=-1)

    def start(key: jax.Array) -> Sequence[Params]:
        return tuple(one.init(key) for one in models)

    whole = extended(model, "ways", start, outputs)._replace(extract=None, classify=None)
    metrics = {name: _of_way(model, number, len(ways)) for number, name in enumerate(ways)}
    task = dataclasses.replace(model.task, metrics=metrics)
    return base._replace(model=whole._replace(task=task), personalize=personalize)


def _of_way(model: Model, number: int, ways: int) -> Metric:
    """Return the model's headline metric of output `number`, of `ways` concatenated outputs."""
    headline = model.task.metrics[model.task.headline]

    def sums(outputs: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        return headline.sums(jnp.split(outputs, ways, axis=-1)[number], labels, weights)

    return headline._replace(sums=sums)


def only_participants(algorithm: Algorithm, participants: int) -> Algorithm:
    """Return the method in which clients with an index of `participants` or more send zeros.

    These clients also keep their state. The denominator counts them, because a server would not
    know which clients are silent.
    """

    def client_update(key: jax.Array, server: Any, client: Any, data: ClientData) -> tuple:
        message, after, info = algorithm.client_update(key, server, client, data)
        takes_part = data.id < participants
        update = jax.tree.map(lambda leaf: jnp.where(takes_part, leaf, 0), message.update)
        state = jax.tree.map(lambda new, old: jnp.where(takes_part, new, old), after, client)
        return message._replace(update=update), state, info

    return algorithm._replace(client_update=client_update)


def plain(algorithm: Algorithm) -> Algorithm:
    """Return the method as it is."""
    return algorithm


own_classes = functools.partial(prior_corrected, smoothing=0.0)
corrected = functools.partial(prior_corrected, smoothing=SMOOTHING)
CORRECTIONS: Mapping[str, Way] = {
    "plain": plain,
    "own_classes": own_classes,
    "corrected": corrected,
}


def families(
    place: Place, model: Model, linear: Model, alone: Mapping[str, Alone]
) -> dict[str, Family]:
    """Return the private methods by name, each with `POINTS` points over its own numbers.

    DP ridge is left out if there are more than `MOST_INPUTS` inputs.

    Args:
        place: Place on the map.
        model: The perceptron.
        linear: The linear model.
        alone: Local training of a mixture's own model, for "perceptron" and "linear".
    """
    sampling = Poisson(place.share)
    space = functools.partial(spread, POINTS)
    last = FINE_TUNING_PASSES

    def local(rate: float, passes: int = 1) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), place.batch_size, passes)

    def mixture(algorithm: Algorithm) -> Algorithm:
        of_model = alone[
            "linear" if algorithm.model.head == algorithm.model.layers else "perceptron"
        ]
        return mixed(algorithm, local=local(of_model.rate, of_model.passes))

    def family(
        method: Callable[..., Algorithm],
        points: Mapping[str, Sequence[float]],
        ways: Callable[..., Mapping[str, Way]] = lambda **_: CORRECTIONS,
        mixed_ways: Sequence[str] = tuple(CORRECTIONS),
        **options: Any,
    ) -> Family:
        """Return the family of a method, with the ways in which it is scored and mixed."""

        def build(*, mix: str | None = None, **numbers: Any) -> Algorithm:
            base = only_participants(method(**numbers), place.participants)
            known = ways(**numbers)
            if mix is None:
                return scored(base, known)
            return scored(base, {}, {f"mixed_{mix}": lambda base: mixture(known[mix](base))})

        settings: dict[str, Any] = {"rounds": place.rounds} | options
        builders = {way: functools.partial(build, mix=way) for way in mixed_ways}
        return Family(build, points, mixtures=builders, **settings)

    def fitted(number: str, parts: Sequence[str] | None = None) -> Mapping[str, Any]:
        """Return options of a family whose clients also fit the corrected model before the test.

        Args:
            number: Name of the rate among the family's numbers. With "tuning", clients also fit
                the uncorrected model. Other methods have fitted it already.
            parts: Layers that are fitted. None stands for all of them.
        """

        def ways(**numbers: Any) -> Mapping[str, Way]:
            again = functools.partial(fine_tuned, local=local(numbers[number], last), parts=parts)
            found: dict[str, Way] = dict(CORRECTIONS)
            if number == "tuning":
                found["fine_tuned"] = again
            return found | {"fine_tuned_corrected": lambda base: again(corrected(base))}

        mixed_ways = (*CORRECTIONS, *(["fine_tuned"] if number == "tuning" else []))
        return {"ways": ways, "mixed_ways": (*mixed_ways, "fine_tuned_corrected")}

    def tuned_ways(network: Model) -> Callable[..., Mapping[str, Way]]:
        whole = fitted("tuning")["ways"]

        def ways(*, tuning: float, **_: Any) -> Mapping[str, Way]:
            found = dict(whole(tuning=tuning))
            if network.head != network.layers:
                head = functools.partial(fine_tuned, local=local(tuning, last), parts=network.head)
                found["head_fine_tuned"] = head
            return found

        return ways

    def private(
        method: Callable[..., Algorithm],
        options: Callable[..., Mapping[str, Any]],
        network: Model = model,
    ) -> Any:
        def build(clip: float, noise_multiplier: float, **numbers: float) -> Algorithm:
            given = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
            return method(network, **given, **options(**numbers))

        return build

    def near(
        method: Callable[..., Algorithm],
        trained: Callable[[float], Mapping[str, LocalSGD]],
        network: Model,
    ) -> Family:
        """Return the family of a method whose personal models always train near the shared one.

        They also do so in the training before the test.
        """

        def build(model: Model, rate: float, penalty_weight: float, **options: Any) -> Algorithm:
            base = method(model, penalty_weight=penalty_weight, **trained(rate), **options)
            return common.fine_tuned(base, local(rate, last), penalty_weight)

        points = space(rate=START, clip=CLIPS, penalty_weight=PENALTIES)
        return family(private(build, dict, network), points, **fitted("rate"))

    def of_ditto(rate: float) -> Mapping[str, LocalSGD]:
        return {"local": local(rate), "personal": local(rate, PERSONAL_PASSES)}

    def of_mr_mtl(rate: float) -> Mapping[str, LocalSGD]:
        return {"local": local(rate, PERSONAL_PASSES)}

    def scaled_ways(*, tuning: float, **_: Any) -> Mapping[str, Way]:
        again = functools.partial(fine_tuned, local=local(tuning, last))
        found: dict[str, Way] = {
            "fine_tuned": again,
            "fine_tuned_corrected": lambda base: again(corrected(base)),
        }
        for penalty in SCALING:
            scaled = functools.partial(matrix_scaled, penalty=penalty)
            found[f"scaled_{penalty:g}"] = scaled
            found[f"fine_tuned_scaled_{penalty:g}"] = lambda base, scaled=scaled: again(
                scaled(base)
            )
        return found

    def scaled_average(*, train: float, **numbers: float) -> Algorithm:
        """Return DP-FedAvg that trains through maps of the logits, and is evaluated without one."""
        base = averaged(place, linear)(**numbers)
        through_maps = matrix_scaled(base, train=train)
        return base._replace(client_update=through_maps.client_update)

    of_average = space(rate=START, clip=CLIPS, tuning=FURTHER)

    def average(network: Model) -> Family:
        mixed_ways = fitted("tuning")["mixed_ways"]
        method = averaged(place, network)
        return family(method, of_average, tuned_ways(network), mixed_ways, ceiling=True)

    known = {
        "DP-FedAvg": average(model),
        "linear DP-FedAvg": average(linear),
        "Ditto": near(ditto, of_ditto, model),
        "linear Ditto": near(ditto, of_ditto, linear),
        "MR-MTL": near(pmtl, of_mr_mtl, model),
        "linear MR-MTL": near(pmtl, of_mr_mtl, linear),
        "linear IFCA": family(
            private(
                lambda model, rate, tuning, **options: ifca(
                    model, clusters=GROUPS, local=local(rate), **options
                ),
                dict,
                linear,
            ),
            of_average,
            **fitted("tuning"),
        ),
        "CENTAUR": family(
            private(centaur, lambda rate, head: {"local": local(rate), "head": local(head, last)}),
            space(rate=START, clip=CLIPS, head=FURTHER),
            **fitted("head", model.head),
        ),
        "PPSGD": family(
            private(
                lambda model, head, **options: fine_tuned(
                    ppsgd(model, **options), local=local(head, last), parts=model.head
                ),
                lambda rate, personal, head: {
                    "batch_size": 5 if place.few else 50,
                    "server_learning_rate": rate,
                    "personal_learning_rate": personal,
                    "loss": None,
                    "head": head,
                },
            ),
            space(rate=STEPS, clip=CLIPS, personal=STEPS, head=FURTHER),
            **fitted("head", model.head),
        ),
        "FedDPA": family(
            private(
                lambda model, rate, **options: feddpa(model, local=local(rate), **options)._replace(
                    personalize=feddpa(model, local=local(rate, last), **options).personalize
                ),
                lambda rate, threshold: {"rate": rate, "threshold": threshold, "evaluate": "adapt"},
            ),
            space(rate=START, clip=CLIPS, threshold=(0.1, 0.9)),
            **fitted("rate"),
        ),
        "DP-pFedDSU": family(
            private(
                dp_pfeddsu,
                lambda rate, density: {
                    "local": local(rate),
                    "head": local(rate, last),
                    "density": density,
                },
            ),
            space(rate=START, clip=CLIPS, density=(0.05, 0.5)),
            **fitted("rate", model.head),
        ),
        "FedRoD": family(
            private(fedrod, lambda rate, tuning: {"local": local(rate)}),
            space(rate=START, clip=CLIPS, tuning=FURTHER),
            **fitted("tuning"),
        ),
        "DP ridge": family(
            lambda **numbers: dp_ridge(linear, **numbers),
            space(clip=(0.3, 2.5), ridge=(0.003, 3.0), personal=(0.1, 100.0)),
            rounds=1,
        ),
        "DP prototypes": family(
            lambda **numbers: dp_prototypes(linear, **numbers),
            space(clip=(0.1, 1.5), personal=(0.1, 100.0)),
            rounds=1,
        ),
        "scaled linear DP-FedAvg": family(
            scaled_average,
            space(rate=START, clip=CLIPS, tuning=FURTHER, train=SCALING_IN_ROUNDS),
            scaled_ways,
            tuple(scaled_ways(tuning=0.0)),
        ),
    }
    if math.prod(linear.input_shape or ()) > MOST_INPUTS:
        # Every client would hold the products of all pairs of inputs.
        del known["DP ridge"]
    return known


def averaged(place: Place, model: Model) -> Callable[..., Algorithm]:
    """Return the builder of DP-FedAvg from a point. It ignores `tuning`, a rate for later."""

    def build(rate: float, clip: float, noise_multiplier: float, tuning: float = 0.0) -> Algorithm:
        del tuning
        return dp_fedavg(
            model,
            clip=clip,
            noise_multiplier=noise_multiplier,
            sampling=Poisson(place.share),
            local=LocalSGD(optax.sgd(rate), place.batch_size),
        )

    return build


def corrected_average(place: Place, model: Model) -> Family:
    """Return the family of DP-FedAvg, evaluated as it is and corrected, without fine-tuning."""
    method = averaged(place, model)

    def build(**numbers: float) -> Algorithm:
        return scored(method(**numbers), CORRECTIONS)

    return Family(build, spread(POINTS, rate=START, clip=CLIPS), place.rounds)


def trained_alone(place: Place, model: Model) -> Family:
    """Return the family of clients that each train alone, with `POINTS` / 2 rates."""

    def build(rate: float) -> Algorithm:
        local = LocalSGD(optax.sgd(rate), place.batch_size)
        return scored(local_only(model, local=local), {"plain": plain})

    return Family(build, spread(POINTS // 2, rate=START), place.passes, private=False)


def networks(place: Place, shape: tuple[int, ...], classes: int) -> tuple[Model, Model]:
    """Return the perceptron and the linear model of a place, for inputs of a shape."""
    return mlp(shape, classes, hidden=(place.width,)), mlp(shape, classes, hidden=())
