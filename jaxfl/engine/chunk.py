"""How many clients are vectorised at a time: measured once and remembered, and halved where memory is short."""

import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxfl.backend import of_mesh
from jaxfl.engine import processes
from jaxfl.engine.memo import Same, key_of_arrays, remembered
from jaxfl.files import cache_folder, read, write_json

T = TypeVar("T")
_LOG = logging.getLogger("jaxfl")
_REMEMBERED: dict[str, dict[str, Any]] = {}


class Program(NamedTuple):
    """Rounds, compiled for one chunk."""

    step: Callable[..., tuple]
    """Takes the arguments that it was compiled for, and donates some of the last two."""
    chunk: int
    memory: float
    """Bytes of temporary arrays on each device, per client vectorised at a time."""


Build = Callable[[int], functools.partial]
"""From a chunk to a jitted function with its first arguments (see `jaxfl.engine.program.compile_rounds`)."""


def compile_chunk(build: Build, chunk: int, arguments: tuple) -> Program:
    """Compile for a chunk, and for the arguments of a call."""
    step = build(chunk)
    program: Any = step.func
    given = (step.args, arguments, step.keywords)

    def compile_() -> Any:
        return program.lower(*step.args, *arguments, **step.keywords).compile()

    compiled = remembered(("compiled", Same(program), key_of_arrays(given)), compile_)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Program(
        functools.partial(compiled, *step.args, **step.keywords), chunk, temporary / chunk
    )


def choose(
    build: Build,
    chunk: int | Literal["auto"],
    most: int,
    arguments: tuple,
    mesh: Mesh,
    facts: tuple[str, ...],
) -> Program:
    """The program for the given or the fastest chunk; see `fitting` and `fastest`."""
    return (
        fastest(build, most, arguments, mesh, facts)
        if chunk == "auto"
        else fitting(build, chunk, arguments)
    )


def fitting(build: Build, chunk: int, arguments: tuple, *, call: bool = True) -> Program:
    """The program for a chunk, halved as often as memory demands.

    Whether a program fits shows in one call on copies of the state, which need room beside it: even a call that fails
    has donated its arguments. Without a `call`, for a device that is not there, the compiler alone tells.
    """
    return halved(
        lambda chunk: _tried(build, chunk, arguments, calls=int(call and chunk > 1))[0], chunk
    )[0]


def fastest(
    build: Build, most: int, arguments: tuple, mesh: Mesh, facts: tuple[str, ...]
) -> Program:
    """The program of the fastest of a few chunks, by the second of two calls; remembered, and logged.

    They are those of the devices' `Backend`, as far as memory is expected to hold the next one, and as long as
    vectorising more clients takes no longer.

    The choice is kept in this process, and in the cache folder (`JAXFL_CACHE_DIR`), by the arrays' shapes, the kind
    and number of devices, the version of JAX and `facts`.

    Args:
        build: makes the program of a chunk.
        most: the largest useful chunk.
        arguments: those of a call of one round.
        mesh: the devices.
        facts: what else the choice depends on, except batches and local steps.
    """
    shapes = str(
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (build(1).args, arguments))
    )
    device = mesh.devices.flat[0].device_kind
    name = hashlib.sha256(
        repr((shapes, device, mesh.size, jax.__version__, facts)).encode()
    ).hexdigest()[:16]
    known = _recall(name)
    most_known, least_known = processes.largest(known or 0, -(known or 0))
    if known and most_known == -least_known:  # in all processes
        program = fitting(build, known, arguments)
        _LOG.info(
            "chunk %d, remembered; %s",
            program.chunk,
            _megabytes(program),
            extra={"program": program},
        )
        return program
    first, *larger = of_mesh(mesh).chunks
    programs, seconds, last = {}, {}, first
    for size in (first, *(size for size in larger if size <= most)):
        if programs and programs[last].memory * size > _memory(mesh):
            break
        if (
            tried := attempt(functools.partial(_tried, build, size, arguments, calls=2), size)
        ) is None:
            if not programs:
                return fitting(build, size // 2, arguments)
            _LOG.warning(
                "chunk=%d does not fit the device's memory: %d is the largest tried", size, last
            )
            break
        programs[size], (seconds[size],) = tried[0], processes.largest(tried[1])
        if last > 1 and seconds[size] > seconds[last]:  # one client alone is other code
            break
        last = size
    best = programs[min(seconds, key=seconds.__getitem__)]
    _remember(
        name,
        {
            "chunk": best.chunk,
            "device": device,
            "facts": facts,
            "seconds": seconds,
            "memory": best.memory,
        },
    )
    measured = ", ".join(f"{size}: {value:.3g} s" for size, value in seconds.items())
    _LOG.info("chunk %d of %s; %s", best.chunk, measured, _megabytes(best), extra={"program": best})
    return best


def _tried(build: Build, chunk: int, arguments: tuple, calls: int) -> tuple[Program, float]:
    """A program and the seconds of its last call on copies of the state."""
    program, seconds = compile_chunk(build, chunk, arguments), 0.0
    for _ in range(calls):
        copies = jax.tree.map(jnp.copy, arguments[-2:])
        start = time.monotonic()
        jax.block_until_ready(program.step(*arguments[:-2], *copies))
        seconds = time.monotonic() - start
    return program, seconds


def halved(work: Callable[[int], T], chunk: int) -> tuple[T, int]:
    """What `work` returns with this chunk, or with half of it as often as memory demands; and the chunk."""
    while (found := attempt(functools.partial(work, chunk), chunk)) is None:
        chunk = half(chunk)
    return found, chunk


def half(chunk: int) -> int:
    """Of a chunk that does not fit; told."""
    _LOG.warning(
        "chunk=%d does not fit the device's memory: going on with chunk=%d", chunk, chunk // 2
    )
    return chunk // 2


def attempt(work: Callable[[], T], chunk: int) -> T | None:
    """What `work` returns with this chunk; None if it does not fit in memory, and half of the chunk may."""
    try:
        return work()
    except jax.errors.JaxRuntimeError as error:
        # Of several processes, all would have to halve.
        if not out_of_memory(error):
            raise
        if chunk == 1 or jax.process_count() > 1:
            error.add_note(
                f"chunk={chunk} does not fit the device's memory: give a smaller chunk, more devices, or states='host'"
            )
            raise
        return None


def out_of_memory(error: Exception) -> bool:
    """Return whether an exception says that the host's or a device's memory is too small."""
    if isinstance(error, MemoryError):
        return True
    # A CPU says it in words, under the status of an internal error.
    texts = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        text in str(error) for text in texts
    )


def _memory(mesh: Mesh) -> float:
    """Bytes of a device, where it tells."""
    return (mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit", math.inf)


def _megabytes(program: Program) -> str:
    return f"{program.memory / 1e6:.3g} MB of temporary memory per client vectorised"


def _remember(name: str, choice: dict[str, Any]) -> None:
    """Keep a choice; a folder that cannot be written is no error."""
    _REMEMBERED[name] = choice
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_json(cache_folder() / f"chunk-{name}.json", choice)
    except OSError as error:
        _LOG.info("the choice is kept for this process only: %s", error)


def _recall(name: str) -> int | None:
    """The remembered chunk; an unreadable file counts as none."""
    if name not in _REMEMBERED:
        try:
            choice = json.loads(read(cache_folder() / f"chunk-{name}.json"))
            if type(choice["chunk"]) is not int or choice["chunk"] < 1:
                return None
            _REMEMBERED[name] = choice
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
    return _REMEMBERED[name]["chunk"]
