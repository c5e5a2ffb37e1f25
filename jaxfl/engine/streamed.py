"""Rounds and evaluations of more clients than a device holds: rows go to the devices and back, in blocks.

The host keeps client states (`jaxfl.engine.state_file`) and each client's rows of the example store; the devices hold
the example store itself, each the whole of it. A round's cohort is drawn from all clients and goes through the devices
in blocks of a fixed number of slots, which add to the same sums. While a block is at work, the rows of the previous
block are written back and those of the next block, of this round or the next, are read and sent.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, Key

from jaxfl.backend import compiler_options
from jaxfl.data.clients import blocks_of_lists, in_lists, rows_of
from jaxfl.engine.chunk import Program, choose, halved
from jaxfl.engine.evaluate import PerClient, compile_evaluation
from jaxfl.engine.memo import described, key_of_arrays, key_of_method, remembered
from jaxfl.engine.mesh import Population, mesh_of, sized
from jaxfl.engine.program import compile_for, first_states, freeze, states_in_rows
from jaxfl.engine.round import Center, Keys, Records, Sums, add_participants, draw, finish_round
from jaxfl.engine.state_file import Store
from jaxfl.engine.states import States
from jaxfl.privacy.mechanisms.gaussian import Cohort
from jaxfl.types import Algorithm, Clients, Rows, Tree

_BLOCK_BYTES = 2**24
"""Bytes of one block on all devices: small relative to memory, large relative to the cost of a call."""


class Block(NamedTuple):
    """A part of a round's cohort: its clients by slot (C: an empty slot), and whether it is the round's last."""

    index: Int[Array, ""]
    cohort: Cohort
    ids: Int[np.ndarray, "S"]
    last: bool


def place_examples(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Put the example store on every device; the clients' rows stay where they are.

    Args:
        clients: host arrays; lists and sizes may be memory-mapped, and are not copied.
        devices: which devices to use; all of the default backend where None.

    Raises:
        ValueError: several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"states='host' is for one process, not {jax.process_count()}: give states='device'"
        )
    mesh = mesh_of(clients, devices)
    store = jax.device_put((Rows.of(clients.inputs), clients.labels), NamedSharding(mesh, P()))
    by_client = P("clients")
    layout = Clients(P(), P(), by_client, by_client, by_client, by_client)  # pyrefly: ignore[bad-argument-type]
    placed = in_lists(clients)._replace(inputs=store[0], labels=store[1])
    return sized(Population(placed, clients.number, mesh, layout), clients)


class Programs(NamedTuple):
    """What is compiled for a method and clients of some shapes."""

    center: Callable[..., Center]
    """Makes the shared state, replicated, from the keys of the first state and of the cohorts."""
    states: Callable[..., States]
    """Makes the initial states of all clients from the first of these keys, for their shapes alone."""
    rows: Callable[[int], Callable[..., States]]
    """From a number of clients to a program of their initial states, from the key and the first client."""
    draw: Any
    add: Callable[[int], functools.partial]
    """From a chunk to the program that adds a block, jitted."""
    plain_add: Callable[..., tuple[Sums, States]]
    """The function that `add` compiles, with the chunk as its first argument."""
    finish: Any
    renew: Any
    score: Callable[[int], functools.partial]
    """From a chunk to the program of an evaluation."""


def compile_programs(algorithm: Algorithm, population: Population) -> Programs:
    """Return the programs of a method, which hold no arrays of the population: they are kept beyond the run."""
    everyone = NamedSharding(population.mesh, P())
    by_client = NamedSharding(population.mesh, P("clients"))
    options: dict[str, Any] = {"compiler_options": compiler_options(population.mesh)}

    def center(key: Key[Array, ""], memory_key: Key[Array, "*S"]) -> Center:
        return first_states(algorithm, key, memory_key, population)[0]

    def states(key: Key[Array, ""]) -> States:
        return states_in_rows(algorithm.init(key, population.number)[1], population)

    @functools.cache
    def rows(size: int) -> Callable[..., States]:
        def some(key: Key[Array, ""], first: Int[Array, ""]) -> States:
            # States that are broadcast to all clients never exist in full: the compiler slices the source.
            states = algorithm.init(key, population.number)[1]
            own = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, size), states)
            return states_in_rows(own, population)

        return jax.jit(some, out_shardings=SingleDeviceSharding(population.mesh.devices.flat[0]))

    def draw_(keys: Keys, index: Int[Array, ""], center: Center) -> Cohort:
        return draw(algorithm, population.number, keys, index, center)

    def add(
        chunk: int,
        clients: Clients,
        keys: Keys,
        index: Int[Array, ""],
        cohort: Cohort,
        ids: Int[Array, "S"],
        center: Center,
        total: Sums | None,
        states: States,
    ) -> tuple[Sums, States]:
        block = population._replace(clients=clients)
        return add_participants(
            algorithm, block, chunk, keys.at(index), index, cohort, ids, total, center, states
        )

    @functools.cache
    def compiled_add(chunk: int) -> functools.partial:
        step = functools.partial(add, chunk)
        return compile_for(
            algorithm, population, step, donate_argnames="states", out_shardings=by_client
        )

    def finish(
        keys: Keys, index: Int[Array, ""], cohort: Cohort, total: Sums, center: Center
    ) -> tuple:
        return finish_round(algorithm, population.mesh, keys.at(index), cohort, total, center)

    def renew(states: States, before: States, source: Int[Array, "S"]) -> States:
        return jax.tree.map(lambda *both: jnp.concatenate(both)[source], states, before)

    return Programs(
        jax.jit(center, out_shardings=everyone),
        states,
        rows,
        jax.jit(draw_, out_shardings=everyone, **options),
        compiled_add,
        add,
        jax.jit(finish, donate_argnames="center", out_shardings=everyone, **options),
        jax.jit(renew, donate_argnames="states", out_shardings=by_client, **options),
        functools.cache(lambda chunk: compile_evaluation(algorithm, population, chunk=chunk)),
    )


def fill(key: Key[Array, ""], programs: Programs, store: Store) -> None:
    """Write all clients' initial states, a block at a time, into a new file."""
    store.start()
    size = min(store.number, max(1, _BLOCK_BYTES // max(1, store.bytes_per_client)))
    program = programs.rows(size)
    for first in range(0, store.number, size):
        first = min(first, store.number - size)
        store.write(
            np.arange(first, first + size),
            jax.device_get(program(key, jax.device_put(np.int32(first)))),
        )
    store.commit()


class Stream:
    """Rounds and evaluations by blocks; results are those of `jaxfl.engine.resident.Resident`, whose methods it has.

    Args:
        init_key: key of the first state.
        keys: streams of the rounds.
        algorithm: what a round does.
        clients: host arrays; lists and sizes may be memory-mapped, and are not copied.
        devices: where to run (None: all devices).
        chunk: clients vectorised at a time on each device; "auto": measured.
        folder: for the client states (None: a temporary one).

    Raises:
        ValueError: several processes; too little space in the folder.
    """

    def __init__(
        self,
        init_key: Key[Array, ""],
        keys: Keys,
        algorithm: Algorithm,
        clients: Clients,
        devices: list[jax.Device] | None,
        chunk: int | Literal["auto"],
        folder: pathlib.Path | None,
    ) -> None:
        self.init_key, self.algorithm = init_key, algorithm
        self.population = freeze(algorithm, place_examples(clients, devices))
        self.folder, mesh = folder, self.population.mesh
        self.everyone, self.by_client = NamedSharding(mesh, P()), NamedSharding(mesh, P("clients"))
        self.layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.population.layout)
        self.keys = jax.device_put(keys, self.everyone)
        bare = described(self.population)
        self._key = "streamed", key_of_method(algorithm), bare, key_of_arrays((init_key, self.keys))
        # What this function holds must not be `self`, nor arrays: programs are kept beyond the run.
        self._programs = remembered(self._key, lambda: compile_programs(algorithm, bare))
        self.draw, self.finish, self.renew = (
            self._programs.draw,
            self._programs.finish,
            self._programs.renew,
        )
        self.begin(chunk)
        rows = int(
            np.sum(clients.train_size, dtype=np.int64) + np.sum(clients.test_size, dtype=np.int64)
        )
        per_client = self.store.bytes_per_client + 4 * max(1, rows // clients.number)
        usual = algorithm.mechanism.sampling.usual(self.population.number)
        block = max(_BLOCK_BYTES // per_client, (1 if chunk == "auto" else chunk) * mesh.size)
        sizes = {"train": np.asarray(clients.train_size), "test": np.asarray(clients.test_size)}
        # Rows of the clients in a device's slots, whoever they are: blocks have one shape.
        self._most = functools.cache(
            lambda split, slots: int(np.sort(sizes[split])[-slots:].sum(dtype=np.int64))
        )
        self.slots = self._whole(min(block, math.ceil(usual)))
        self.tested = self._whole(block)
        self._record, zeros = self._shapes()
        self.zero = zeros()

    def begin(self, chunk: int | Literal["auto"]) -> None:
        """Go back to the first state; the chunk is for the next compilation."""
        self.chunk, self.restored = chunk, False
        programs, key = self._programs, self.init_key
        like = remembered(("states", *self._key), lambda: jax.eval_shape(programs.states, key))
        self.center = programs.center(key, self.keys.cohort)
        self.store = Store(self.folder, like, self.population.number)

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from round to round."""
        return self.store.bytes_per_client > 0

    def record(self) -> Records:
        """Shapes of the records of one round."""
        return self._record

    def compile(self, facts: tuple[str, ...]) -> Program:
        """Write the first states, unless restored; choose the chunk, and compile for it."""
        if not self.restored:
            fill(self.init_key, self._programs, self.store)
        block, mesh = next(self._blocks(0, 1)), self.population.mesh
        ids, clients, states = self._load(block.ids)
        arguments = (
            clients,
            self.keys,
            block.index,
            block.cohort,
            ids,
            self.center,
            self.zero,
            states,
        )
        most = self.slots // mesh.size
        self.program = choose(self._build, self.chunk, most, arguments, mesh, ("streamed", *facts))
        self._tested = self.program.chunk
        return self.program

    def programs(self, key: Key[Array, ""]) -> dict[str, list[Any]]:
        """Traced programs of a round, with one slot per device, and of an evaluation with this key."""
        ids, clients, states = self._load(
            np.full(self.population.mesh.size, self.store.number, np.int32), tests=True
        )
        index = np.int32(0)
        cohort = self.draw.eval_shape(self.keys, index, self.center)
        build: Any = self._build(1)
        score: Any = self._score(1)
        drawn = self.draw.trace(self.keys, index, self.center)
        arguments = clients, self.keys, index, cohort, ids, self.center, self.zero, states
        added = build.func.trace(*arguments, **build.keywords)
        finished = self.finish.trace(self.keys, index, cohort, self.zero, self.center)
        scored = score.func.trace(
            clients, index, key, self.center.server, states, index, **score.keywords
        )
        return {"round": [drawn.jaxpr, added.jaxpr, finished.jaxpr], "evaluation": [scored.jaxpr]}

    def rounds(self, start: int, count: int) -> Records:
        """Run `count` rounds from number `start`; return their records, on the host."""
        total, before, records = self.zero, None, []

        def settle(block: Block, states: States, record: Records | None) -> None:
            real = block.ids < self.store.number
            self.store.write(
                block.ids[real], jax.tree.map(lambda leaf: leaf[real], jax.device_get(states))
            )
            if record is not None:
                records.append(jax.device_get(record))

        for block in self._blocks(start, count):
            ids, clients, states = self._load(block.ids)  # while the previous block is at work
            if before is not None:
                states = self._renew(block.ids, states, *before[:2])
            with jax.transfer_guard("disallow"):
                total, states = self.program.step(
                    clients, self.keys, block.index, block.cohort, ids, self.center, total, states
                )
            record = None
            if block.last:
                self.center, record = self.finish(
                    self.keys, block.index, block.cohort, total, self.center
                )
                total = self.zero
            if before is not None:
                settle(*before)  # while this block is at work
            before = block, states, record
        if before is not None:
            settle(*before)
        return jax.tree.map(lambda *rounds: np.stack(rounds), *records)

    def evaluate(self, key: Key[Array, ""], last: int) -> PerClient:
        """Return the scores of all clients after round `last`, on the host."""

        def score(step: functools.partial, first: int) -> PerClient:
            ids = np.arange(first, first + self.tested, dtype=np.int32)
            _, clients, states = self._load(ids, tests=True)
            index = jax.device_put(ids[0], self.everyone)
            return step.func(
                clients, index, key, self.center.server, states, np.int32(last), **step.keywords
            )

        def scores(chunk: int) -> list[PerClient]:
            step = functools.partial(score, self._score(chunk))
            blocks = map(step, range(0, self.store.number, self.tested))
            return [
                jax.device_get(block) for block in _ahead(blocks)
            ]  # while the next one is at work

        blocks, self._tested = halved(scores, self._tested)
        return jax.tree.map(lambda *blocks: np.concatenate(blocks)[: self.store.number], *blocks)

    def saved(self) -> dict[str, Tree]:
        """What a checkpoint keeps: of the client states, only the positions of their rows."""
        return {"center": self.center, "states": self.store.saved()}

    def save(self, write: Callable[[], Any]) -> None:
        """Bring the rows to the disk, let `write` write a checkpoint, and keep from then on the rows that it needs."""
        self.store.flush()
        write()
        self.store.commit()

    def restore(self, saved: dict[str, Tree]) -> None:
        """Resume from what a checkpoint kept."""
        self.store.restore(**saved["states"])
        self.center, self.restored = saved["center"], True

    def all_states(self) -> Tree:
        """Client states, mapped and read-only."""
        return self.store.states().tree()

    def _build(self, chunk: int) -> functools.partial:
        """Return the program that adds a block, with the model's frozen weights."""
        return functools.partial(self._programs.add(chunk).func, frozen=self.population.frozen)

    def _score(self, chunk: int) -> functools.partial:
        """Return the program of an evaluation, with the model's frozen weights."""
        return functools.partial(self._programs.score(chunk).func, frozen=self.population.frozen)

    def _shapes(self) -> tuple[Records, Callable[[], Sums]]:
        """Return the shapes of a round's records, and a program that makes sums of zero."""
        programs, by_client = self._programs, self.by_client
        index = np.int32(0)
        cohort = self.draw.eval_shape(self.keys, index, self.center)
        ids, clients, states = self._load(np.full(self.slots, self.store.number, np.int32))
        example = clients, self.keys, index, cohort, ids, self.center, None, states

        def shapes() -> tuple[Records, Callable[[], Sums]]:
            total, _ = jax.eval_shape(functools.partial(programs.plain_add, 1), *example)
            record = programs.finish.eval_shape(*example[1:4], total, self.center)[1]
            return record, _zeros(total, by_client)

        return remembered(("shapes", *self._key, key_of_arrays(example)), shapes)

    def _blocks(self, start: int, count: int) -> Iterator[Block]:
        """The cohorts of some rounds, cut into blocks; an empty one is a block of empty slots."""
        rounds = (
            jax.device_put(np.int32(index), self.everyone) for index in range(start, start + count)
        )
        draws = ((index, self.draw(self.keys, index, self.center)) for index in rounds)
        # A cohort that depends on the memory needs the previous round.
        for index, cohort in draws if jax.tree.leaves(self.center.memory) else _ahead(draws):
            members = np.flatnonzero(jax.device_get(cohort.sampled))
            for first in range(0, max(1, len(members)), self.slots):
                ids = np.full(
                    (self.population.mesh.size, self.slots // self.population.mesh.size),
                    self.store.number,
                )
                parts = np.array_split(members[first : first + self.slots], len(ids))
                for row, part in zip(ids, parts, strict=True):  # equal parts for all devices
                    row[: len(part)] = part
                yield Block(
                    index,
                    cohort,
                    ids.reshape(-1).astype(np.int32),
                    first + self.slots >= len(members),
                )

    def _load(
        self, ids: Int[np.ndarray, "S"], tests: bool = False
    ) -> tuple[Array, Clients, States]:
        """Some clients' rows on the devices, with or without test examples; an empty slot has no examples."""
        clients, known = self.population.clients, np.minimum(ids, self.store.number - 1)
        parts = np.split(known, self.population.mesh.size)

        def laid_out(split: str, wanted: bool) -> dict[str, Any]:
            lists, size = getattr(clients, split), np.asarray(getattr(clients, f"{split}_size"))
            own = np.where(wanted & (ids < self.store.number), size[known], 0).astype(np.int32)
            sizes = np.split(own, len(parts))
            rows = [rows_of(lists, *chosen) for chosen in zip(sizes, parts, strict=True)]
            length = self._most(split, len(parts[0])) if wanted else 0
            return {split: blocks_of_lists(rows, sizes, length), f"{split}_size": own}

        loaded = clients._replace(**laid_out("train", True), **laid_out("test", tests))
        return jax.device_put(
            (ids, loaded, self.store.read(known)), (self.by_client, self.layout, self.by_client)
        )

    def _renew(
        self, ids: Int[np.ndarray, "S"], states: States, before: Block, new: States
    ) -> States:
        """The same rows, with the newest states of clients that were in the previous block."""
        source = np.arange(self.slots, dtype=np.int32)
        both, here, there = np.intersect1d(ids, before.ids, return_indices=True)
        real = both < self.population.number
        if not real.any():
            return states
        source[here[real]] = self.slots + there[real]
        return self.renew(states, new, jax.device_put(source, self.everyone))

    def _whole(self, slots: int) -> int:
        """Slots, equally many per device, at most enough for all clients."""
        devices = self.population.mesh.size
        return -(-min(max(slots, 1), self.population.number) // devices) * devices


def _zeros(shapes: Tree, sharding: NamedSharding) -> Callable[[], Tree]:
    """Return a program that makes zeros of some shapes."""

    def zeros() -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=sharding)


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items, each of which is started before its predecessor is yielded."""
    last = next(items)
    for item in items:
        yield last
        last = item
    yield last
