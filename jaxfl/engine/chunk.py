"""Choice of the chunk, the number of clients vectorised at a time.

The choice is measured once and cached. If memory is short, the chunk is halved.
"""

import concurrent.futures
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

from jaxfl._support.backend import of_mesh
from jaxfl._support.files import cache_folder, read, write_json
from jaxfl.engine import processes
from jaxfl.engine.memo import Same, key_of_arrays, remembered

T = TypeVar("T")
_LOG = logging.getLogger("jaxfl")

_REMEMBERED: dict[str, dict[str, Any]] = {}
"""Chunks that this process chose or read, by the hash of shapes, devices and facts."""


class Program(NamedTuple):
    """Compiled program of rounds for one chunk."""

    step: Callable[..., tuple]
    """Function of the arguments that it was compiled for. It may donate the last two."""
    chunk: int
    memory: float
    """Bytes of temporary arrays on each device, per client vectorised at a time."""


Build = Callable[[int], functools.partial]
"""Function from a chunk to a jitted function with its first arguments.

`jaxfl.engine.program.compile_rounds` makes such functions.
"""


def nothing(chunk: int) -> None:
    """Do nothing while the program of a chunk compiles."""


def compile_chunk(
    build: Build, chunk: int, arguments: tuple, meanwhile: Callable[[int], None] = nothing
) -> Program:
    """Return the compiled program of a chunk for the shapes of a call's arguments.

    Args:
        build: Function that makes the program of a chunk.
        chunk: Number of clients vectorised at a time.
        arguments: Arguments of a call.
        meanwhile: Function of the chunk to call while XLA compiles. A cached program makes no call.
    """
    step = build(chunk)
    program: Any = step.func
    inputs = (step.args, arguments, step.keywords)

    def compile_() -> Any:
        lowered = program.lower(*step.args, *arguments, **step.keywords)
        # XLA compiles without Python's lock. Everything that JAX traces stays in this thread,
        # whose flags another thread would not have.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(lowered.compile)
            meanwhile(chunk)
            return compiled.result()

    compiled = remembered(("compiled", Same(program), key_of_arrays(inputs)), compile_)
    # `fastest` multiplies this memory by a larger chunk, to see whether the chunk may fit.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    bound = functools.partial(compiled, *step.args, **step.keywords)
    return Program(bound, chunk, temporary / chunk)


def choose(
    build: Build,
    chunk: int | Literal["auto"],
    most: int,
    arguments: tuple,
    mesh: Mesh,
    facts: tuple[str, ...],
    meanwhile: Callable[[int], None],
) -> Program:
    """Return the program of the given chunk by `fitting`, or for "auto" that of `fastest`.

    `meanwhile` is called while XLA compiles, except for "auto", whose measurements it would
    disturb.
    """
    if chunk == "auto":
        return fastest(build, most, arguments, mesh, facts)
    return fitting(build, chunk, arguments, meanwhile=meanwhile)


def fitting(
    build: Build,
    chunk: int,
    arguments: tuple,
    *,
    call: bool = True,
    meanwhile: Callable[[int], None] = nothing,
) -> Program:
    """Return the program for a chunk, which is halved until the program fits in memory.

    Args:
        build: Function that makes the program of a chunk.
        chunk: Number of clients vectorised at a time.
        arguments: Arguments of a call.
        call: Whether to call the program once on copies of the state, because even a call that
            fails donates its arguments. The copies take memory in addition to the state. A chunk of
            1 is not called. False is for absent devices, and relies on the compiler's memory
            estimate.
        meanwhile: Function of the chunk to call while XLA compiles.
    """

    def attempted(chunk: int) -> Program:
        # A chunk of 1 cannot be halved, so a trial would be pointless.
        calls = int(call and chunk > 1)
        program, _ = _tried(build, chunk, arguments, calls, meanwhile)
        return program

    program, _ = halved(attempted, chunk)
    return program


def fastest(
    build: Build, most: int, arguments: tuple, mesh: Mesh, facts: tuple[str, ...]
) -> Program:
    """Return the program of the fastest chunk, by the second of two calls, and log the choice.

    Candidates come from `Backend.chunks`, in order. The search ends if the next candidate is not
    expected to fit in memory, or does not fit. It also ends if a candidate is slower than its
    predecessor, unless the predecessor is 1. If the first candidate does not fit, the result is
    that of `fitting` for half of it.

    A measured choice is cached in this process and in the cache folder (`JAXFL_CACHE_DIR`). It is
    identified by the arrays' shapes and dtypes, the kind and number of devices, the version of JAX
    and `facts`.

    Args:
        build: Function that makes the program of a chunk.
        most: Largest useful chunk. The first candidate may exceed it.
        arguments: Arguments of a call for one round.
        mesh: The devices.
        facts: Everything else that the choice depends on. Batches and local steps are left out, so
            methods that differ only in these share a choice.
    """
    name = _name_of(build, arguments, mesh, facts)
    known = _agreed_chunk(name)
    if known:
        program = fitting(build, known, arguments)
        _log_choice(program, ", from the cache")
        return program
    found = _measured(build, most, arguments, mesh)
    if not found:
        # The half is at least 1, because `attempt` raises the error of a chunk of 1.
        return fitting(build, of_mesh(mesh).chunks[0] // 2, arguments)
    seconds = {size: duration for size, (_, duration) in found.items()}
    best, _ = found[min(seconds, key=seconds.__getitem__)]
    choice = {
        "chunk": best.chunk,
        "device": mesh.devices.flat[0].device_kind,
        "facts": facts,
        "seconds": seconds,
        "memory": best.memory,
    }
    _remember_chunk(name, choice)
    measured = ", ".join(f"{size}: {value:.3g} s" for size, value in seconds.items())
    _log_choice(best, f" of {measured}")
    return best


def _name_of(build: Build, arguments: tuple, mesh: Mesh, facts: tuple[str, ...]) -> str:
    """Return the name under which a choice is cached, a hash of everything that it depends on."""
    # `build` compiles nothing. The arguments that it binds decide the time of a call, too.
    shapes = str(
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (build(1).args, arguments))
    )
    device = mesh.devices.flat[0].device_kind
    identity = repr((shapes, device, mesh.size, jax.__version__, facts))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _agreed_chunk(name: str) -> int | None:
    """Return the cached chunk, or None unless all processes have cached the same one."""
    known = _recall_chunk(name)
    # The largest of the negated numbers is the negative of the least number of all processes.
    most_known, negated_least = processes.maximum(known or 0, -(known or 0))
    if most_known != -negated_least:
        return None
    return known


def _measured(
    build: Build, most: int, arguments: tuple, mesh: Mesh
) -> dict[int, tuple[Program, float]]:
    """Return the programs of the chunks that `fastest` tries, and their seconds, by chunk.

    There are none if the first candidate does not fit in memory.
    """
    first, *larger = of_mesh(mesh).chunks
    # The first one may exceed `most`, because a program takes no more lanes than are useful.
    candidates = [first, *(size for size in larger if size <= most)]
    found: dict[int, tuple[Program, float]] = {}
    available = _memory(mesh)
    last = first
    for size in candidates:
        if found:
            # The compilers of the processes may differ, but all must take the same candidates.
            (memory,) = processes.maximum(found[last][0].memory)
            if memory * size > available:
                break
        tried = attempt(functools.partial(_tried, build, size, arguments, calls=2), size)
        if tried is None:
            if found:
                _LOG.warning(
                    "chunk=%d does not fit the device's memory: %d is the largest tried", size, last
                )
            break
        program, duration = tried
        # The slowest process counts for all, so that all choose the same chunk.
        (seconds,) = processes.maximum(duration)
        found[size] = program, seconds
        # A chunk of 1 has another program, so its time predicts nothing about larger chunks.
        if last > 1 and seconds > found[last][1]:
            break
        last = size
    return found


def _tried(
    build: Build,
    chunk: int,
    arguments: tuple,
    calls: int,
    meanwhile: Callable[[int], None] = nothing,
) -> tuple[Program, float]:
    """Return a program, and the seconds of the last of `calls` calls on copies of the state.

    Without calls the seconds are 0. `meanwhile` is called while XLA compiles.
    """
    program = compile_chunk(build, chunk, arguments, meanwhile)
    seconds = 0.0
    for _ in range(calls):
        # The program may donate its last two arguments, which the run still needs.
        copies = jax.tree.map(jnp.copy, arguments[-2:])
        start = time.monotonic()
        # A call returns before the devices are done, so the clock waits for its results.
        jax.block_until_ready(program.step(*arguments[:-2], *copies))
        seconds = time.monotonic() - start
    return program, seconds


def halved(work: Callable[[int], T], chunk: int) -> tuple[T, int]:
    """Return the result of `work(chunk)` and the chunk, which is halved until memory suffices."""
    while True:
        # The loop ends at the latest at a chunk of 1, whose error `attempt` raises.
        found = attempt(functools.partial(work, chunk), chunk)
        if found is not None:
            return found, chunk
        chunk = half(chunk)


def half(chunk: int) -> int:
    """Return half of a chunk that does not fit in memory, rounded down, and log a warning."""
    smaller = chunk // 2
    _LOG.warning(
        "chunk=%d does not fit the device's memory: continuing with chunk=%d", chunk, smaller
    )
    return smaller


def attempt(work: Callable[[], T], chunk: int) -> T | None:
    """Return the result of `work`, or None if memory is too small and a smaller chunk may fit.

    Raises:
        jax.errors.JaxRuntimeError: The error has another cause, or the chunk cannot be halved.
            Several processes do not halve it, because all of them would have to.
    """
    try:
        return work()
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        if chunk == 1 or jax.process_count() > 1:
            error.add_note(
                f"chunk must fit the device's memory, got {chunk}. Give a smaller chunk, more "
                "devices, or states='host'."
            )
            raise
        return None


def out_of_memory(error: Exception) -> bool:
    """Return whether an exception says that the host's or a device's memory is too small."""
    if isinstance(error, MemoryError):
        return True
    # On CPUs only the text says so. The status is that of an internal error.
    texts = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        text in str(error) for text in texts
    )


def _memory(mesh: Mesh) -> float:
    """Return the bytes that JAX may allocate on a device, or infinity if the device reports none.

    Processes agree on the least of their devices' numbers.
    """
    # A process can only ask its own devices.
    limit = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    (negative,) = processes.maximum(-limit)
    return -negative


def _log_choice(program: Program, origin: str) -> None:
    """Log the choice of a program's chunk, and where it is from."""
    _LOG.info(
        "chunk %d%s, with %.3g MB of temporary memory per client vectorised",
        program.chunk,
        origin,
        program.memory / 1e6,
        extra={"program": program},
    )


def _remember_chunk(name: str, choice: dict[str, Any]) -> None:
    """Cache a choice. If the folder cannot be written, only this process keeps the choice."""
    _REMEMBERED[name] = choice
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_json(cache_folder() / f"chunk-{name}.json", choice)
    except OSError as error:
        _LOG.info("the choice of the chunk is cached for this process only: %s", error)


def _recall_chunk(name: str) -> int | None:
    """Return the cached chunk, or None if there is none or its file cannot be read."""
    if name not in _REMEMBERED:
        try:
            choice = json.loads(read(cache_folder() / f"chunk-{name}.json"))
            # The file may hold anything. `isinstance` would accept JSON's true as an int.
            if type(choice["chunk"]) is not int or choice["chunk"] < 1:
                return None
            _REMEMBERED[name] = choice
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
    return _REMEMBERED[name]["chunk"]
