"""Plan of a run, or of a sweep: everything that is decided before a device computes anything."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.backend import of_devices
from jaxfl.data.load import Dataset
from jaxfl.engine.interface import Engine
from jaxfl.engine.memo import described, first_made, key_of_arrays, key_of_method, remembered
from jaxfl.engine.program import QUICK, Points
from jaxfl.privacy.audit import Canaries, check_audit
from jaxfl.privacy.dropouts import with_dropouts
from jaxfl.privacy.mechanisms import Skellam
from jaxfl.run import fingerprint
from jaxfl.run.check import check_algorithm, check_mechanism, state_shapes
from jaxfl.run.randomness import Streams
from jaxfl.run.recorder import EvaluationSchedule
from jaxfl.types import Algorithm, Clients, Tree


# Without `jit`, JAX would compile several programs, and optimise each of them.
@functools.partial(jax.jit, compiler_options=QUICK)
def _keys_by_purpose(key: Key[Array, "*P"]) -> tuple[Array, Array, Array]:
    """Return the keys of the first state, of the rounds and of the evaluations, as [*P] each."""

    def split(key: Key[Array, ""]) -> tuple[Array, Array, Array]:
        initial, rounds, evaluations = jax.random.split(key, 3)
        return initial, rounds, evaluations

    if key.ndim:
        return jax.vmap(split)(key)
    return split(key)


class Settings(NamedTuple):
    """Settings of `simulate` and `sweep`, whose arguments of these names describe them."""

    rounds: int
    states: Literal["device", "host"] = "device"
    paired_noise: bool = False
    keep_states: bool = True
    numbers: tuple[int, ...] | None = None
    eval_every: int | None = None
    chunk: int | Literal["auto"] | None = None
    devices: list[jax.Device] | None = None
    secret_noise: bool = False
    report: Literal["full", "public"] = "full"
    resume: Literal["auto", "never"] = "auto"
    progress: bool = True
    audit: Canaries | None = None
    availability: float | Float[np.ndarray, "C"] = 1.0
    central: Dataset | None = None
    keep: Literal["last", "best"] = "last"

    @property
    def streams(self) -> Streams:
        """Rule by which cohorts, noise and local draws follow from key or secret bits."""
        return Streams(self.secret_noise, self.paired_noise, self.numbers)

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        every = self.eval_every or max(1, self.rounds // 10)
        return sorted({*range(every, self.rounds + 1, every), self.rounds})

    @property
    def first_chunk(self) -> int | Literal["auto"]:
        """Chunk with which the run starts, or "auto". It is halved if memory does not suffice."""
        if self.chunk is None:
            return of_devices(self.devices).chunk
        return self.chunk


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Plan of a run, or of the P points of a sweep, which are runs of one program."""

    name: str
    key: Key[Array, "*P"]
    """Key of the run, or of each point."""
    algorithms: tuple[Algorithm, ...]
    """Algorithm of the run, or of each point."""
    points: Points | None
    """Points of a sweep. None stands for one run, whose arrays have no axis of points."""
    clients: Clients
    settings: Settings
    update: Tree
    """Shapes of a client's update."""

    @functools.cached_property
    def method(self) -> Algorithm | Points:
        """The algorithm, or the points, with functions that leave their names in traces."""
        return fingerprint.marked(self.points or self.algorithms[0])

    @functools.cached_property
    def stateful(self) -> bool:
        """Whether clients keep a state between rounds."""
        return bool(state_shapes(self.algorithms[0], self.clients.num_clients))

    @functools.cached_property
    def keys(self) -> tuple[Array, Array, Array]:
        """Keys of the first state, of the rounds and of the evaluations."""
        return _keys_by_purpose(self.key)

    def each(self, work: Callable) -> Callable:
        """Return `work` for a single run, or its vectorised form for all points."""
        if self.points is None:
            return work
        return jax.vmap(work)

    def split(self, tree: Tree) -> list[Tree]:
        """Return each run's part of a tree: the tree of a single run, or entry p for point p."""
        if self.points is None:
            return [tree]
        count = len(self.algorithms)
        return [jax.tree.map(operator.itemgetter(p), tree) for p in range(count)]

    def schedule(self, engine: Engine) -> EvaluationSchedule:
        """Return rounds and evaluations, and whether client states stay after the last round."""
        settings = self.settings
        # States without numbers take no memory, so a method without states always keeps them.
        keeps = settings.keep_states or not engine.stateful
        return EvaluationSchedule(settings.rounds, settings.evaluations, keeps)

    def facts(self, engine: Engine) -> fingerprint.Facts:
        """Return the facts that identify the run, without rounds and random streams.

        `jaxfl.run.fingerprint` describes facts.
        """
        first = self.algorithms[0]
        facts: fingerprint.Facts = {
            "method": first.name,
            "model": first.model.name,
            "states": self.settings.states,
        }
        if self.points is not None:
            columns = self.points.values.items()
            facts |= {f"values.{name}": column.tolist() for name, column in columns}
        for p, algorithm in enumerate(self.algorithms):
            prefix = ""
            if self.points is not None:
                prefix = f"point.{p}."
            facts |= _facts_of_method(prefix, algorithm)
        facts |= fingerprint.of_versions(engine.population.mesh) | fingerprint.of_key(self.key)
        facts |= fingerprint.of_clients(self.clients) | fingerprint.of_frozen(first.model)
        return facts | self._facts_of_programs(engine)

    def _facts_of_programs(self, engine: Engine) -> fingerprint.Facts:
        """Return hashes of the programs, which a process caches for equal methods."""
        init_key, _, eval_key = self.keys
        population = engine.population

        def hashes() -> fingerprint.Facts:
            start = fingerprint.start(self.method, population.clients, init_key)
            return fingerprint.of_programs({"init": [start], **engine.programs(eval_key)})

        # A program follows from the method, and from the shapes and places of its arguments.
        shapes = key_of_arrays((init_key, eval_key))
        method = key_of_method(self.method)
        kind = type(engine).__name__
        return remembered(("facts", kind, method, described(population), shapes), hashes)


def make_plan(
    name: str,
    key: Key[Array, "*P"],
    algorithms: Sequence[Algorithm],
    points: Points | None,
    clients: Clients,
    settings: Settings,
) -> RunPlan:
    """Check a run's arguments and return its plan.

    Args:
        name: Name of the run in messages.
        key: Key of the run, or of each point.
        algorithms: Algorithm of the run, or of each point.
        points: Points of a sweep, or None for one run.
        clients: All clients of the run.
        settings: Settings of the run.

    Raises:
        ValueError: A method does not fit the clients (see `check_algorithm`), or its mechanism does
            not support the audit or the dropouts of the settings.
    """
    # Dropouts come first, because they change the sampler that the checks read.
    drops = functools.partial(_with_dropouts, settings=settings)
    algorithms, points = _changed(drops, algorithms, points)
    # JAX knows the functions of a method that was built from equal arguments before.
    first = first_made(algorithms[0])
    others = algorithms[1:]
    update = check_algorithm(first, clients, settings.rounds)
    # The others differ only in numbers, for which a mechanism may still raise an error.
    for other in others:
        check_mechanism(other, clients, update)
    algorithms = (first, *others)
    if settings.audit is not None:
        canaries = functools.partial(_with_canaries, canaries=settings.audit)
        algorithms, points = _changed(canaries, algorithms, points)
    return RunPlan(name, key, algorithms, points, clients, settings, update)


def _changed(
    change: Callable[[Algorithm], Algorithm], algorithms: Sequence[Algorithm], points: Points | None
) -> tuple[tuple[Algorithm, ...], Points | None]:
    """Return the changed methods, and points that build them. None stays None."""
    changed = tuple(map(change, algorithms))
    # A method that needs no change keeps its builder, and with it the traces of earlier runs.
    same = all(new is old for new, old in zip(changed, algorithms, strict=True))
    if points is not None and not same:
        build = points.build
        points = points._replace(build=lambda **values: change(build(**values)))
    return changed, points


def _with_canaries(algorithm: Algorithm, canaries: Canaries) -> Algorithm:
    """Return the method with canaries, or raise a ValueError if its mechanism allows no audit."""
    check_audit(algorithm.mechanism)
    return algorithm._replace(audit=canaries)


def _with_dropouts(algorithm: Algorithm, settings: Settings) -> Algorithm:
    """Return the method with clients that drop out, or the method itself if none does.

    Raises:
        ValueError: The report is public and the mechanism is `Skellam`. The epsilon of the plan,
            which a public report shows, can be too small if clients drop out.
    """
    mechanism = with_dropouts(algorithm.mechanism, settings.availability)
    if mechanism is algorithm.mechanism:
        return algorithm
    if isinstance(mechanism, Skellam) and settings.report == "public":
        raise ValueError(
            "report must be 'full' for Skellam with availability below 1, because its epsilon "
            f"follows from how many clients returned in each round, got {settings.report!r}. "
            "Leave it out, or set availability=1."
        )
    return algorithm._replace(mechanism=mechanism)


def _facts_of_method(prefix: str, algorithm: Algorithm) -> fingerprint.Facts:
    """Return the facts of a method's mechanism, private steps, audit and terms.

    Args:
        prefix: Text in front of each fact's code.
        algorithm: The method.
    """
    parts: dict[str, Any] = {"mechanism": algorithm.mechanism, "dp_sgd": algorithm.dp_sgd}
    if algorithm.audit is not None:
        parts["audit"] = algorithm.audit
    facts: fingerprint.Facts = {}
    for name, part in parts.items():
        facts |= fingerprint.of_value(f"{prefix}{name}", part)
    return facts | fingerprint.of_terms(f"{prefix}terms", algorithm.terms)
