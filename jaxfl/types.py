"""The library's vocabulary: stores of examples, clients, models, messages, and algorithms.

Shapes have these letters: C clients, N positions for a client's examples (padded), M test examples,
B batch, K classes, T rounds, D examples in the store, R rows of all clients, d parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Integer, Key, Shaped

from jaxfl._support.backend import backend
from jaxfl._support.recipes import Recipe
from jaxfl.tasks import Task, classification

Params: TypeAlias = Any
"""Nested dict of arrays, whose top level names the layers of the model."""

Tree: TypeAlias = Any
"""Any pytree of arrays (client states, server states, infos)."""

Number: TypeAlias = float | Float[Array, ""]
"""A number that a sweep may vary, because the compiled program can take it as an argument."""

Inputs: TypeAlias = Integer[Array, "D ..."] | Float[Array, "D ..."]
HostInputs: TypeAlias = Integer[np.ndarray, "D ..."] | Float[np.ndarray, "D ..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """Row numbers of all clients in one vector, which needs no padding.

    Client i's row numbers begin at `flat[start[i]]`, and the clients follow one another. The client
    uses the first `Clients.train_size[i]` or `Clients.test_size[i]` of them.

    >>> lists = Lists.of([[4, 2], [], [7]])
    >>> lists.flat.tolist(), lists.start.tolist(), lists[0].tolist()
    ([4, 2, 7], [0, 2, 2], [4, 2])
    """

    # The fields are untyped, because JAX also fills them with shapes, shardings and axis numbers.
    flat: Any
    start: Any

    @classmethod
    def of(cls, lists: Any) -> "Lists":
        """Build lists from one vector of row numbers per client, or from a padded matrix [C, N].

        The padding of a matrix stays in the lists.
        """
        # A list of vectors has no `ndim`.
        if getattr(lists, "ndim", 1) == 2:
            clients, width = lists.shape
            return cls.cut(np.asarray(lists).reshape(-1), np.full(clients, width))
        rows = [np.asarray(own, np.int32) for own in lists]
        return cls.cut(np.concatenate(rows), np.array([len(own) for own in rows]))

    @classmethod
    def cut(cls, flat: Int[np.ndarray, "R"], size: Int[np.ndarray, "C"]) -> "Lists":
        """Cut a vector of row numbers into consecutive lists of the given sizes."""
        start = np.cumsum(size, dtype=np.int64) - size
        # JAX has no int64 by default, and indices of 32 bits need half the memory.
        if len(flat) < 2**31:
            start = start.astype(np.int32)
        # JAX cannot index an empty array, so the vector has at least one entry.
        if not len(flat):
            flat = np.zeros(1, np.int32)
        return cls(flat, start)

    def __len__(self) -> int:
        return self.start.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, client: int | np.integer) -> Any:
        """Return the row numbers of one client, followed by its padding if it has any."""
        # A range rejects an index without a client, and counts negative ones from the end.
        index = range(len(self))[client]
        end: Any = len(self.flat)
        if index + 1 < len(self):
            end = self.start[index + 1]
        return self.flat[self.start[index] : end]


class Clients(NamedTuple):
    """One example store, and the numbers of the rows that belong to each client.

    The first `train_size[i]` row numbers in `train[i]` are client i's training examples, and the
    first `test_size[i]` in `test[i]` its test examples. A run also takes a matrix [C, N] of row
    numbers in place of `Lists`, with padding at the end of its lines.
    """

    inputs: Inputs | HostInputs
    """Inputs of all examples. On devices they are `Rows`."""
    labels: Shaped[Array | np.ndarray, "D ..."]
    train: Lists
    train_size: Int[Array | np.ndarray, "C"]
    test: Lists
    test_size: Int[Array | np.ndarray, "C"]

    @property
    def num_clients(self) -> int:
        """The number of clients, which is the length of axis C."""
        return len(self.train)


class StepNoise(NamedTuple):
    """Noise that the engine provides for a client's private local steps (`jaxfl.privacy.DPSGD`)."""

    multiplier: Any
    """Std of the noise on a sum of clipped gradients, divided by the clip bound."""
    key: Any
    """Key of the batches and the noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """An array [D, ...] that is stored with one row of numbers per example, and indexed along D.

    A TPU pads the two innermost axes of an array. Pixels of three colours would take 43 times their
    bytes there.
    """

    flat: Any
    shape_of_one: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, store: Any) -> "Rows":
        """Build the rows of an array [D, ...] that lies on the host or on a device."""
        shape_of_one = store.shape[1:]
        # On the host, this copies no contiguous array, so that a memory map stays on disk.
        return cls(store.reshape(len(store), math.prod(shape_of_one)), shape_of_one)

    def __getitem__(self, index: Int[Array, "..."]) -> Shaped[Array, "..."]:
        return jnp.asarray(self.flat)[index].reshape(*jnp.shape(index), *self.shape_of_one)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """One client's own examples, by position. The first `size` of `padded` positions are real.

    All clients' examples lie in one store, and the client reads its own only through `take`.
    """

    # The fields are untyped, because vectorised clients have a further axis.
    _inputs: Any
    _labels: Any
    _rows: Any
    size: Any
    """Number of the client's examples."""
    id: Any = 0
    """Index of the client, from 0."""
    noise: StepNoise | None = None
    """Noise of private local steps. None if the method has none."""
    round: Any = 0
    """Index of the round, from 0. An evaluation has the index of the last round."""
    _start: Any = 0
    """Position in `_rows` at which the client's own rows begin."""
    _positions: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Number of positions. None if all `_rows` are the client's own."""

    @property
    def padded(self) -> int:
        """The number N of positions with padding, which is at least the client's size."""
        if self._positions is None:
            return len(self._rows)
        return self._positions

    def take(
        self, positions: Int[Array, "..."]
    ) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
        """Return inputs and labels at some positions from 0, and zeros at padding."""
        real = positions < self.size
        # Padding reads the first row: the rows behind the client's own belong to other clients.
        rows = jnp.asarray(self._rows)[jnp.where(real, self._start + positions, 0)]

        def read(store: Rows | Shaped[Array | np.ndarray, "D ..."]) -> Array:
            # `Rows` are no array, and convert what they read by themselves.
            array = store if isinstance(store, Rows) else jnp.asarray(store)
            values = array[rows]
            inner_axes = tuple(range(real.ndim, values.ndim))
            return jnp.where(jnp.expand_dims(real, inner_axes), values, 0)

        return read(self._inputs), read(self._labels)

    def part(self, start: Int[Array, ""] | int, length: int) -> "ClientData":
        """Return the client with only `length` of its positions, from position `start`."""
        # The part may begin or end in padding, which holds none of the examples.
        size = jnp.clip(self.size - start, 0, length)
        return dataclasses.replace(self, _start=self._start + start, _positions=length, size=size)

    def in_order(self, positions: Int[Array, "N"]) -> "ClientData":
        """Return the client with its examples in the order of `positions`.

        The positions of its examples must come before those of padding.
        """
        # Padding may point to any row, because `take` reads zeros there.
        rows = jnp.asarray(self._rows)[jnp.where(positions < self.size, self._start + positions, 0)]
        return dataclasses.replace(self, _rows=rows, _start=0, _positions=None)


class Model(NamedTuple):
    """A network as pure functions, with its parameters named in depth order, and its task.

    - `init(key)` returns the first parameters.
    - `apply(params, prepare(inputs))` returns outputs, and the `task` defines their meaning: logits
      for a classification. Training gives `apply` and `classify` a key as a third argument, for
      layers that draw, such as dropout. Without a key these layers draw nothing.
    - `prepare` normalises and lays out a batch. The local loop calls it once per block of batches,
      outside the loop over steps.
    - `extract` and `classify` split `apply` at the head. They are None if a model cannot be split.
    - `sum_grad_squared` has the values of `apply`, but its backward pass gives each parameter the
      sum over examples of the *squared* per-example gradient (see `jaxfl.local.fisher`). It is None
      if a model has no such rule.
    - `layers` and `head` name the layers in depth order, and those of the head.
    - At most `microbatch` examples go through the network at once in a local step. None takes all
      of a batch, and "auto" takes what suits large feature maps on the devices. Layers that draw,
      such as dropout, draw for each part. Otherwise the number changes only speed, memory and
      rounding.
    - `ghost_norms(params, x, probe)` has the values of `apply`, and its gradient by `probe` [B] is
      the squared norm of each example's gradient (see `jaxfl.privacy.dp_sgd`). Private steps clip
      by these norms, so a model with another `apply` needs other norms, or None.
    - `input_shape` is the shape of an example. None accepts any shape that `prepare` takes.
    - `frozen` holds weights that are not parameters. The model's functions read them by
      `jaxfl.models.frozen.current`.
    - `vocabulary` is the number of rows of the table that whole-number inputs index. None means
      that it is unknown, or that there is no table. A run checks the inputs against it, because JAX
      reads another row for an index outside the table.
    - `recipe` says how a builder made the model (see `jaxfl._support.recipes`), so that
      `jaxfl.load_model` can build it again. None stands for a model that no such builder made.
    """

    name: str
    init: Callable[[Key[Array, ""]], Params]
    prepare: Callable[[Shaped[Array, "B ..."]], Array]
    extract: Callable[[Params, Array], Float[Array, "B ..."]] | None
    classify: Callable[..., Array] | None
    apply: Callable[..., Array]
    sum_grad_squared: Callable[[Params, Array], Array] | None
    layers: tuple[str, ...]
    head: tuple[str, ...]
    microbatch: int | Literal["auto"] | None = None
    ghost_norms: Callable[[Params, Array, Float[Array, "B"]], Array] | None = None
    input_shape: tuple[int, ...] | None = None
    task: Task = classification()
    frozen: Params = ()
    vocabulary: int | None = None
    recipe: Recipe | None = None

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions `init`, `prepare` and `apply`, which decide the model's outputs."""
        return self.init, self.prepare, self.apply

    @property
    def largest_part(self) -> int | None:
        """The most examples in one pass of the network in a local step. None sets no limit."""
        if self.microbatch == "auto":
            return backend().microbatch
        return self.microbatch


class Message(NamedTuple):
    """Message of one client, as `client_update` returns it, without clipping and noise."""

    update: Tree
    """Update before clipping and noise: a change, or weights if `Algorithm.sends` says so."""
    extra: Tree = None
    """The number that a client releases (`PrivacyFilter`), or the support of its update
    (`PrivateMask`). None for other mechanisms."""


class Terms(NamedTuple):
    """Terms of a privacy statement besides the epsilon of the mechanism."""

    delta: float | None = None
    """Failure probability. None stands for min(1e-5, 1 / (10 n)).

    The number n is that of the clients, or of all training examples for the epsilon of an example.
    """
    claim: tuple[float, str] | None = None
    """Epsilon by the paper's own rule for these numbers and this delta, and its reasoning."""
    broken: str | None = None
    """The reason why a published method has no finite epsilon. None if it has one."""


class Sparse(NamedTuple):
    """Coordinates of a client's update that may be nonzero, for the count of sent bytes."""

    values: Callable[[Tree], Number]
    """Function from the shapes of an update to the number of its coordinates that are sent."""
    public: bool
    """Whether the server knows these coordinates, so that no client has to send their places."""


class Algorithm(NamedTuple):
    """A method: pure functions over one client and the server, and one static mechanism.

    - `init(key, num_clients) -> (server, client_states)` makes the first states. Client states have
      a leading axis C, the number of clients.
    - `client_update(key, server, client, data) -> (message, client, info)` reads ONE client.
    - `server_update(server, aggregate) -> server` reads nothing of clients but the aggregate of
      their clipped updates, which is weighted, noised and divided. An `info` is for reports. If the
      mechanism has `denominator="participants"`, a round without participants leaves the server
      unchanged.
    - `personalize(key, server, client, data) -> params` returns the weights with which the client
      is evaluated.

    Args:
        name: Name of the method in reports.
        model: The network that clients train.
        init: Function that makes the first states.
        client_update: Function that trains one client.
        server_update: Function that applies the aggregate.
        personalize: Function that returns the weights for a client's evaluation.
        mechanism: A `jaxfl.privacy.Mechanism`, which clips, adds noise, aggregates and accounts.
        dp_sgd: The `jaxfl.privacy.DPSGD` by which `client_update` trains, so that the engine gives
            its noise and the statement its epsilon. None if `client_update` makes no private steps.
        terms: Terms of the privacy statement, such as its delta and the paper's claim.
        sends: Kind of the update in a message: "update" for a difference, or "weights" for the
            client's weights.
        audit: Canaries that take part. `simulate(audit=...)` sets it.
        sparse: Coordinates of an update that may be nonzero, for the count of sent bytes. None if
            all of them may be.
        reads_sampling: The sampler of which the functions read numbers, such as the expected size
            of a cohort. The mechanism must then draw cohorts by the same sampler. None if they read
            none.
    """

    name: str
    model: Model
    init: Callable[[Key[Array, ""], int], tuple[Tree, Tree]]
    client_update: Callable[
        [Key[Array, ""], Tree, Tree, ClientData], tuple[Message, Tree, dict[str, Array]]
    ]
    server_update: Callable[[Tree, Tree], Tree]
    personalize: Callable[[Key[Array, ""], Tree, Tree, ClientData], Params]
    mechanism: Any
    """A `jaxfl.privacy.Mechanism`."""
    dp_sgd: Any = None
    """A `jaxfl.privacy.DPSGD`: the private local steps of `client_update`. None without such steps.

    The engine provides their noise.
    """
    terms: Terms = Terms()
    """Terms of the privacy statement."""
    sends: Literal["update", "weights"] = "update"
    """The kind of update in a message: "update" for a difference, or "weights" for weights."""
    audit: Any = None
    """The `jaxfl.privacy.Canaries` that take part with the clients, or None without an audit."""
    sparse: Sparse | None = None
    """Coordinates of an update that may be nonzero. None if all of them may be."""
    reads_sampling: Any = None
    """The `jaxfl.privacy.Sampling` of which the functions read numbers. None if they read none."""


class Ledger(NamedTuple):
    """A record of what the engine did in each round. Accountants read nothing else of a run.

    Noise is a standard deviation divided by the clip bound. An axis of length 1 stands for the same
    value everywhere.
    """

    participants: Bool[Any, "T C"]
    """Whether each client takes part in each round."""
    client_noise: Float[Any, "T #C"]
    """Std of the noise that each client adds to its update if it takes part."""
    weights: Float[Any, "T #C"]
    """Factor of each client's update in the sum."""
    server_noise: Float[Any, "T"]
    """Std of the noise that the server added to the sum."""
    noise_multiplier: Float[Any, "T"]
    """Least std of all noise on the sum, also divided by the round's largest weight."""
    example_noise: Float[Any, "#T #C"] = np.zeros((1, 1))
    """Std of the noise that each participant's local steps add to sums of clipped gradients.

    0 stands for no private local steps.
    """
    notes: dict[str, Float[Any, "T"]] = {}  # noqa: RUF012 (never written to)
    """The mechanism's own notes, such as the noise on released numbers."""
