"""All measurements of one accelerator that fit into a few minutes.

python -m benchmarks.accelerator --minutes 8

Each part has a process and a time limit of its own. The most useful parts start first, until the
time is over. Each result is printed and written at once, so a part that fails or takes too long
costs no other part. Shares compare with the rates that the device itself reaches, in a large matrix
product at JAX's default precision and in a copy of a large array. Bytes are those of the compiled
program's kernels (`tools.footprint.hlo`). `--tiny` has sizes for a trial on a CPU.
"""

import dataclasses
import importlib.util
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks.common import OUT, apart, cores, in_turn, machine, medians
from benchmarks.population import make
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    Workload,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    matrix_product,
    model_of,
    round_flops,
    rounds_of,
    usual_chunk,
)
from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import centaur, dp_fedavg, dp_pfeddsu, fedavg, feddpa
from jaxfl.backend import Form
from jaxfl.engine.chunk import fitting
from jaxfl.engine.evaluate import compile_evaluation
from jaxfl.engine.mesh import Population, place
from jaxfl.engine.program import initialize
from jaxfl.files import write_json
from jaxfl.local.train import blocks_of
from jaxfl.models import digits_cnn, mlp, with_precision
from jaxfl.models.layers import PLAIN
from jaxfl.privacy import FixedSize, Mechanism, Poisson
from jaxfl.types import Algorithm, Model
from tools.footprint.hlo import step_cost

_TINY = 4
"""Greatest number of clients of a trial, which runs one step per client."""

METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "dp_fedavg": dp_fedavg,
    "feddpa": feddpa,
    "dp_pfeddsu": dp_pfeddsu,
    "centaur": centaur,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the measurements."""

    minutes: float = 8.0
    """Time after which no part continues."""
    tiny: bool = False
    out: pathlib.Path = OUT


class Part(NamedTuple):
    """A function of this module, with its arguments and its time limit."""

    function: Callable[..., dict[str, Any]]
    arguments: tuple
    seconds: float = 90.0


def main(config: Config) -> None:
    """Run the parts, and write each result."""
    begun, results = time.monotonic(), {}
    config.out.mkdir(parents=True, exist_ok=True)
    whole = parts(config.tiny, str(config.out))
    # Timings of a tiny run do not matter, so that every core can have a part.
    pool = ThreadPoolExecutor(cores() if config.tiny else 1)
    running = {pool.submit(_result, part, begun, config): name for name, part in whole.items()}
    try:
        for future in as_completed(running):
            results[running[future]] = found = future.result()
            kept = {name: results[name] for name in whole if name in results}
            write_json(config.out / "accelerator.json", {"tiny": config.tiny, "parts": kept})
            told = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in found.items()
            )
            print(f"{running[future]}: {told}", flush=True)
    finally:
        # No other part starts after Ctrl-C.
        pool.shutdown(cancel_futures=True)


def _result(part: Part, begun: float, config: Config) -> dict[str, Any]:
    """Return the result of a part, or the reason why it has none, and its duration."""
    start, environment = time.monotonic(), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    left = begun + 60 * config.minutes - start
    if left <= 0:
        return {"missing": "the time was over"}
    if config.tiny:
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    try:
        found = apart(
            part.function, *part.arguments, timeout=min(part.seconds, left), **environment
        )
    except Exception as error:
        # Whatever ends a part, the others continue.
        found = {"failed": str(error)[-2000:]}
    return found | {"part_s": round(time.monotonic() - start, 1)}


def parts(tiny: bool, out: str) -> dict[str, Part]:
    """Return all parts, the most useful first."""
    sizes, clients = ((2, _TINY), 2) if tiny else ((128, 512, 2048, 8192), 2048)
    form: Form = "winograd" if tiny else "grouped"
    # A CPU would interpret the Pallas kernels.
    forms = ("grouped", "packed", "lax") + (() if tiny else ("pallas",))

    def of_forms(chunk: int) -> dict[str, Part]:
        return {
            f"lenet, {each}, chunk {chunk}": Part(
                speed, ("lenet", each, chunk, None, max(clients, chunk))
            )
            for each in forms
        }

    found = {"device": Part(device, ()), "evaluation": Part(evaluation, (clients,))} | of_forms(
        sizes[1]
    )
    found["torch: lenet"] = Part(torch_speed, ("lenet", clients if tiny else 256, sizes[0]), 120)
    found["lenet, 10,000 clients x 10 steps"] = Part(
        ten_steps, (8 if tiny else 10_000, sizes[1]), 180
    )
    found["pfl-research's CIFAR-10"] = Part(
        pfl_cifar10, (2, clients) if tiny else (1500, 1000), 180
    )
    others: list[tuple[Name, Form]] = [
        (name, form) for name in ("mlp", "resnet20", "feddpa", "pfl_cnn")
    ]
    for name, its in others if tiny else [*others, ("resnet20", "pallas")]:
        most = clients if tiny else 256 if name == "resnet20" else 1024
        found[f"{name}, {its}, chunk {sizes[0]}"] = Part(
            speed, (name, its, sizes[0], None, most), 180
        )
    # The default precision is TF32.
    for precision in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        part = Part(speed, ("lenet", form, sizes[1], precision, max(clients, sizes[1])))
        found[f"lenet, {form}, chunk {sizes[1]}, {precision}"] = part
    found["correct"], found["kernels"] = Part(correct, (), 150), Part(kernels, ())
    found["chunk auto"] = Part(auto, (clients,), 240)
    found |= {} if tiny else of_forms(sizes[0])
    for chunk in sizes[2:]:
        found[f"lenet, {form}, chunk {chunk}"] = Part(
            speed, ("lenet", form, chunk, None, chunk), 120
        )
    found["population"] = Part(population, (1000 if tiny else 1_000_000,), 150)
    found["out of memory"] = Part(out_of_memory, (clients if tiny else 32_768,), 240)
    found["torch: mlp"] = Part(torch_speed, ("mlp", clients if tiny else 256, sizes[0]), 120)
    return found | {"profile": Part(profile, (clients, sizes[0], out))}


def device() -> dict[str, Any]:
    """Describe the device, and measure the rates of a matrix product and of a copy."""
    here = place(clients_of(*examples_of(_lenet(1))), jax.devices()[:1])
    return (
        machine()
        | {"memory": (jax.devices()[0].memory_stats() or {}).get("bytes_limit")}
        | _peaks(here)
    )


def _peaks(population: Population) -> dict[str, float]:
    product, flops = matrix_product(population)
    size = 2**24 if jax.default_backend() == "cpu" else 2**28
    source, copy = jnp.ones(size, jnp.float32), jax.jit(lambda x: x + 1)
    seconds = medians(in_turn({"product": product, "copy": lambda: copy(source)}, 5))
    return {
        "tflop_per_s": flops / seconds["product"] / 1e12,
        "gb_per_s": 8 * size / seconds["copy"] / 1e9,
    }


def evaluation(clients: int) -> dict[str, Any]:
    """Run one evaluation, with up to 128 clients at a time."""
    work = _lenet(clients)
    where, algorithm, key = (
        place(clients_of(*examples_of(work), tests=32)),
        algorithm_of(work),
        jax.random.key(0),
    )
    center, states = initialize(key, key, algorithm, where)
    score = compile_evaluation(algorithm, where, chunk=min(128, clients))
    scores = jax.device_get(score(key, center.server, states))
    return {"finite": bool(np.isfinite(scores["loss"]).all()), "clients": len(scores["loss"])}


def correct() -> dict[str, Any]:
    """Return the largest relative difference to a CPU's shared model after 2 rounds.

    Both run at full precision. The difference is divided by the model's largest number.
    """
    work = dataclasses.replace(WORKLOADS["mlp"], clients=8, examples=32)
    clients, model = clients_of(*examples_of(work), tests=8), mlp(work.input_shape, hidden=(32,))
    found = {}
    for name, method in METHODS.items():
        options: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.05), 8)}
        if method is not fedavg:
            options |= {"clip": 1.0, "noise_multiplier": 0.0, "sampling": Poisson(0.7)}
        results = []
        with jax.default_matmul_precision("float32"):
            for device, chunk in ((jax.devices("cpu")[0], 1), (jax.devices()[0], 4)):
                here: dict[str, Any] = {"devices": [device], "chunk": chunk, "progress": False}
                run = simulate(0, method(model, **options), clients, rounds=2, **here)
                results.append(
                    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.server.params)])
                )
        found[name] = float(np.abs(results[1] - results[0]).max() / np.abs(results[0]).max())
    return found


def kernels() -> dict[str, Any]:
    """Return the largest relative difference of each form's gradients to JAX's convolutions.

    The gradients are those of 3 clients.
    """
    inputs, found = jax.random.bits(jax.random.key(0), (32, 8, 8, 1), "uint8"), {}
    for form in PLAIN:
        model = digits_cnn(form=form)

        def loss(params: Any, model: Model = model) -> jax.Array:
            return jnp.sum(jnp.sin(model.apply(params, model.prepare(inputs))))

        with jax.default_matmul_precision("float32"):
            gradients = jax.jit(jax.vmap(jax.grad(loss)))(
                jax.vmap(model.init)(jax.random.split(jax.random.key(0), 3))
            )
        found[form] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])
    plain = found.pop("lax")
    return {
        form: float(np.abs(other - plain).max() / np.abs(plain).max())
        for form, other in found.items()
    }


def _lenet(clients: int) -> Workload:
    """Return 10 steps of 32 examples for `clients` clients, each of which has one batch."""
    return dataclasses.replace(WORKLOADS["lenet"], clients=clients, examples=32)


def _of(name: Name, clients: int) -> Workload:
    """Return a workload for `clients` clients, with at most 96 examples each.

    A trial has one step.
    """
    known, tiny = WORKLOADS[name], clients <= _TINY
    examples = known.batch_size if tiny else min(known.examples, 96)
    steps = 1 if tiny else known.steps * examples // known.examples if known.feddpa else known.steps
    return dataclasses.replace(known, clients=clients, examples=examples, steps=steps)


def speed(name: Name, form: Form, chunk: int, precision: Any, clients: int) -> dict[str, Any]:
    """Measure a workload's round: clients per second, and shares of the device's rates."""
    work = _of(name, clients)
    model = model_of(work, form)
    model = model if precision is None else with_precision(model, precision)
    return _measured(work, algorithm_of(work, model=model), chunk)


def _measured(work: Workload, algorithm: Algorithm, chunk: int) -> dict[str, Any]:
    where = place(clients_of(*examples_of(work)), jax.devices()[:1])
    compiled = compile_round(algorithm, where, chunk)
    seconds = medians(in_turn({"round": compiled.run}, 1 if work.clients <= _TINY else 3))["round"]
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    cost, peaks = step_cost(compiled.text(), (steps, blocks)), _peaks(where)
    moved = cost.bytes / chunk * work.clients * work.steps
    return {
        "clients_per_s": work.clients / seconds,
        "us_per_client_step": 1e6 * seconds / work.clients / work.steps,
        "share_of_products": round_flops(work) / seconds / 1e12 / peaks["tflop_per_s"],
        "share_of_memory": moved / seconds / 1e9 / peaks["gb_per_s"],
        "mb_per_client_step": moved / work.clients / work.steps / 1e6,
        "kernels": cost.kernels,
        "temporary_mb": compiled.temporary_mb,
        "compile_s": compiled.compile_s,
    }


def ten_steps(clients: int, chunk: int) -> dict[str, Any]:
    """Measure LeNet with 10 steps of 32 examples for every client."""
    work = _lenet(clients)
    found = _measured(work, algorithm_of(work), chunk)
    return {"seconds": clients / found["clients_per_s"]} | found


def pfl_cifar10(rounds: int, clients: int) -> dict[str, Any]:
    """Measure the full run of pfl-research's benchmark with a Flax module, without privacy.

    The time includes compilation and evaluations.
    """
    work, sampling = (
        dataclasses.replace(WORKLOADS["pfl_cnn"], clients=clients),
        FixedSize(min(50, clients)),
    )
    local = LocalSGD(optax.sgd(0.1), work.batch_size)
    algorithm = fedavg(model_of(work), local=local, mechanism=Mechanism(sampling=sampling))
    data, begun = clients_of(*examples_of(work), tests=10), time.perf_counter()
    simulate(0, algorithm, data, rounds=rounds, progress=False)
    return {"rounds": rounds, "seconds": time.perf_counter() - begun}


def auto(clients: int) -> dict[str, Any]:
    """Return the chunk that "auto" chooses for LeNet, and how long the choice takes."""
    work = _lenet(clients)
    where, begun = place(clients_of(*examples_of(work))), time.perf_counter()
    chosen = usual_chunk(algorithm_of(work), where)
    return {"chunk": chosen, "seconds": time.perf_counter() - begun}


def population(number: int) -> dict[str, Any]:
    """Measure a round with 1,000 of many clients, whose states are on the device."""
    model, sampling = mlp((8, 8, 1), hidden=(200, 64)), Poisson(min(1.0, 1000 / number))
    algorithm = centaur(model, sampling=sampling, clip=1.0, noise_multiplier=1.0)
    compiled = compile_round(algorithm, place(make(number, 20)), 128)
    return {
        "compile_s": compiled.compile_s,
        "round_s": medians(in_turn({"round": compiled.run}, 3))["round"],
    }


def out_of_memory(chunk: int) -> dict[str, Any]:
    """Return the chunk that remains after a chunk that is too large was halved."""
    work = _lenet(chunk)
    algorithm, where, key = (
        algorithm_of(work),
        place(clients_of(*examples_of(work))),
        jax.random.key(0),
    )
    arguments = (key, 0, 1, *initialize(key, key, algorithm, where))
    return {"asked": chunk, "chunk": fitting(rounds_of(algorithm, where), chunk, arguments).chunk}


def torch_speed(name: Name, clients: int, chunk: int) -> dict[str, Any]:
    """Measure PyTorch's loop over clients, and `torch.func.vmap`, on the same device."""
    if importlib.util.find_spec("torch") is None:
        return {"missing": "PyTorch is not installed"}
    from benchmarks import pytorch
    from benchmarks.throughput import torch_tensors

    work, target = _of(name, clients), pytorch.best_device(cores())
    data = torch_tensors(*examples_of(work), target)
    network, given = (
        pytorch.NETWORKS[work.model](work.input_shape).to(target),
        (work.batch_size, work.steps),
    )

    def timed(round_fn: Callable[..., None], **options: Any) -> Callable[[], None]:
        def run() -> None:
            round_fn(network, *data, batch_size=given[0], steps=given[1], **options)
            pytorch.wait(target)

        return run

    rounds = {
        "loop": timed(pytorch.fedavg_round),
        "vmap": timed(pytorch.vmapped_round, chunk=chunk),
    }
    return {
        f"{kind}_clients_per_s": clients / value
        for kind, value in medians(in_turn(rounds, 3)).items()
    }


def profile(clients: int, chunk: int, out: str) -> dict[str, Any]:
    """Write a trace of one round of LeNet for a trace viewer."""
    work = _lenet(clients)
    compiled = compile_round(algorithm_of(work), place(clients_of(*examples_of(work))), chunk)
    compiled.run()
    with jax.profiler.trace(f"{out}/trace"):
        compiled.run()
    return {"files": sum(path.is_file() for path in pathlib.Path(out, "trace").rglob("*"))}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
