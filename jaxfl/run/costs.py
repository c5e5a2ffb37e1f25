"""What a run costs besides privacy: bytes that clients send and receive, and hours of a deployment.

Nothing here runs in a round. Bytes follow from the shapes of a method's functions, and hours from
the cohorts of a finished run.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jaxtyping import Bool, Float

from jaxfl._support.checks import (
    at_least_0,
    check_instance,
    check_numbers,
    check_path,
    checked,
    is_listed,
    key_of,
    show,
)
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.mechanisms.gaussian import Participant
from jaxfl.report import plots
from jaxfl.run.check import check_clients, given_to_client
from jaxfl.run.flags import under_own_flags
from jaxfl.run.recorder import Result
from jaxfl.run.trained import Origin
from jaxfl.types import Algorithm, Clients, Message, Tree

_SLICES = ("dynamic_slice", "gather", "slice")
"""JAX primitives that read a part of their first operand."""


class Traffic(NamedTuple):
    """Bytes that one client sends and receives."""

    up: int
    """Bytes that a participant sends in a round."""
    down: int
    """Bytes that a participant receives in a round."""
    served: int
    """Bytes that a client receives in order to use the result of the training."""


@under_own_flags
@checked(clients=check_clients)
def traffic(algorithm: Algorithm, clients: Clients) -> Traffic:
    """Return the bytes that one client sends and receives, which follow from arrays' shapes.

    - A participant sends what enters the sum: each coordinate in 32 bits, or in the `bits` of
      `Skellam`. What the mechanism adds, such as the bit of `AdaptiveClip`, counts too. An update
      of which a known number of coordinates are not zero (`Algorithm.sparse`) is sent as these
      values, with a bitmap unless the server knows their places, or as all coordinates if that is
      shorter. If clients add noise to all coordinates, all are sent.
    - A participant receives the arrays of the server's state that its update depends on, in their
      own precision. If it reads a part of an array, as `fedbuff` reads one of several states, only
      this part counts. Booleans take one bit.
    - To use the result, a client receives the arrays that `personalize` depends on.

    Frozen weights of a model, the numbers of a mechanism (such as a clip bound), the messages of
    secure aggregation, compression and headers of packets do not count. Methods that send nothing
    have no bytes.

    Args:
        algorithm: The method.
        clients: Clients for which the method's functions are traced.

    Returns:
        The bytes of a participant in a round, and of a client that uses the result.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.data import iid, load, make_clients
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> clients = make_clients(digits, iid(digits.train_labels, 20, seed=0))
    >>> traffic(fedavg(mlp((8, 8, 1), 10, hidden=())), clients)
    Traffic(up=2600, down=2600, served=2600)
    """
    return traffic_by_point([algorithm], clients)[0]


def traffic_by_point(algorithms: Sequence[Algorithm], clients: Clients) -> list[Traffic]:
    """Return the `traffic` of each point of a sweep.

    The points differ only in numbers, so the shapes of the first hold for all.
    """
    first = algorithms[0]
    if not first.mechanism.communicates:
        return [Traffic(0, 0, 0)] * len(algorithms)
    arguments = given_to_client(first, clients)
    _, server, *_ = arguments
    count = len(jax.tree.leaves(server))
    update = jax.make_jaxpr(first.client_update, return_shape=True)
    program, (message, *_) = update(*arguments)
    use = jax.make_jaxpr(first.personalize)(*arguments)
    # The programs show which arrays of the server's state their results depend on.
    down = _whole_bytes(_bits_read(program.jaxpr, count))
    served = _whole_bytes(_bits_read(use.jaxpr, count))
    sent = [_bits_sent(algorithm, message, clients.num_clients) for algorithm in algorithms]
    return [Traffic(_whole_bytes(bits), down, served) for bits in sent]


def _whole_bytes(bits: float | int) -> int:
    return math.ceil(bits / 8)


def _bits_sent(algorithm: Algorithm, message: Message, clients: int) -> float | int:
    """Return the bits that a client sends in a round.

    Args:
        algorithm: The method.
        message: Shapes of the client's message.
        clients: Number of all clients.
    """
    mechanism = algorithm.mechanism
    summed = functools.partial(_summed, mechanism=mechanism, clients=clients)
    dense = _size(jax.eval_shape(summed, message))
    bits = mechanism.coordinate_bits
    sparse = algorithm.sparse
    if sparse is None or not mechanism.sparse:
        return dense * bits
    coordinates = _size(message.update)
    # What the mechanism adds to an update is never sparse.
    off_zero = dense - coordinates + float(sparse.values(message.update))
    bitmap = coordinates
    if sparse.public:
        bitmap = 0
    return min(dense * bits, off_zero * bits + bitmap)


def _summed(message: Message, mechanism: Mechanism, clients: int) -> Tree:
    """Return what enters the sums over clients when one of them sends the message."""
    # Only shapes matter, so key, sender and scale may be any.
    key = key_of(0)
    memory = mechanism.init(key, lambda: message.update, clients)
    one = jnp.ones(())
    sender = Participant(jnp.int32(0), one)
    own = mechanism.contribute(key, memory, sender, message, one)
    bound = mechanism.contribution_bound(memory)
    return mechanism.representation.in_units(own.update, own.norm, bound, one), own.row


def _size(tree: Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bits_read(program: core.Jaxpr, count: int) -> int:
    """Return the bits of the server's state that the outputs of a program depend on.

    Args:
        program: Program of a function of a key, the server's state, and more.
        count: Number of arrays of the server's state.
    """
    # Without dead code, the program reads an array only if an output depends on it.
    needed, is_read = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    # The program without dead code has lost the inputs that it does not read.
    arrays = iter(needed.invars)
    read = [next(arrays) if needs else None for needs in is_read]
    # The first argument is the key.
    server = read[1 : 1 + count]
    return sum(_bits_of(needed, array) for array in server if array is not None)


def _bits_of(program: core.Jaxpr, array: core.Var) -> int:
    """Return the bits of a program's input, or of the slices if the program reads only these."""
    whole = _bits(array.aval)
    # An input that is returned as it is appears in no operation.
    if any(array is out for out in program.outvars):
        return whole
    found = 0
    for operation in program.eqns:
        places = [i for i, operand in enumerate(operation.invars) if operand is array]
        inner = operation.params.get("jaxpr")
        if not places:
            continue
        # An array that is an index of another one is read whole.
        if operation.primitive.name in _SLICES and places == [0]:
            found += sum(_bits(out.aval) for out in operation.outvars)
        elif operation.primitive.name in ("jit", "pjit") and inner is not None:
            found += sum(_bits_of(inner.jaxpr, inner.jaxpr.invars[i]) for i in places)
        else:
            return whole
    # Slices may overlap, so their sum may exceed the array.
    return min(whole, found)


def _bits(shape: Any) -> int:
    if shape.dtype == bool:
        return shape.size
    return shape.size * 8 * shape.dtype.itemsize


def _check_speed(name: str, value: Any) -> Float[np.ndarray, "#C"]:
    return check_numbers(name, value, axes=(0, 1), infinite=True).reshape(-1)


@checked(speed=_check_speed, upload=_check_speed, download=_check_speed, passes=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class Clock:
    """Speeds of a deployment's clients. Each speed is one number, or one for each client `[C]`.

    Args:
        speed: Training examples that a client processes in a second.
        upload: Bytes that a client sends in a second. Infinity takes no time.
        download: Bytes that a client receives in a second. Infinity takes no time.
        passes: Number of times that a participant processes each of its training examples in a
            round, such as the epochs of its local training.

    >>> import numpy as np
    >>> speeds = np.random.default_rng(0).lognormal(np.log(100.0), 0.5, size=20)
    >>> Clock(speeds, upload=1e5, download=1e6, passes=3).speed.shape
    (20,)
    """

    speed: float | Float[np.ndarray, "#C"]
    upload: float | Float[np.ndarray, "#C"] = math.inf
    download: float | Float[np.ndarray, "#C"] = math.inf
    passes: float = 1.0

    @checked(clients=check_clients)
    def seconds(self, algorithm: Algorithm, clients: Clients) -> Float[np.ndarray, "C"]:
        r"""Return how long each client takes for its part of a round, in seconds.

        .. math:: \frac{\text{down}}{\text{download}_i}
            + \frac{\text{passes} \cdot n_i}{\text{speed}_i} + \frac{\text{up}}{\text{upload}_i}

        Args:
            algorithm: Method, whose bytes are those of `traffic`.
            clients: All clients, of whom client i has n_i training examples.

        Raises:
            ValueError: A speed has neither one number nor one for each client.
        """
        for name in ("speed", "upload", "download"):
            count = np.size(getattr(self, name))
            if count not in (1, clients.num_clients):
                raise ValueError(
                    f"{name} must have one number, or one for each of {clients.num_clients} "
                    f"clients, got {count}. Give one for each client."
                )
        sent = traffic(algorithm, clients)
        examples = np.asarray(clients.train_size, np.float64)
        training = self.passes * examples / self.speed
        return sent.down / self.download + training + sent.up / self.upload


def _check_result(name: str, value: Any) -> Result:
    result = check_instance(name, value, (Result,))
    if result.origin is None or not result.metrics:
        raise ValueError(
            f"{name} must be from `simulate` or `sweep` and have evaluations, "
            "got a Result without one of these. Give for instance what jaxfl.simulate returned."
        )
    return result


@under_own_flags
@checked(result=_check_result)
def deployment_cost(
    result: Result, clock: Clock | None = None, *, period: float | None = None
) -> list[dict[str, float | int]]:
    r"""Return the rows of a run with the bytes and the hours that a deployment would need so far.

    `total_up` has the bytes that all participants of all rounds sent, and `total_down` the bytes
    that they received, with those that all clients then receive in order to use the result.
    Clients that dropped out (`availability=`) received the broadcast too. Their number is known if
    cohorts have a fixed size. Otherwise it is estimated by its expectation,
    :math:`(1 - a_i) / a_i` for each update that arrived of client i, whose availability is
    :math:`a_i`.

    `hours` needs a clock or a period. With a clock, a round lasts as long as the slowest
    participant whose update arrived. A server that waits for clients who dropped out needs longer.
    Aggregation and evaluations take no time, and a round without participants takes none.

    Args:
        result: Result of `simulate`, or of a point of `sweep`.
        clock: Speeds of the clients. The slowest participant ends a round.
        period: Seconds from one step of the server to the next, in place of a clock, for a server
            that waits for nobody (see `fedbuff`). Without either there are no hours.

    Returns:
        The rows of `result.metrics` with the further columns.

    Guarantee: None. Totals and hours follow from the cohorts as they were drawn, which the epsilon
        of a hidden cohort keeps secret. Do not publish them for real clients.

    Raises:
        ValueError: The result is not from a run or has no evaluations, the clock does not fit the
            clients, or both a clock and a period are given.
    """
    if clock is not None and period is not None:
        raise ValueError(
            f"period must be None with a clock, got {period!r}. Give the clock for rounds that "
            "wait for their slowest client, or the period for a server that waits for nobody."
        )
    assert result.origin is not None
    algorithm = result.origin.algorithm
    clients = result.origin.clients
    sent = traffic(algorithm, clients)
    present = np.asarray(result.ledger.participants, bool)
    updates = np.cumsum(present.sum(axis=1))
    broadcasts = np.cumsum(algorithm.mechanism.sampling.drawn_of(present))
    ends = _ends_of_rounds(result.origin, present, clock, period)
    served = clients.num_clients * sent.served
    rows = []
    for row in result.metrics:
        # Rounds count from 1, and entries of the cumulative sums from 0.
        last = int(row["round"]) - 1
        broadcast = round(broadcasts[last] * sent.down)
        cost: dict[str, float | int] = {
            "total_up": int(updates[last]) * sent.up,
            "total_down": broadcast + served,
        }
        if ends is not None:
            cost["hours"] = float(ends[last]) / 3600
        rows.append(row | cost)
    return rows


def _ends_of_rounds(
    origin: Origin, present: Bool[np.ndarray, "T C"], clock: Clock | None, period: float | None
) -> Float[np.ndarray, "T"] | None:
    """Return the seconds until the end of each round, or None without a clock or a period."""
    # A server that waits for nobody ends its rounds at fixed times.
    if period is not None:
        return period * np.arange(1, len(present) + 1)
    if clock is None:
        return None
    # A client that does not take part delays nobody.
    seconds = np.where(present, clock.seconds(origin.algorithm, origin.clients), 0.0)
    return np.cumsum(seconds.max(axis=1))


def _check_costs(name: str, value: Any) -> dict[str, Sequence[Mapping[str, float | int]]]:
    rows = []
    if isinstance(value, Mapping) and all(map(is_listed, value.values())):
        rows = [row for table in value.values() for row in table]
    known = [isinstance(row, Mapping) and "total_up" in row for row in rows]
    # Without any row there would be nothing to draw.
    if not known or not all(known):
        raise TypeError(
            f"{name} must be rows by name, got {show(value)}. "
            "Give for instance {'fedavg': deployment_cost(result, clock)}."
        )
    return dict(value)


@checked(costs=_check_costs, path=check_path)
def plot_costs(
    costs: Mapping[str, Sequence[Mapping[str, float | int]]],
    path: str | os.PathLike,
    *,
    metric: str = "accuracy",
) -> None:
    """Write a picture of a metric against megabytes, and against hours if the rows have them.

    Each method has a curve.

    Args:
        costs: Rows of `deployment_cost` by the names of the methods.
        path: Path of the picture. Its suffix (png, pdf or svg) is the format.
        metric: Name of a column of the rows.

    Raises:
        ValueError: The rows lack the metric or a value of it, only some methods have hours, the
            path has another suffix, or matplotlib is not installed.
        TypeError: The rows are not from `deployment_cost`.
    """
    if lacking := [name for name, rows in costs.items() if any(metric not in row for row in rows)]:
        raise ValueError(
            f"metric must be a column of all rows, got {metric!r}, which {lacking[0]!r} lacks. "
            "Name a metric of the task, or give metric='loss'."
        )
    for name, rows in costs.items():
        if all(math.isnan(row[metric]) for row in rows):
            raise ValueError(
                f"metric must have a value in some row of each method, got {metric!r}, which is "
                f"NaN in all rows of {name!r}. Give metric='central_accuracy' if only a central "
                "set has tests."
            )
    timed = {name: all("hours" in row for row in rows) for name, rows in costs.items()}
    if any(timed.values()) and not all(timed.values()):
        raise ValueError(
            f"costs must have hours in the rows of all methods, or of none, got hours of "
            f"{[name for name, has in timed.items() if has]}. Give deployment_cost a clock for all."
        )
    plots.save(plots.against_costs(costs, metric), path)
