"""All measurements of one accelerator that fit into a few minutes.

python -m benchmarks.accelerator --minutes 8

Each part has a process and a time limit of its own. The most useful parts start first, until the
time is over. Each result is printed and written at once, so a part that fails or takes too long
costs no other part (`tools.turns`). `--only` runs the parts whose names contain one of some
texts, and the part that describes the device. Shares compare with the rates that the device itself
reaches, in a large matrix product at JAX's default precision and in a copy of a large array. Bytes
are those of the compiled program's kernels (`tools.footprint.hlo`). `--tiny` has sizes for a trial
on a CPU. Every call writes a file of its own, and leaves earlier ones alone.
"""

import collections
import contextlib
import dataclasses
import datetime
import fcntl
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax

from benchmarks.common import OUT, cores, in_turn, machine, medians
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
from jaxfl._support.backend import Form
from jaxfl._support.files import cache_folder, finite_or_none, write_json
from jaxfl.algorithms import centaur, dp_fedavg, dp_pfeddsu, fedavg, feddpa
from jaxfl.engine.chunk import fitting
from jaxfl.engine.evaluate import compile_evaluation
from jaxfl.engine.mesh import Population, place
from jaxfl.engine.program import initialize
from jaxfl.local.train import blocks_of
from jaxfl.models import digits_cnn, mlp, with_precision
from jaxfl.privacy import FixedSize, Mechanism, Poisson
from jaxfl.types import Algorithm, Model
from tools.footprint.hlo import step_cost
from tools.turns import Found, Part, run_parts, turn

_TINY = 4
"""Greatest number of clients of a workload with the sizes of a trial, see `_of`."""

METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "dp_fedavg": dp_fedavg,
    "feddpa": feddpa,
    "dp_pfeddsu": dp_pfeddsu,
    "centaur": centaur,
}
"""Methods that `correct` compares with a CPU."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the measurements."""

    minutes: float = 8.0
    """Minutes after which no part continues."""
    tiny: bool = False
    """Whether sizes are those of a trial on a CPU."""
    only: tuple[str, ...] = ()
    """Texts. Only `device` and parts whose names contain one of these run. Empty stands for all."""
    at_once: int | None = None
    """Number of parts that have a process at the same time.

    None stands for half of the cores, or for all of them in a trial.
    """
    out: pathlib.Path = OUT


def main(config: Config) -> int:
    """Run the parts, and write each result.

    Returns:
        1 if a part failed or has no result, or else 0. A part for which the time was over counts as
        a result.

    Raises:
        SystemExit: JAX sees only a CPU and this is no trial, or another run holds the lock.
    """
    chosen = _chosen(config)
    # Timings of a tiny run do not matter, so that every core can have a part.
    at_once = config.at_once or (cores() if config.tiny else max(1, cores() // 2))
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if config.tiny:
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    config.out.mkdir(parents=True, exist_ok=True)
    kind = "accelerator_tiny" if config.tiny else "accelerator"
    path = config.out / f"{kind}_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
    results: dict[str, Found] = {}

    def keep(name: str, found: Found) -> None:
        results[name] = found
        print(_line(name, found), flush=True)
        in_order = {other: results[other] for other in chosen if other in results}
        # A full disk must not end the measurements, which are printed too.
        try:
            write_json(path, finite_or_none(report(in_order, tiny=config.tiny)), allow_nan=False)
        except OSError as error:
            print(f"{path} cannot be written: {error}", flush=True)
        if name == "device" and found.get("platform") == "cpu" and not config.tiny:
            raise SystemExit("JAX must see an accelerator, got a CPU. Give --tiny for a trial.")

    # SIGTERM ends the parts as Ctrl-C does. They would hold the device otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _only_run():
        try:
            run_parts(chosen, keep, seconds=60 * config.minutes, at_once=at_once)
        except KeyboardInterrupt:
            print("stopped; the results so far are written", flush=True)
    print(f"\n{path}", *(_line(name, found) for name, found in results.items()), sep="\n")
    return int(len(results) < len(chosen) or any("failed" in found for found in results.values()))


def _chosen(config: Config) -> dict[str, Part]:
    """Return the parts that the options choose, by name.

    Raises:
        ValueError: A number is too small, or a text of `only` is in no name.
    """
    if not config.minutes > 0:
        raise ValueError(f"minutes must be above 0, got {config.minutes}. Give for instance 8.")
    if config.at_once is not None and config.at_once < 1:
        raise ValueError(f"at_once must be at least 1, got {config.at_once}. Give for instance 4.")
    every = parts(config.tiny)
    unknown = [text for text in config.only if not any(text in name for name in every)]
    if unknown:
        raise ValueError(
            f"only must name parts, got {unknown[0]!r}. Choose from {', '.join(every)}."
        )
    return {
        name: part
        for name, part in every.items()
        if name == "device" or not config.only or any(text in name for text in config.only)
    }


@contextlib.contextmanager
def _only_run() -> Iterator[None]:
    """Hold a lock, so that only one run of a user measures at a time.

    Raises:
        SystemExit: Another run holds the lock.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "accelerator.lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                "The device must be free, got another run of this benchmark."
            ) from None
        yield


def _line(name: str, found: Found) -> str:
    """Return the values of a part in one line."""
    values = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
    )
    return f"{name}: {', '.join(values)}"


COLUMNS = (
    "us_per_client_step",
    "mb_per_client_step",
    "share_of_products",
    "kernels",
    "temporary_mb",
    "compile_s",
)
"""Columns of a speed, in addition to its part and clients per second."""


def report(parts: dict[str, Found], *, tiny: bool = False) -> dict[str, Any]:
    """Return the file's contents: a headline, a table of all speeds, and the values of each part.

    Args:
        parts: Values of each part that has ended, by name.
        tiny: Whether this is a trial.
    """
    device = {key: value for key, value in parts.get("device", {}).items() if key != "part_s"}
    peak = device.get("tflop_per_s")
    rows = []
    for name, found in parts.items():
        for column in ("clients_per_s", "loop_clients_per_s", "vmap_clients_per_s"):
            if column not in found:
                continue
            way = column.removesuffix("clients_per_s").rstrip("_")
            row = {"part": f"{name}, {way}" if way else name, "clients_per_s": found[column]}
            facts = dict(found)
            if peak and "tflop_per_s" in found:
                # One rate for all parts, so that their shares can be compared.
                facts["share_of_products"] = found["tflop_per_s"] / peak
            rows.append(row | {key: facts.get(key) for key in COLUMNS})
    seconds = {name: found["seconds"] for name, found in parts.items() if "seconds" in found}
    headline = "; ".join(f"{name}: {value:.3g} s" for name, value in seconds.items())
    date = datetime.date.today().isoformat()
    return {
        "headline": "trial on few clients, whose times mean nothing" if tiny else headline,
        "machine": device,
        "date": date,
        "tiny": tiny,
        "rows": rows,
        "parts": parts,
    }


def parts(tiny: bool) -> dict[str, Part]:
    """Return all parts by name, the most useful first.

    Args:
        tiny: Whether sizes are those of a trial on a CPU.
    """
    few, clients, small = (_TINY, _TINY, _TINY) if tiny else (512, 2048, 256)

    def of(name: Name, chunk: int, form: Form | None = None, precision: Any = None) -> Part:
        most = min(clients, max(chunk, small)) if name == "resnet20" else clients
        return Part(speed, (name, form, min(chunk, most), precision, most))

    def peer(name: Name) -> Part:
        return Part(torch_speed, (name, small, clients, few))

    found = {
        "device": Part(device),
        "evaluation": Part(evaluation, (clients,)),
        "correct": Part(correct),
        "kernels": Part(kernels),
        "lenet, chunk 512": of("lenet", 512),
        "torch: lenet": peer("lenet"),
    }
    # A CPU would take minutes for these, and for the other forms below.
    if not tiny:
        found["lenet, chunk 2048"] = of("lenet", 2048)
    found |= {
        "lenet, 10,000 clients x 10 steps": Part(ten_steps, (8 if tiny else 10_000, few)),
        "pfl-research's CIFAR-10, 1,500 rounds": Part(
            pfl_cifar10, (3, clients) if tiny else (1500, 1000)
        ),
        "pfl_cnn, chunk 512": of("pfl_cnn", 512),
        "torch: pfl_cnn": peer("pfl_cnn"),
    }
    if not tiny:
        found |= _other_forms(of, "lenet", ("im2col", "grouped", "blocks", "lax"))
        found |= _other_forms(of, "resnet20", ("im2col", "lax"))
    found |= {f"{name}, chunk 512": of(name, 512) for name in ("mlp", "resnet20", "feddpa")}
    found |= {
        "torch: mlp": peer("mlp"),
        "femnist_cnn, chunk 512": of("femnist_cnn", 512),
        "torch: femnist_cnn": peer("femnist_cnn"),
        "out of memory": Part(out_of_memory, (clients if tiny else 32_768,)),
    }
    profiled: tuple[Name, ...] = ("lenet", "pfl_cnn", "femnist_cnn", "feddpa", "resnet20", "mlp")
    for name in profiled[-1:] if tiny else profiled:
        found[f"profile: {name}"] = Part(profile, (name, small, small // 2))
    if not tiny:
        found |= _other_forms(of, "feddpa", ("grouped", "pallas"))
        found |= _other_forms(of, "femnist_cnn", ("grouped", "lax"))
        found |= _other_forms(of, "pfl_cnn", ("grouped", "lax"))
    return found | {
        # The default precision is TF32.
        "lenet, im2col, chunk 512, bfloat16": of("lenet", 512, "im2col", "bfloat16"),
        "lenet, im2col, chunk 512, float32": of("lenet", 512, "im2col", "float32"),
        "population": Part(population, (1000 if tiny else 1_000_000,)),
    }


def _other_forms(of: Callable[..., Part], name: Name, forms: Sequence[Form]) -> dict[str, Part]:
    """Return parts that measure a network at a chunk of 128, in its default form and other ones.

    Args:
        of: Function from name, chunk and form to a part.
        name: Name of the workload.
        forms: Other forms of convolutions.
    """
    found = {f"{name}, chunk 128": of(name, 128)}
    return found | {f"{name}, {form}, chunk 128": of(name, 128, form) for form in forms}


def device() -> dict[str, Any]:
    """Return facts of the device, and its rates in a matrix product and in a copy."""
    here = place(clients_of(*examples_of(_lenet(1))), jax.devices()[:1])
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    with turn("measure"):
        platform = {"platform": jax.default_backend(), "memory": memory}
        return machine() | platform | _peaks(here)


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
    """Run one evaluation with up to 128 clients at a time, and return whether losses are finite.

    The result also has the number of evaluated clients.
    """
    work = _lenet(clients)
    where, algorithm, key = (
        place(clients_of(*examples_of(work), tests=32)),
        algorithm_of(work),
        jax.random.key(0),
    )
    center, states = initialize(key, key, algorithm, where)
    score = compile_evaluation(algorithm, where, chunk=min(128, clients))
    with turn("compile"):
        scores = jax.device_get(score(key, center.server, states))
    return {"finite": bool(np.isfinite(scores["loss"]).all()), "clients": len(scores["loss"])}


def correct() -> dict[str, Any]:
    """Return each method's largest relative difference to a CPU's shared model after 2 rounds.

    Both run at full precision. The difference is divided by the largest absolute weight
    of the CPU's model.
    """
    work = dataclasses.replace(WORKLOADS["mlp"], clients=8, examples=32)
    clients, model = clients_of(*examples_of(work), tests=8), mlp(work.input_shape, hidden=(32,))
    found = {}
    for name, method in METHODS.items():
        options: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.05), 8)}
        if method is not fedavg:
            options |= {"clip": 1.0, "noise_multiplier": 0.0, "sampling": Poisson(0.7)}
        results = []
        with jax.default_matmul_precision("float32"), turn("compile"):
            for device, chunk in ((jax.devices("cpu")[0], 1), (jax.devices()[0], 4)):
                here: dict[str, Any] = {"devices": [device], "chunk": chunk, "progress": False}
                run = simulate(0, method(model, **options), clients, rounds=2, **here)
                results.append(
                    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.server.params)])
                )
        found[name] = float(np.abs(results[1] - results[0]).max() / np.abs(results[0]).max())
    return found


def kernels() -> dict[str, Any]:
    """Return the largest relative difference of each form's gradients to those of "lax", by form.

    The gradients are those of 3 clients. A CPU leaves out "pallas".
    """
    inputs, found = jax.random.bits(jax.random.key(0), (32, 8, 8, 1), "uint8"), {}
    for form in get_args(Form):
        if form == "pallas" and jax.default_backend() == "cpu":
            # A CPU would interpret the kernels.
            continue
        model = digits_cnn(form=form)

        def loss(params: Any, model: Model = model) -> jax.Array:
            return jnp.sum(jnp.sin(model.apply(params, model.prepare(inputs))))

        with jax.default_matmul_precision("float32"), turn("compile"):
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
    """Return a workload of LeNet: 10 steps on one batch of 32 examples for each client."""
    return dataclasses.replace(WORKLOADS["lenet"], clients=clients, examples=32)


def _of(name: Name, clients: int) -> Workload:
    """Return a workload for `clients` clients, with at most 96 examples each.

    A trial has one batch of examples, and one step. FedDPA takes a step in each of its four epochs.
    """
    known, tiny = WORKLOADS[name], clients <= _TINY
    batch = known.batch_size
    examples = batch if tiny else min(known.examples, 96 // batch * batch)
    steps = 1 if tiny else known.steps * examples // known.examples if known.feddpa else known.steps
    return dataclasses.replace(known, clients=clients, examples=examples, steps=steps)


def speed(
    name: Name, form: Form | None, chunk: int, precision: Any, clients: int
) -> dict[str, Any]:
    """Measure a workload's round: clients, operations of the model and bytes per second.

    Args:
        name: Name of the workload.
        form: Form of convolutions. None takes the device's default.
        chunk: Number of clients vectorised at a time.
        precision: Precision of the model's products. None keeps the default.
        clients: Number of clients.
    """
    work = _of(name, clients)
    model = model_of(work, form)
    model = model if precision is None else with_precision(model, precision)
    return _measured(work, algorithm_of(work, model=model), chunk)


def _measured(work: Workload, algorithm: Algorithm, chunk: int) -> dict[str, Any]:
    where = place(clients_of(*examples_of(work)), jax.devices()[:1])
    with turn("compile"):
        compiled = compile_round(algorithm, where, chunk)
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    cost = step_cost(compiled.text(), (steps, blocks))
    with turn("measure"):
        turns = in_turn({"round": compiled.run}, 1 if work.clients <= _TINY else 5)["round"]
    seconds = float(np.median(turns))
    moved = cost.bytes / chunk * work.clients * work.steps
    return {
        "clients_per_s": work.clients / seconds,
        "slowest_clients_per_s": work.clients / max(turns),
        "us_per_client_step": 1e6 * seconds / work.clients / work.steps,
        "tflop_per_s": round_flops(work) / seconds / 1e12,
        "gb_per_s": moved / seconds / 1e9,
        "mb_per_client_step": moved / work.clients / work.steps / 1e6,
        "kernels": cost.kernels,
        "temporary_mb": compiled.temporary_mb,
        "compile_s": compiled.compile_s,
    }


def ten_steps(clients: int, chunk: int) -> dict[str, Any]:
    """Measure LeNet with 10 steps of 32 examples for every client, and the seconds of a round."""
    work = _lenet(clients)
    found = _measured(work, algorithm_of(work), chunk)
    return {"seconds": clients / found["clients_per_s"]} | found


def pfl_cifar10(rounds: int, clients: int) -> dict[str, Any]:
    """Measure the seconds of pfl-research's benchmark with a Flax module, without privacy.

    They include compilation and evaluations.
    """
    work, sampling = (
        dataclasses.replace(WORKLOADS["pfl_cnn"], clients=clients),
        FixedSize(min(50, clients)),
    )
    local = LocalSGD(optax.sgd(0.1), work.batch_size)
    algorithm = fedavg(model_of(work), local=local, mechanism=Mechanism(sampling=sampling))
    data = clients_of(*examples_of(work), tests=10)
    with turn("measure"):
        begun = time.perf_counter()
        simulate(0, algorithm, data, rounds=rounds, progress=False)
        seconds = time.perf_counter() - begun
    return {"rounds": rounds, "seconds": seconds}


def population(number: int) -> dict[str, Any]:
    """Measure a round with about 1,000 of `number` clients, whose states are on the device."""
    model, sampling = mlp((8, 8, 1), hidden=(200, 64)), Poisson(min(1.0, 1000 / number))
    algorithm = centaur(model, sampling=sampling, clip=1.0, noise_multiplier=1.0)
    where = place(make(number, 20))
    with turn("compile"):
        compiled = compile_round(algorithm, where, 128)
    with turn("measure"):
        seconds = medians(in_turn({"round": compiled.run}, 3))["round"]
    return {"compile_s": compiled.compile_s, "round_s": seconds}


def out_of_memory(chunk: int) -> dict[str, Any]:
    """Return the requested chunk, and the one that remains after halving it until it fits."""
    work = _lenet(chunk)
    # The default form needs too little memory.
    algorithm = algorithm_of(work, model=model_of(work, "im2col"))
    where = place(clients_of(*examples_of(work)))
    key = jax.random.key(0)
    arguments = (key, 0, 1, *initialize(key, key, algorithm, where))
    with turn("measure"):
        left = fitting(rounds_of(algorithm, where), chunk, arguments).chunk
    return {"asked": chunk, "chunk": left}


def torch_speed(name: Name, looped: int, clients: int, chunk: int) -> Found:
    """Measure PyTorch on the same device: clients per second of a loop and of `torch.func.vmap`.

    The result says why if PyTorch is missing or has no accelerator.

    Args:
        name: Name of the workload.
        looped: Number of clients of a loop over clients.
        clients: Number of clients of `torch.func.vmap`.
        chunk: Number of clients that `torch.func.vmap` vectorises at a time.
    """
    if importlib.util.find_spec("torch") is None:
        return {"missing": "PyTorch is not installed"}
    import torch

    from benchmarks import pytorch
    from benchmarks.throughput import torch_tensors

    target = pytorch.best_device(cores())
    if "cpu" in str(target) and jax.default_backend() != "cpu":
        return {"failed": "PyTorch sees no accelerator, and JAX sees one"}

    def timed(round_fn: Callable[..., None], number: int, **options: Any) -> Callable[[], None]:
        work = _of(name, number)
        network = pytorch.NETWORKS[work.model](work.input_shape).to(target)
        data = torch_tensors(*examples_of(work), target)

        def run() -> None:
            round_fn(network, *data, batch_size=work.batch_size, steps=work.steps, **options)
            pytorch.wait(target)

        return run

    rounds = {
        "loop": timed(pytorch.fedavg_round, looped),
        "vmap": timed(pytorch.vmapped_round, clients, chunk=chunk),
    }
    with turn("measure"):
        seconds = medians(in_turn(rounds, 3))
    return {
        "loop_clients_per_s": looped / seconds["loop"],
        "vmap_clients_per_s": clients / seconds["vmap"],
        "torch": torch.__version__,
        "torch_device": str(target),
    }


def profile(name: Name, clients: int, chunk: int) -> dict[str, Any]:
    """Return the milliseconds of a round's kernels on a GPU, and the percentages of the 14 longest.

    Kernels whose names have the same first 60 characters count together.
    """
    work = _of(name, clients)
    where = place(clients_of(*examples_of(work)), jax.devices()[:1])
    with turn("compile"):
        compiled = compile_round(algorithm_of(work), where, chunk)
    with turn("measure"), tempfile.TemporaryDirectory() as folder:
        compiled.run()
        with jax.profiler.trace(folder):
            compiled.run()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
    spent: collections.Counter[str] = collections.Counter()
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                # Many kernels differ by the end of a long name alone.
                spent[event.name[:60]] += event.duration_ns
    total = spent.total()
    shares = {kernel: 100 * time / total for kernel, time in spent.most_common(14)}
    return {"ms": total / 1e6} | shares


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
