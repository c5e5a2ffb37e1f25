"""Cost of exact top-k masks, compared with other ways and with a client's update.

python -m benchmarks.top_k
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array, lax

from benchmarks.common import OUT, bars, busy_clock, finish, in_turn, medians
from jaxfl import LocalSGD
from jaxfl.algorithms import dp_pfeddsu
from jaxfl.data import from_arrays, make_clients
from jaxfl.local.masks import top_k_mask
from jaxfl.models import build
from jaxfl.privacy import Full
from jaxfl.types import ClientData


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    density: float = 0.05
    batch_size: int = 100
    """Batch size of the local steps, as in the DP-pFedDSU paper."""
    repeats: int = 9
    out: pathlib.Path = OUT


def _by_top_k(values: Array, count: int) -> Array:
    kept = lax.top_k(jnp.abs(values), count)[1]
    return jnp.zeros(values.shape, bool).at[kept].set(True)


def _by_sorting(values: Array, count: int) -> Array:
    # Ties select too many values.
    return jnp.abs(values) >= jnp.sort(jnp.abs(values))[-count]


def _by_bits(values: Array, count: int) -> Array:
    bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)

    def raise_bit(i: Array, threshold: Array) -> Array:
        higher = threshold | (1 << (30 - i))
        return jnp.where(jnp.sum((bits >= higher).astype(jnp.float32)) >= count, higher, threshold)

    # Ties select too many values.
    return bits >= lax.fori_loop(0, 31, raise_bit, jnp.int32(0))


WAYS: dict[str, Callable[[Array, int], Array]] = {
    "top_k_mask": top_k_mask,
    "31 passes, bit by bit": _by_bits,
    "lax.top_k": _by_top_k,
    "sort": _by_sorting,
}
"""Functions from values and a count to a mask of the largest absolute values, by name."""


def main(config: Config) -> None:
    """Print the microseconds of a mask in each way, and what masks add to a client's update.

    The reference is an update whose masks come from the server's model, once for all local steps.
    """
    rows = []
    for size in (48_000, 36_864, 10_080):
        count = int(config.density * size)
        values = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)
        masks = {name: _repeated(way, values, count) for name, way in WAYS.items()}
        seconds = medians(in_turn(masks, config.repeats, busy_clock()))
        rows += [
            {"weights": size, "way": name, "microseconds": 1e6 * s / 20}
            for name, s in seconds.items()
        ]
    shares = {}
    for name in ("lenet", "resnet20"):
        steps = {source: _client(name, source, config) for source in ("broadcast", "local_step")}
        seconds = medians(in_turn(steps, config.repeats, busy_clock()))
        shares[name] = seconds["local_step"] / seconds["broadcast"] - 1
    headline = f"masks of every local step, batch {config.batch_size}, cost "
    headline += ", ".join(f"{100 * share:.1f}% ({name})" for name, share in shares.items())
    times = {f"{row['weights']:,}: {row['way']}": row["microseconds"] for row in rows}
    figure = bars(times, "microseconds", f"masks of the largest {100 * config.density:g}%")
    figure.axes[0].set(xscale="log", xlim=(1, 3 * max(times.values())))
    finish(config, "top_k", headline, rows, figure, {"share_of_local_step": shares})


def _repeated(way: Callable[[Array, int], Array], values: Array, count: int) -> Callable[[], Any]:
    """Return a call of 20 searches, each in values that depend on the search before."""

    def body(_: Array, v: Array) -> Array:
        return jnp.where(way(v, count), v, v * 0.999)

    program = jax.jit(lambda v: lax.fori_loop(0, 20, body, v))
    return lambda: program(values)


def _client(name: str, source: Any, config: Config) -> Callable[[], Any]:
    """Return a call of one client's update by DP-pFedDSU: steps of the extractor, and of the head.

    Args:
        name: Name of the model.
        source: `mask_source` of `dp_pfeddsu`.
        config: Options of the benchmark.
    """
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (4 * config.batch_size, 32, 32, 3), np.uint8)
    data = from_arrays(
        inputs, rng.integers(0, 10, len(inputs)), inputs[:0], np.zeros(0, np.int64), classes=10
    )
    model = build(name, (32, 32, 3), 10)
    algorithm = dp_pfeddsu(
        model,
        sampling=Full(),
        noise_multiplier=1.0,
        mask_source=source,
        density=config.density,
        local=LocalSGD(
            optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9)),
            config.batch_size,
            2,
        ),
        head=LocalSGD(optax.sgd(0.01), config.batch_size),
    )
    clients = jax.tree.map(jnp.asarray, make_clients(data, [np.arange(len(inputs))], [[]]))
    server, state = algorithm.init(jax.random.key(0), clients.num_clients)
    rows = ClientData(clients.inputs, clients.labels, clients.train[0], clients.train_size[0])
    first = jax.tree.map(lambda leaf: leaf[0], state)
    program = jax.jit(
        lambda key, server, state: algorithm.client_update(key, server, state, rows)[0].update
    )
    return lambda: program(jax.random.key(1), server, first)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
