"""The vocabulary on one page.

Letters in shapes: C clients, N positions for a client's examples (padded), M test examples, B batch, K classes,
T rounds, D examples in the store, R rows of all clients, d parameters.
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

from jaxfl.backend import backend
from jaxfl.tasks import Task, classification

Params: TypeAlias = Any
"""Nested dict of arrays; the top level names the layers of the model."""

Tree: TypeAlias = Any
"""Any pytree of arrays (client states, server states, infos)."""

Number: TypeAlias = float | Float[Array, ""]
"""A number that a sweep may vary, as an argument of the compiled program."""

Inputs: TypeAlias = Integer[Array, "D ..."] | Float[Array, "D ..."]
HostInputs: TypeAlias = Integer[np.ndarray, "D ..."] | Float[np.ndarray, "D ..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """Row numbers of all clients in one vector, so that a client costs as much memory as it has rows.

    Client i's row numbers begin at `flat[start[i]]`. The clients follow one another in the vector. How many
    row numbers a client uses is its entry in `Clients.train_size` or `Clients.test_size`.

    >>> lists = Lists.of([[4, 2], [], [7]])
    >>> lists.flat.tolist(), lists.start.tolist(), lists[0].tolist()
    ([4, 2, 7], [0, 2, 2], [4, 2])
    """

    # Without shapes: they may be described, or sharded, and a prefix of a tree may stand for them.
    flat: Any
    start: Any

    @classmethod
    def of(cls, lists: Any) -> "Lists":
        """Return the lists of some vectors of row numbers, or of a matrix [C, N] with padding, without a copy."""
        if getattr(lists, "ndim", 1) == 2:
            return cls.cut(np.asarray(lists).reshape(-1), np.full(*lists.shape))
        rows = [np.asarray(own, np.int32) for own in lists]
        return cls.cut(np.concatenate(rows), np.array([len(own) for own in rows]))

    @classmethod
    def cut(cls, flat: Int[np.ndarray, "R"], size: Int[np.ndarray, "C"]) -> "Lists":
        """Return the lists of these sizes that follow one another in a vector."""
        start = np.cumsum(size, dtype=np.int64) - size
        small = len(flat) < 2**31
        # At least one entry, since nothing can be read from an empty array.
        return cls(
            flat if len(flat) else np.zeros(1, np.int32), start.astype(np.int32) if small else start
        )

    def __len__(self) -> int:
        return self.start.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, client: int | np.integer) -> Any:
        """Return the row numbers of one client, and behind them padding where there is any."""
        number = range(len(self))[client]
        end = self.start[number + 1] if number + 1 < len(self) else len(self.flat)
        return self.flat[self.start[number] : end]


class Clients(NamedTuple):
    """One example store, and the numbers of the rows that belong to each client.

    `train[i]` are client i's row numbers, of which the first `train_size[i]` count, and likewise for `test`. A matrix
    [C, N] of row numbers with padding at the end of its lines may stand for the `Lists`.
    """

    inputs: Inputs | HostInputs
    """On devices: `Rows`."""
    labels: Shaped[Array | np.ndarray, "D ..."]
    train: Lists
    train_size: Int[Array | np.ndarray, "C"]
    test: Lists
    test_size: Int[Array | np.ndarray, "C"]

    @property
    def number(self) -> int:
        """Number of clients C."""
        return len(self.train)


class StepNoise(NamedTuple):
    """Noise of one client's private local steps (see `jaxfl.privacy.DPSGD`), given by the engine."""

    multiplier: Any
    """Std on the sum of clipped gradients over their clip bound, as in the ledger."""
    key: Any
    """For the batches and the noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A store of arrays as rows of numbers, indexed like an array.

    The two innermost axes of an array are padded on a TPU: pixels of three colours would take 43 times their bytes.
    """

    flat: Any
    shape_of_one: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, store: Any) -> "Rows":
        """An array [D, ...] of host or device."""
        return cls(store.reshape(len(store), math.prod(store.shape[1:])), store.shape[1:])

    def __getitem__(self, index: Int[Array, "..."]) -> Shaped[Array, "..."]:
        return jnp.asarray(self.flat)[index].reshape(*jnp.shape(index), *self.shape_of_one)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """What one client sees: its own examples, by position; the first `size` of `padded` positions are real.

    All clients' examples lie in one store, which a client reads only through `take`.
    """

    # Without shapes: vectorised clients have a further axis.
    _inputs: Any
    _labels: Any
    _rows: Any
    size: Any
    id: Any = 0
    """The client's number, from 0."""
    noise: StepNoise | None = None
    round: Any = 0
    """The round's number, from 0; the last round's where a client is evaluated."""
    _start: Any = 0
    """Where the client's own rows begin among `_rows`."""
    _positions: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Number of positions, where `_rows` are more than the client's own."""

    @property
    def padded(self) -> int:
        """Number of positions N, including padding: at least the client's size, and about as many as it needs."""
        return len(self._rows) if self._positions is None else self._positions

    def take(
        self, positions: Int[Array, "..."]
    ) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
        """Inputs and labels at some positions; zeros at padding."""
        real = positions < self.size
        # Behind the client's own rows are those of others, or none.
        rows = jnp.asarray(self._rows)[jnp.where(real, self._start + positions, 0)]

        def read(store: Rows | Shaped[Array | np.ndarray, "D ..."]) -> Array:
            values = (store if isinstance(store, Rows) else jnp.asarray(store))[rows]
            return jnp.where(jnp.expand_dims(real, tuple(range(real.ndim, values.ndim))), values, 0)

        return read(self._inputs), read(self._labels)

    def part(self, start: Int[Array, ""] | int, length: int) -> "ClientData":
        """The client with `length` of its positions, from position `start`."""
        size = jnp.clip(self.size - start, 0, length)
        return dataclasses.replace(self, _start=self._start + start, _positions=length, size=size)

    def in_order(self, positions: Int[Array, "N"]) -> "ClientData":
        """Return the client with its positions in another order; real ones still come first."""
        rows = jnp.asarray(self._rows)[jnp.where(positions < self.size, self._start + positions, 0)]
        return dataclasses.replace(self, _rows=rows, _start=0, _positions=None)


class Model(NamedTuple):
    """A network as pure functions, with its parameters named in depth order, and its task.

    `apply(params, prepare(inputs))` are outputs, logits for a classification; what they mean is the `task`'s. Training
    gives `apply` and `classify` a key as a third argument, for layers that draw, such as dropout; without one they draw
    nothing. `prepare` normalises and lays out a batch; the local loop calls it once per block of batches, outside
    the loop over steps. `sum_grad_squared` has the values of
    `apply`, but its backward pass gives each parameter the sum over examples of the *squared*
    per-example gradient (see `jaxfl.local.fisher`); None if a model has no such rule. `extract` and
    `classify` split `apply` at the head; None if a model cannot be split. `microbatch` examples go through
    the network at once in a local step (None: the whole batch; "auto": what suits the devices, for large maps); only
    speed and memory depend on it. `ghost_norms(params, x, probe)` also has the values of `apply`, and its gradient by
    `probe` [B] is the squared norm of each example's gradient (see `jaxfl.privacy.dp_sgd`): private steps clip by it,
    so another `apply` needs other norms, or None. `input_shape` is that of an example (None: any that `prepare` takes).
    `frozen` are weights that are no parameters, and that its functions read by `jaxfl.models.frozen.current`.
    `vocabulary` is the number of rows of the table that whole-number inputs index (None: not known, or no table); a run
    checks the inputs against it, because JAX reads another row for an index that lies outside.
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

    @property
    def largest_part(self) -> int | None:
        """`microbatch`, for the devices of a run."""
        return backend().microbatch if self.microbatch == "auto" else self.microbatch


class Message(NamedTuple):
    """The raw update of one client, not clipped or noised, and what else its mechanism reads (None: nothing).

    A `PrivacyFilter` reads a number that the client releases, a `PrivateMask` the support of the update.
    """

    update: Tree
    extra: Tree = None


class Terms(NamedTuple):
    """What a privacy statement says besides the epsilon of the mechanism."""

    delta: float | None = None
    """Failure probability; None: min(1e-5, 1 / (10 C)) of C clients."""
    claim: tuple[float, str] | None = None
    """The epsilon that the paper's own rule would state for these numbers and this delta, and its reasoning."""
    broken: str | None = None
    """Why a published method has no finite epsilon."""


class Algorithm(NamedTuple):
    """A method: pure functions over one client and the server, and one static mechanism.

    - `init(key, number) -> (server, client_states)`; client states have a leading axis C, the number of clients.
    - `client_update(key, server, client, data) -> (message, client, info)` sees ONE client.
    - `server_update(server, aggregate) -> server`; the aggregate is already clipped, weighted, noised and divided,
      and all that the server gets: `info` is for reports. If the denominator is the realised one, a round without
      participants leaves the server unchanged.
    - `personalize(key, server, client, data) -> params`: the weights with which the client is evaluated.

    `dp_sgd` names the private local steps of `client_update` (None: none), whose noise the engine provides; `terms`
    are for the privacy statement; `sends` says what an update is in its message: a difference, or the weights.
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
    """A `jaxfl.privacy.DPSGD`."""
    terms: Terms = Terms()
    sends: Literal["update", "weights"] = "update"


class Ledger(NamedTuple):
    """What the engine did, round by round; all an accountant may read.

    Noise is a standard deviation divided by the clip bound. Axes of length 1 mean "the same for all".
    """

    participants: Bool[Any, "T C"]
    client_noise: Float[Any, "T #C"]
    weights: Float[Any, "T #C"]
    server_noise: Float[Any, "T"]
    noise_multiplier: Float[Any, "T"]
    example_noise: Float[Any, "#T #C"] = np.zeros((1, 1))
    """Std of the noise that each participant's local steps add to their sums of clipped gradients; 0: none."""
    notes: dict[str, Float[Any, "T"]] = {}  # noqa: RUF012 (never written to)
    """The mechanism's own notes, such as the noise on released numbers."""
