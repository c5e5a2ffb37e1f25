"""All measurements of one accelerator that fit into a few minutes.

python -m benchmarks.accelerator --minutes 8

Each part has a process and a time limit of its own. The most useful parts start first, until the
time is over. Each result is printed and written at once, so a part that fails or takes too long
costs no other part. Several parts compile at the same time, because that needs processor cores, but
a part that measures has the device to itself. `--only` runs the parts whose names contain one of
some texts. Shares compare with the rates that the device itself reaches, in a large matrix
product at JAX's default precision and in a copy of a large array. Bytes are those of the compiled
program's kernels (`tools.footprint.hlo`). `--tiny` has sizes for a trial on a CPU.
"""

import collections
import contextlib
import dataclasses
import datetime
import fcntl
import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax

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
)
from jaxfl import LocalSGD, simulate
from jaxfl._support.files import write_json
from jaxfl.algorithms import centaur, dp_fedavg, dp_pfeddsu, fedavg, feddpa
from jaxfl.backend import Form
from jaxfl.engine.chunk import fitting
from jaxfl.engine.evaluate import compile_evaluation
from jaxfl.engine.mesh import Population, place
from jaxfl.engine.program import initialize
from jaxfl.local.train import blocks_of
from jaxfl.models import digits_cnn, mlp, with_precision
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
    only: tuple[str, ...] = ()
    """Texts, of which the name of a part contains one. Empty stands for all parts."""
    at_once: int | None = None
    """Number of parts that compile at the same time. None stands for half of the cores."""
    out: pathlib.Path = OUT


class Part(NamedTuple):
    """A function of this module, with its arguments and its time limit."""

    function: Callable[..., dict[str, Any]]
    arguments: tuple
    seconds: float = 240.0


def main(config: Config) -> None:
    """Run the parts, and write each result."""
    begun, results = time.monotonic(), {}
    config.out.mkdir(parents=True, exist_ok=True)
    whole = {
        name: part
        for name, part in parts(config.tiny).items()
        if not config.only or any(text in name for text in config.only)
    }
    # Timings of a tiny run do not matter, so that every core can have a part.
    at_once = config.at_once or (cores() if config.tiny else max(1, cores() // 2))
    pool = ThreadPoolExecutor(at_once)
    with tempfile.NamedTemporaryFile() as turn:
        os.environ[_TURN] = turn.name
        running = {pool.submit(_result, part, begun, config): name for name, part in whole.items()}
        try:
            for future in as_completed(running):
                results[running[future]] = found = future.result()
                kept = {name: results[name] for name in whole if name in results}
                write_json(config.out / "accelerator.json", report(kept) | {"tiny": config.tiny})
                print(f"{running[future]}: {_line(found)}", flush=True)
        finally:
            # No other part starts after Ctrl-C.
            pool.shutdown(cancel_futures=True)


def _line(found: dict[str, Any]) -> str:
    """Return the values of a part in one line."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
    )


def report(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the file's contents: a table of all speeds, a headline, and what every part found."""
    columns = (
        "us_per_client_step",
        "mb_per_client_step",
        "share_of_products",
        "kernels",
        "temporary_mb",
        "compile_s",
    )
    rows = []
    for name, found in parts.items():
        for column in ("clients_per_s", "loop_clients_per_s", "vmap_clients_per_s"):
            if column in found:
                way = column.removesuffix("clients_per_s").rstrip("_")
                row = {"part": f"{name}, {way}" if way else name, "clients_per_s": found[column]}
                rows.append(row | {key: found.get(key) for key in columns})
    seconds = {name: found["seconds"] for name, found in parts.items() if "seconds" in found}
    headline = "; ".join(f"{name}: {value:.3g} s" for name, value in seconds.items())
    device = parts.get("device", {})
    date = datetime.date.today().isoformat()
    return {"headline": headline, "machine": device, "date": date, "rows": rows, "parts": parts}


_TURN = "BENCHMARK_TURN"
"""Environment variable with the file whose lock orders the use of the device."""


@contextlib.contextmanager
def _hold_device(alone: bool) -> Iterator[None]:
    """Wait until no other part uses the device, or, with `alone=False`, until none measures."""
    with open(os.environ[_TURN], "rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


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


def parts(tiny: bool) -> dict[str, Part]:
    """Return all parts, the most useful first."""
    few, clients, small = (_TINY, _TINY, _TINY) if tiny else (512, 2048, 256)

    def of(name: Name, chunk: int, form: Form | None = None, precision: Any = None) -> Part:
        most = min(clients, max(chunk, small)) if name == "resnet20" else clients
        return Part(speed, (name, form, min(chunk, most), precision, most))

    found = {
        "device": Part(device, ()),
        "lenet, chunk 512": of("lenet", 512),
        "evaluation": Part(evaluation, (clients,)),
        "correct": Part(correct, ()),
        "lenet, 10,000 clients x 10 steps": Part(ten_steps, (8 if tiny else 10_000, few)),
        "torch: lenet": Part(torch_speed, ("lenet", small, few)),
        "pfl-research's CIFAR-10, 1,500 rounds": Part(
            pfl_cifar10, (3, clients) if tiny else (1500, 1000)
        ),
        "torch: pfl_cnn": Part(torch_speed, ("pfl_cnn", small, few)),
        "torch: femnist_cnn": Part(torch_speed, ("femnist_cnn", small, few)),
    }
    others: tuple[Name, ...] = ("pfl_cnn", "femnist_cnn", "feddpa", "resnet20", "mlp")
    for name in others:
        found[f"{name}, chunk 512"] = of(name, 512)
    found |= {
        "kernels": Part(kernels, ()),
        "torch: mlp": Part(torch_speed, ("mlp", small, few)),
        # The default precision is TF32.
        "lenet, im2col, chunk 512, bfloat16": of("lenet", 512, "im2col", "bfloat16"),
    }
    # A CPU would take minutes for these.
    if not tiny:
        found |= _other_chunks_and_forms(of)
    found |= {
        "lenet, im2col, chunk 512, float32": of("lenet", 512, "im2col", "float32"),
        "population": Part(population, (1000 if tiny else 1_000_000,)),
        "out of memory": Part(out_of_memory, (clients if tiny else 32_768,)),
    }
    profiled: tuple[Name, ...] = ("lenet", *others)
    for name in profiled[-1:] if tiny else profiled:
        found[f"profile: {name}"] = Part(profile, (name, small, small // 2))
    return found


def _other_chunks_and_forms(of: Callable[..., Part]) -> dict[str, Part]:
    """Return parts that decide on the default chunk and forms. `of` makes a part."""
    found = {"lenet, chunk 2048": of("lenet", 2048)}
    forms: dict[Name, tuple[Form, ...]] = {
        "lenet": ("im2col", "grouped", "blocks", "lax"),
        "feddpa": ("grouped", "pallas"),
        "femnist_cnn": ("grouped", "lax"),
        "pfl_cnn": ("grouped", "lax"),
        "resnet20": ("im2col", "lax"),
    }
    for name, others in forms.items():
        found[f"{name}, chunk 128"] = of(name, 128)
        for form in others:
            found[f"{name}, {form}, chunk 128"] = of(name, 128, form)
    return found


def device() -> dict[str, Any]:
    """Describe the device, and measure the rates of a matrix product and of a copy."""
    here = place(clients_of(*examples_of(_lenet(1))), jax.devices()[:1])
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    with _hold_device(alone=True):
        return machine() | {"memory": memory} | _peaks(here)


def _peaks(population: Population) -> dict[str, float]:
    product, flops = matrix_product(population)
    size, times = (2**24, 1) if jax.default_backend() == "cpu" else (2**28, 20)
    source = jnp.ones(size, jnp.float32)
    # Many copies in one call hide what a call itself costs.
    copies = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: x + 1, x))
    seconds = medians(in_turn({"product": product, "copies": lambda: copies(source)}, 5))
    return {
        "tflop_per_s": flops / seconds["product"] / 1e12,
        "gb_per_s": times * 8 * size / seconds["copies"] / 1e9,
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
    with _hold_device(alone=False):
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
        with jax.default_matmul_precision("float32"), _hold_device(alone=False):
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
    for form in get_args(Form):
        if form == "pallas" and jax.default_backend() == "cpu":
            # A CPU would interpret the kernels.
            continue
        model = digits_cnn(form=form)

        def loss(params: Any, model: Model = model) -> jax.Array:
            return jnp.sum(jnp.sin(model.apply(params, model.prepare(inputs))))

        with jax.default_matmul_precision("float32"), _hold_device(alone=False):
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
    batch = known.batch_size
    examples = batch if tiny else min(known.examples, 96 // batch * batch)
    steps = 1 if tiny else known.steps * examples // known.examples if known.feddpa else known.steps
    return dataclasses.replace(known, clients=clients, examples=examples, steps=steps)


def speed(
    name: Name, form: Form | None, chunk: int, precision: Any, clients: int
) -> dict[str, Any]:
    """Measure a workload's round: clients per second, and shares of the device's rates."""
    work = _of(name, clients)
    model = model_of(work, form)
    model = model if precision is None else with_precision(model, precision)
    return _measured(work, algorithm_of(work, model=model), chunk)


def _measured(work: Workload, algorithm: Algorithm, chunk: int) -> dict[str, Any]:
    where = place(clients_of(*examples_of(work)), jax.devices()[:1])
    with _hold_device(alone=False):
        compiled = compile_round(algorithm, where, chunk)
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    cost = step_cost(compiled.text(), (steps, blocks))
    with _hold_device(alone=True):
        turns = in_turn({"round": compiled.run}, 1 if work.clients <= _TINY else 5)["round"]
        peaks = _peaks(where)
    seconds = float(np.median(turns))
    moved = cost.bytes / chunk * work.clients * work.steps
    return {
        "clients_per_s": work.clients / seconds,
        "slowest_clients_per_s": work.clients / max(turns),
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
    data = clients_of(*examples_of(work), tests=10)
    with _hold_device(alone=True):
        begun = time.perf_counter()
        simulate(0, algorithm, data, rounds=rounds, progress=False)
        seconds = time.perf_counter() - begun
    return {"rounds": rounds, "seconds": seconds}


def population(number: int) -> dict[str, Any]:
    """Measure a round with 1,000 of many clients, whose states are on the device."""
    model, sampling = mlp((8, 8, 1), hidden=(200, 64)), Poisson(min(1.0, 1000 / number))
    algorithm = centaur(model, sampling=sampling, clip=1.0, noise_multiplier=1.0)
    where = place(make(number, 20))
    with _hold_device(alone=False):
        compiled = compile_round(algorithm, where, 128)
    with _hold_device(alone=True):
        seconds = medians(in_turn({"round": compiled.run}, 3))["round"]
    return {"compile_s": compiled.compile_s, "round_s": seconds}


def out_of_memory(chunk: int) -> dict[str, Any]:
    """Return the chunk that remains after a chunk that is too large was halved."""
    work = _lenet(chunk)
    algorithm, where, key = (
        algorithm_of(work),
        place(clients_of(*examples_of(work))),
        jax.random.key(0),
    )
    arguments = (key, 0, 1, *initialize(key, key, algorithm, where))
    with _hold_device(alone=True):
        left = fitting(rounds_of(algorithm, where), chunk, arguments).chunk
    return {"asked": chunk, "chunk": left}


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
    with _hold_device(alone=True):
        seconds = medians(in_turn(rounds, 3))
    return {f"{kind}_clients_per_s": clients / value for kind, value in seconds.items()}


def profile(name: Name, clients: int, chunk: int) -> dict[str, Any]:
    """Return the percentages of the device's time that the longest kernels of a round take."""
    work = _of(name, clients)
    where = place(clients_of(*examples_of(work)), jax.devices()[:1])
    with _hold_device(alone=False):
        compiled = compile_round(algorithm_of(work), where, chunk)
    with _hold_device(alone=True), tempfile.TemporaryDirectory() as folder:
        compiled.run()
        with jax.profiler.trace(folder):
            compiled.run()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
    spent: collections.Counter[str] = collections.Counter()
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                spent[event.name] += event.duration_ns
    total = spent.total()
    shares = {kernel[:60]: 100 * time / total for kernel, time in spent.most_common(14)}
    return {"ms": total / 1e6} | shares


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
