"""The vocabulary on one page.

Letters in shapes: C clients, N examples of a client (padded), M test examples, B batch, K classes,
T rounds, D examples in the store, d parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Integer, Key, Shaped

if TYPE_CHECKING:
    from jaxfl.privacy.mechanism import Mechanism

Params: TypeAlias = Any
"""Nested dict of arrays; the top level names the layers of the model."""

Tree: TypeAlias = Any
"""Any pytree of arrays (client states, server states, infos)."""

Number: TypeAlias = float | Float[Array, ""]
"""A number that a sweep may vary: then it is an argument of the compiled program."""

Inputs: TypeAlias = Integer[Array, "D ..."] | Float[Array, "D ..."]
HostInputs: TypeAlias = Integer[np.ndarray, "D ..."] | Float[np.ndarray, "D ..."]


class Clients(NamedTuple):
    """One example store, and for each client the padded rows that are its own.

    Rows beyond a client's size are padding: they point at row 0 and are masked wherever they are read.
    """

    inputs: Inputs | HostInputs
    labels: Int[Array | np.ndarray, "D"]
    train: Int[Array | np.ndarray, "C N"]
    train_size: Int[Array | np.ndarray, "C"]
    test: Int[Array | np.ndarray, "C M"]
    test_size: Int[Array | np.ndarray, "C"]

    @property
    def number(self) -> int:
        """Number of clients C."""
        return self.train.shape[0]


class StepNoise(NamedTuple):
    """Noise of one client's private local steps (see `jaxfl.privacy.mechanism.PerExample`), given by the engine."""

    multiplier: Any
    """Std on the sum of clipped gradients over their clip bound; the ledger has this number."""
    key: Any
    """Of the batches and of the noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """What one client sees: its own examples, by position; the first `size` of `padded` positions are real.

    The examples of all clients lie in one store, which a client reads through `take` alone.
    """

    # Without shapes: of vectorised clients, all have a further axis.
    _inputs: Any
    _labels: Any
    _rows: Any
    size: Any
    noise: StepNoise | None = None

    @property
    def padded(self) -> int:
        """Number of positions N, real ones and padding."""
        return len(self._rows)

    def take(self, positions: Int[Array, "..."]) -> tuple[Shaped[Array, "..."], Int[Array, "..."]]:
        """Inputs and labels at some positions; zeros at those that are padding."""
        rows, real = jnp.asarray(self._rows)[positions], positions < self.size

        def read(store: Shaped[Array | np.ndarray, "D ..."]) -> Array:
            found = jnp.asarray(store)[rows]
            return jnp.where(jnp.expand_dims(real, tuple(range(real.ndim, found.ndim))), found, 0)

        return read(self._inputs), read(self._labels)

    def part(self, start: Int[Array, ""] | int, length: int) -> "ClientData":
        """The client with `length` of its positions, from the one of number `start`."""
        rows = jax.lax.dynamic_slice_in_dim(jnp.asarray(self._rows), start, length)
        return dataclasses.replace(self, _rows=rows, size=jnp.clip(self.size - start, 0, length))


class Model(NamedTuple):
    """A classifier as pure functions, with its parameters named in depth order.

    `apply(params, prepare(inputs))` are logits. `prepare` normalises and lays out a batch; the local
    loop calls it once per block of batches, outside the loop over steps. `squares` has the values of
    `apply`, but its backward pass gives each parameter the sum over examples of the *squared*
    per-example gradient (see `jaxfl.local.fisher`); None where a model has no such rule. `extract` and
    `classify` split `apply` at the head; None where a model cannot be split. `microbatch` examples go through
    the network at once in a local step (None: the whole batch); only speed and memory depend on it.
    `norms(params, x, probe)` has the values of `apply` too, and its gradient by `probe` [B] is the squared norm of each
    example's gradient (see `jaxfl.local.examples`): private steps clip by it, so another `apply` needs other norms, or
    None. `input_shape` is that of an example (None: any that `prepare` takes).
    """

    name: str
    init: Callable[[Key[Array, ""]], Params]
    prepare: Callable[[Shaped[Array, "B ..."]], Array]
    extract: Callable[[Params, Array], Float[Array, "B F"]] | None
    classify: Callable[[Params, Float[Array, "B F"]], Float[Array, "B K"]] | None
    apply: Callable[[Params, Array], Float[Array, "B K"]]
    squares: Callable[[Params, Array], Float[Array, "B K"]] | None
    layers: tuple[str, ...]
    head: tuple[str, ...]
    microbatch: int | None = None
    norms: Callable[[Params, Array, Float[Array, "B"]], Float[Array, "B K"]] | None = None
    input_shape: tuple[int, ...] | None = None


class Message(NamedTuple):
    """The raw update of one client: not clipped, not noised.

    `mask` is a private support that cuts the client's noise too (None: noise everywhere). It voids every epsilon:
    only a `Mechanism` that says so (`broken`) may come with it. `release` is a number that all will know, as raw as the
    update (see `jaxfl.privacy.mechanism.Release`).
    """

    update: Tree
    mask: Tree = None
    release: Float[Array, ""] | None = None


class Account(NamedTuple):
    """What everyone knows of each client, where noise or participation follows from it.

    A client state under such a mechanism has a field `account`, which only the engine writes.
    """

    released: Float[Any, "*C"]
    """The number that it released last; 0: none yet."""
    spent: Float[Any, "*C"]
    """Sum of the inverse squares of the multipliers of all that it sent."""


class Algorithm(NamedTuple):
    """A method: pure functions over one client and the server, and one static mechanism.

    - `init(key, number) -> (server, client_states)`; client states have a leading axis C, the number of clients.
    - `client_update(key, server, client, data) -> (message, client, info)` sees ONE client.
    - `server_update(server, aggregate) -> server`; the aggregate is clipped, weighted, noised and divided already, and
      all that the server gets: `info` is for reports. Where the denominator is the realised one, a round without
      participants leaves the server as it is.
    - `personalize(key, server, client, data) -> params`: the weights that client is evaluated with.
    """

    name: str
    model: Model
    init: Callable[[Key[Array, ""], int], tuple[Tree, Tree]]
    client_update: Callable[[Key[Array, ""], Tree, Tree, ClientData], tuple[Message, Tree, dict[str, Array]]]
    server_update: Callable[[Tree, Tree], Tree]
    personalize: Callable[[Key[Array, ""], Tree, Tree, ClientData], Params]
    mechanism: "Mechanism"


class Ledger(NamedTuple):
    """What the engine did, round by round; all an accountant may read.

    Noise is a standard deviation divided by the clip bound. Axes of length 1 mean "the same for all".
    """

    participants: Bool[Any, "T C"]
    client_noise: Float[Any, "T #C"]
    weights: Float[Any, "T #C"]
    server_noise: Float[Any, "T"]
    noise_multiplier: Float[Any, "T"]
    release_noise: Float[Any, "#T"] = np.full(1, np.inf)
    """Std of the noise on each participant's released number over its range; infinity: none was released."""
    example_noise: Float[Any, "#T #C"] = np.zeros((1, 1))
    """Std of the noise that each participant's local steps put on their sums of clipped gradients; 0: none."""
