"""Workloads of the benchmarks, with their data, their programs, and the FLOPs of their models."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.pfl_cifar10.network import Pfl
from jaxfl import LocalSGD
from jaxfl._support.backend import Form, compiler_options, of_mesh
from jaxfl.algorithms import dp_fedavg, feddpa
from jaxfl.data import from_arrays, make_clients
from jaxfl.engine.chunk import Build, compile_chunk, fastest
from jaxfl.engine.mesh import Population
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.models import feddpa_cnn, from_flax, lenet, mlp, resnet20
from jaxfl.privacy import Full
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Clients, Model
from tools.footprint.ahead import products

Name = Literal["lenet", "mlp", "feddpa_cnn", "resnet20", "feddpa", "pfl_cnn", "femnist_cnn"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A kind of round, in which every client takes `steps` SGD steps.

    With `feddpa`, a client instead takes two epochs of Adam in each of FedDPA's two stages. `steps`
    states how many steps these are together.
    """

    model: str
    input_shape: tuple[int, int, int]
    """Height, width and channels of an image."""
    clients: int
    examples: int
    """Number of training examples of each client."""
    batch_size: int
    steps: int
    feddpa: bool = False


_FEDDPA_CNN = Workload("feddpa_cnn", (32, 32, 3), clients=10, examples=128, batch_size=16, steps=32)

WORKLOADS: dict[Name, Workload] = {
    "lenet": Workload("lenet", (32, 32, 3), clients=50, examples=320, batch_size=32, steps=10),
    "mlp": Workload("mlp", (28, 28, 1), clients=200, examples=320, batch_size=32, steps=10),
    "feddpa_cnn": _FEDDPA_CNN,
    "resnet20": Workload("resnet20", (32, 32, 3), clients=4, examples=96, batch_size=32, steps=3),
    "feddpa": dataclasses.replace(_FEDDPA_CNN, feddpa=True),
    "pfl_cnn": Workload("pfl_cnn", (32, 32, 3), clients=50, examples=50, batch_size=10, steps=5),
    # The sizes of FLUTE's benchmark: one epoch in batches of 20, for writers of about 200 images.
    "femnist_cnn": Workload(
        "femnist_cnn", (28, 28, 1), clients=50, examples=200, batch_size=20, steps=10
    ),
}
"""Workloads by name.

`pfl_cnn` and `femnist_cnn` are Flax modules as users write them. The others have networks of the
library.
"""


def examples_of(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Draw random images `[C, N, H, W, channels]` as bytes, and labels `[C, N]`.

    Speed does not depend on their content.
    """
    rng = np.random.default_rng(0)
    shape = (work.clients, work.examples)
    return rng.integers(0, 256, (*shape, *work.input_shape), np.uint8), rng.integers(
        0, 10, shape
    ).astype(np.int32)


def clients_of(inputs: np.ndarray, labels: np.ndarray, tests: int = 0) -> Clients:
    """Return clients with a row of examples each. All are tested on the first `tests` examples."""
    train = inputs.reshape(-1, *inputs.shape[2:]), labels.reshape(-1)
    lists = list(np.arange(labels.size).reshape(labels.shape))
    test = train[0][:tests], train[1][:tests]
    return make_clients(from_arrays(*train, *test, classes=10), lists, [range(tests)] * len(lists))


def model_of(work: Workload, form: Form | None = None) -> Model:
    """Build the workload's network. A `form` of None takes the devices' form of convolutions."""
    builders: dict[str, Callable[[], Model]] = {
        "lenet": functools.partial(lenet, work.input_shape, form=form),
        "mlp": functools.partial(mlp, work.input_shape),
        "feddpa_cnn": functools.partial(feddpa_cnn, form=form),
        "resnet20": functools.partial(resnet20, work.input_shape, form=form),
        "pfl_cnn": functools.partial(from_flax, Pfl(), work.input_shape, name="pfl_cnn", form=form),
        "femnist_cnn": functools.partial(
            from_flax, Pfl(62), work.input_shape, name="femnist_cnn", form=form
        ),
    }
    return builders[work.model]()


def algorithm_of(
    work: Workload, sampling: Sampling = Full(), model: Model | None = None
) -> Algorithm:
    """Build DP-FedAvg with SGD, or FedDPA, as the workload says.

    Args:
        work: The workload.
        sampling: Sampler of cohorts. The default takes all clients.
        model: The network. None takes the workload's.
    """
    model = model_of(work) if model is None else model
    private: dict[str, Any] = {"noise_multiplier": 1.0, "sampling": sampling}
    if work.feddpa:
        return feddpa(
            model, clip=0.5, local=LocalSGD(optax.adam(1e-3), work.batch_size, 2), **private
        )
    local = LocalSGD(optax.sgd(0.01), work.batch_size, steps=work.steps)
    return dp_fedavg(model, clip=1.0, local=local, **private)


def usual_chunk(algorithm: Algorithm, population: Population) -> int:
    """Return the default number of clients vectorised at a time, as in `simulate`."""
    mesh = population.mesh
    chunk = of_mesh(mesh).chunk
    if chunk != "auto":
        return chunk
    key = jax.random.key(0)
    numbers = np.int32(0), np.int32(1)
    arguments = (key, *numbers, *initialize(key, key, algorithm, population))
    most = population.num_slots // mesh.size
    return fastest(rounds_of(algorithm, population), most, arguments, mesh, ("benchmark",)).chunk


class Round(NamedTuple):
    """A compiled round."""

    run: Callable[[], None]
    """Function that runs the next round, from the states of the round before, and waits for it."""
    compile_s: float
    """Seconds to trace and compile the round."""
    temporary_mb: float
    """Temporary memory on each device, in MB."""
    text: Callable[[], str]
    """Function that returns the compiled program's text."""


def compile_round(algorithm: Algorithm, population: Population, chunk: int) -> Round:
    """Return a compiled round. `compile_s` does not include the initial states."""
    key = jax.random.key(0)
    state = list(initialize(key, key, algorithm, population))
    start = time.perf_counter()
    program = compile_chunk(rounds_of(algorithm, population), chunk, (key, 0, 1, *state))
    seconds = time.perf_counter() - start
    done = 0

    def run() -> None:
        nonlocal done
        state[:] = program.step(key, done, 1, *state)[:2]
        jax.block_until_ready(state)
        done += 1

    compiled: Any = program.step
    return Round(run, seconds, program.memory * chunk / 1e6, compiled.func.as_text)


def rounds_of(algorithm: Algorithm, population: Population) -> Build:
    """Return a function from a chunk to the program of one round."""
    return lambda chunk: compile_rounds(algorithm, population, chunk=chunk, segment=1)


def round_flops(work: Workload) -> float:
    """Return the floating-point operations of a round's matrix products and convolutions.

    A multiply-add counts as two operations. The operations are the network's, not those of the
    formulation that runs. The forward pass is counted in the plain form
    (`lax.conv_general_dilated`, `jnp.dot`), where zeros of the padding count. For each product a
    backward pass has two of the same size, the gradients by its weights and by its inputs. The
    first layer needs no gradient by its inputs. A FedDPA round has both stages' steps, and a
    forward and a backward pass of each example for the Fisher diagonal. Elementwise work, pooling
    and the server's work are left out.
    """
    forward = forward_flops(work)
    example = 3 * sum(forward) - forward[0]
    return (
        work.clients
        * example
        * (work.batch_size * work.steps + (work.examples if work.feddpa else 0))
    )


def forward_flops(work: Workload) -> list[float]:
    """Return the floating-point operations of each product in one example's forward pass."""
    model = model_of(work, "lax")
    arguments = (
        jax.eval_shape(model.init, jax.random.key(0)),
        jnp.zeros((1, *work.input_shape), jnp.uint8),
    )
    forward = jax.make_jaxpr(lambda params, inputs: model.apply(params, model.prepare(inputs)))
    return list(products(forward(*arguments).jaxpr))


def matrix_product(population: Population) -> tuple[Callable[[], jax.Array], float]:
    """Return a call of a large float32 product on each device, and its floating-point operations.

    The operations are those of all devices together. Their rate stands for the machine's peak. An
    accelerator repeats the product, which hides a call's own cost.
    """
    mesh = population.mesh
    size, times = (2048, 1) if mesh.devices.flat[0].platform == "cpu" else (8192, 10)

    def repeated(left: jax.Array, right: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: jnp.dot(x, right) / size, left)

    sharded = jax.shard_map(
        repeated, mesh=mesh, in_specs=(P("clients"), P()), out_specs=P("clients")
    )
    product = jax.jit(sharded, compiler_options=compiler_options(mesh))
    right = np.random.default_rng(0).random((size, size), np.float32)
    left = jax.device_put(np.tile(right, (mesh.size, 1)), NamedSharding(mesh, P("clients")))
    right = jax.device_put(right, NamedSharding(mesh, P()))
    return lambda: product(left, right), 2.0 * times * mesh.size * size**3
