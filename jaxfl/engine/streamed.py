"""Rounds and evaluations of more clients than the devices hold, in blocks of clients.

The host holds client states (`jaxfl.engine.state_file`) and the row numbers of each client's
examples. Each device holds all examples. A round's cohort is drawn from all clients. It passes
through the devices in blocks of a fixed number of slots, which add to the same sums.

While the devices compute a block, the host writes back the states of the previous block. It also
reads and sends the rows of the next block, which may belong to the next round.
"""

import functools
import itertools
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
from typing_extensions import override

from jaxfl._support.backend import compiler_options
from jaxfl.data.clients import blocks_of_lists, in_lists, rows_of
from jaxfl.engine.chunk import Program, choose, halved, nothing
from jaxfl.engine.evaluate import PerClient, compile_evaluation
from jaxfl.engine.interface import Engine
from jaxfl.engine.memo import described, key_of_arrays, key_of_method, remembered
from jaxfl.engine.mesh import Population, mesh_of, sized
from jaxfl.engine.program import compile_for, first_states, freeze, states_in_rows
from jaxfl.engine.round import (
    Center,
    Keys,
    Records,
    Sums,
    add_participants,
    draw,
    finish_round,
    useful_lanes,
)
from jaxfl.engine.state_file import Store
from jaxfl.engine.states import States
from jaxfl.local.lanes import zeros_of
from jaxfl.privacy.mechanisms.gaussian import Cohort
from jaxfl.types import Algorithm, Clients, Rows, Tree

_BLOCK_BYTES = 2**24
"""Bytes of states and row numbers of one block, over all devices.

A block of this size takes little memory, but has enough work to outweigh the cost of a call.
"""


class Block(NamedTuple):
    """Part of a round's cohort that is on the devices at one time."""

    index: Int[Array, ""]
    """Index of the round."""
    cohort: Cohort
    ids: Int[np.ndarray, "S"]
    """Index of the client in each slot. C marks an empty slot."""
    last: bool
    """Whether this is the last block of the round."""


class Loaded(NamedTuple):
    """Clients of a block on the devices."""

    ids: Int[Array, "S"]
    """Index of the client in each slot. C or more marks an empty slot."""
    clients: Clients
    """Their lists of rows, with the examples of all clients."""
    states: States


def place_examples(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Return a population whose examples are all on every device.

    The lists of the clients' rows stay on the host.

    Args:
        clients: Host arrays. Lists and sizes may be memory-mapped, and are not copied.
        devices: The devices to use. None stands for all devices of the default backend.

    Raises:
        ValueError: There are several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"states must be 'device' with {jax.process_count()} processes, got 'host'. "
            "Give states='device'."
        )
    mesh = mesh_of(clients, devices)
    examples = (Rows.of(clients.inputs), clients.labels)
    inputs, labels = jax.device_put(examples, NamedSharding(mesh, P()))
    by_client: Any = P("clients")
    replicated: Any = P()
    layout = Clients(
        inputs=replicated,
        labels=replicated,
        train=by_client,
        train_size=by_client,
        test=by_client,
        test_size=by_client,
    )
    placed = in_lists(clients)._replace(inputs=inputs, labels=labels)
    return sized(Population(placed, clients.num_clients, mesh, layout), clients)


class Programs(NamedTuple):
    """Functions that are compiled for a method and clients of some shapes."""

    center: Callable[..., Center]
    """Program from the keys of the first state and of the cohorts to the center, replicated."""
    states: Callable[..., States]
    """Function from the key of the first state to the initial states of all clients.

    It is traced only, for the shapes of the states.
    """
    rows: Callable[[int], Callable[..., States]]
    """Function from a number of clients to the program of their initial states.

    The program takes the key of the first state and the index of the first client.
    """
    draw: Any
    """Program `(keys, index, center) -> cohort` that draws the cohort of a round."""
    add: Callable[[int], functools.partial]
    """Function from a chunk to the program that adds a block to the sums."""
    plain_add: Callable[..., tuple[Sums, States]]
    """Function that `add` compiles. Its first argument is the chunk."""
    finish: Any
    """Program `(keys, index, cohort, total, center) -> (center, records)`, the end of a round."""
    renew: Any
    """Program `(states, before, source) -> states` for states with some newer ones.

    It takes the entries `source` of the slots of `states`, followed by those of `before`.
    """
    score: Callable[[int], functools.partial]
    """Function from a chunk to the program of an evaluation."""


def compile_programs(algorithm: Algorithm, population: Population) -> Programs:
    """Return the programs of a method for clients of the population's shapes.

    The caller caches them beyond the run, so `population` must be `described`, without arrays.
    """
    everyone = NamedSharding(population.mesh, P())
    by_client = NamedSharding(population.mesh, P("clients"))
    options: dict[str, Any] = {"compiler_options": compiler_options(population.mesh)}

    def center(key: Key[Array, ""], memory_key: Key[Array, "*S"]) -> Center:
        # The compiler drops the client states, which nobody reads.
        first, _ = first_states(algorithm, key, memory_key, population)
        return first

    def states(key: Key[Array, ""]) -> States:
        _, initial = algorithm.init(key, population.num_clients)
        return states_in_rows(initial, population)

    def draw_(keys: Keys, index: Int[Array, ""], center: Center) -> Cohort:
        return draw(algorithm, population.num_clients, keys, index, center)

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
        # The sums are not donated, because all rounds begin with the same `zero`.
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
        center=jax.jit(center, out_shardings=everyone),
        states=states,
        rows=functools.cache(functools.partial(_compile_rows, algorithm, population)),
        draw=jax.jit(draw_, out_shardings=everyone, **options),
        add=compiled_add,
        plain_add=add,
        finish=jax.jit(finish, donate_argnames="center", out_shardings=everyone, **options),
        renew=jax.jit(renew, donate_argnames="states", out_shardings=by_client, **options),
        score=functools.cache(lambda chunk: compile_evaluation(algorithm, population, chunk=chunk)),
    )


def _compile_rows(algorithm: Algorithm, population: Population, size: int) -> Callable[..., States]:
    """Return the program of `Programs.rows` for a number of clients."""

    def some(key: Key[Array, ""], first: Int[Array, ""]) -> States:
        # States that are broadcast to all clients never exist for all of them, because the
        # compiler slices their source.
        _, initial = algorithm.init(key, population.num_clients)
        own = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, size), initial)
        return states_in_rows(own, population)

    # The host reads the rows at once, so a single device makes all of them.
    first_device = population.mesh.devices.flat[0]
    return jax.jit(some, out_shardings=SingleDeviceSharding(first_device))


def fill(key: Key[Array, ""], programs: Programs, store: Store) -> None:
    """Write all clients' initial states into the store and commit them, in place of earlier ones.

    The states are computed a block at a time. States without numbers make no file.
    """
    store.start()
    size = min(store.num_clients, max(1, _BLOCK_BYTES // max(1, store.bytes_per_client)))
    program = programs.rows(size)
    for begin in range(0, store.num_clients, size):
        # The last block overlaps with its predecessor, so that all blocks have one size.
        first = min(begin, store.num_clients - size)
        rows = jax.device_get(program(key, jax.device_put(np.int32(first))))
        store.write(np.arange(first, first + size), rows)
    store.commit()


class Stream(Engine):
    """Engine whose client states are on the host, and pass through the devices in blocks.

    Args:
        init_key: Key of the first state.
        keys: Streams of randomness for the rounds.
        algorithm: The method that runs.
        clients: Host arrays. Lists and sizes may be memory-mapped, and are not copied.
        devices: The devices to use. None stands for all devices.
        chunk: Number of clients vectorised at a time on each device. "auto" measures it.
        folder: Folder for the client states. None stands for a temporary one.

    Raises:
        ValueError: There are several processes, or there is too little space in the folder.
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
        self.init_key = init_key
        self.algorithm = algorithm
        self.population = freeze(algorithm, place_examples(clients, devices))
        self.folder = folder
        mesh = self.population.mesh
        self.everyone = NamedSharding(mesh, P())
        self.by_client = NamedSharding(mesh, P("clients"))
        self.layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.population.layout)
        self.keys = jax.device_put(keys, self.everyone)
        bare = described(self.population)
        self._key = "streamed", key_of_method(algorithm), bare, key_of_arrays((init_key, self.keys))
        # The cache keeps this function beyond the run, so it must not hold `self` or arrays.
        self._programs = remembered(self._key, lambda: compile_programs(algorithm, bare))
        self.draw = self._programs.draw
        self.finish = self._programs.finish
        self.renew = self._programs.renew
        # The store comes first, because the size of blocks follows from that of its rows.
        self.begin(chunk)
        block = self._most_clients(chunk)
        usual = algorithm.mechanism.sampling.usual_cohort(self.population.num_clients)
        self.slots = self._rounded(min(block, math.ceil(usual)))
        self._evaluation_slots = self._rounded(block)
        # Blocks have one shape, so a device has room for the rows of any clients in its slots.
        self._most_rows = functools.cache(functools.partial(_most_rows, self.population.clients))
        self._record, zeros = self._shapes()
        self.zero = zeros()

    def _most_clients(self, chunk: int | Literal["auto"]) -> int:
        """Return the largest number of clients of a block, over all devices."""
        clients = self.population.clients
        train_rows = np.sum(clients.train_size, dtype=np.int64)
        test_rows = np.sum(clients.test_size, dtype=np.int64)
        rows_per_client = max(1, int(train_rows + test_rows) // clients.num_clients)
        # A row number takes 4 bytes on a device.
        bytes_per_client = self.store.bytes_per_client + 4 * rows_per_client
        # The limit on a block's clients leaves room for a chunk on each device.
        least = self.population.mesh.size
        if chunk != "auto":
            least *= chunk
        return max(_BLOCK_BYTES // bytes_per_client, least)

    @override
    def begin(self, chunk: int | Literal["auto"]) -> None:
        self.chunk = chunk
        self.restored = False
        programs = self._programs
        key = self.init_key
        like = remembered(("states", *self._key), lambda: jax.eval_shape(programs.states, key))
        self.center = programs.center(key, self.keys.cohort)
        self.store = Store(self.folder, like, self.population.num_clients)

    @override
    @property
    def stateful(self) -> bool:
        return self.store.bytes_per_client > 0

    @override
    def record(self) -> Records:
        return self._record

    @override
    def compile(
        self, facts: tuple[str, ...], meanwhile: Callable[[int], None] = nothing
    ) -> Program:
        """Choose the chunk, and compile the program of rounds for it.

        A run that is not restored from a checkpoint first writes the initial states.
        """
        if not self.restored:
            fill(self.init_key, self._programs, self.store)
        # All blocks have one shape, so any of them serves as the example of a call.
        block = next(self._blocks(0, 1))
        loaded = self._load(block.ids)
        arguments = self._arguments(block.index, block.cohort, loaded, self.zero)
        mesh = self.population.mesh
        usual = useful_lanes(self.algorithm.mechanism.sampling, self.population)
        most = min(self.slots // mesh.size, usual)
        facts = ("streamed", *facts)
        self.program = choose(self._build, self.chunk, most, arguments, mesh, facts, meanwhile)
        self._evaluated_chunk = self.program.chunk
        return self.program

    @override
    def prepare_evaluation(self, key: Key[Array, ""], chunk: int) -> None:
        """Do nothing, because only an evaluation loads the clients that its program reads."""

    @override
    def programs(self, key: Key[Array, ""]) -> dict[str, list[Any]]:
        # Empty slots read no client's examples, and one for each device is the smallest block.
        loaded = self._load(self._empty(self.population.mesh.size), tests=True)
        index = np.int32(0)
        cohort = self.draw.eval_shape(self.keys, index, self.center)
        build: Any = self._build(1)
        score: Any = self._score(1)
        drawn = self.draw.trace(self.keys, index, self.center)
        arguments = self._arguments(index, cohort, loaded, self.zero)
        added = build.func.trace(*arguments, **build.keywords)
        finished = self.finish.trace(self.keys, index, cohort, self.zero, self.center)
        arguments = self._evaluation_arguments(loaded, index, key, 0)
        scored = score.func.trace(*arguments, **score.keywords)
        return {"round": [drawn.jaxpr, added.jaxpr, finished.jaxpr], "evaluation": [scored.jaxpr]}

    @override
    def rounds(self, start: int, count: int) -> Records:
        # The devices compute a block while the host settles the previous one.
        settled = itertools.starmap(self._settle, _ahead(self._computed(start, count)))
        records = [record for record in settled if record is not None]
        return jax.tree.map(lambda *rounds: np.stack(rounds), *records)

    def _computed(self, start: int, count: int) -> Iterator[tuple[Block, States, Records | None]]:
        """Yield each block of some rounds with its new states, and the record of a finished round.

        The devices may still compute the states and the record.
        """
        total = self.zero
        before: tuple[Block, States] | None = None
        for block in self._blocks(start, count):
            # The devices still compute the previous block.
            loaded = self._load(block.ids)
            # The previous block's new states are on the devices only, and not in the store yet.
            if before is not None:
                states = self._renew(block.ids, loaded.states, *before)
                loaded = loaded._replace(states=states)
            arguments = self._arguments(block.index, block.cohort, loaded, total)
            # A transfer here would slow every block without any sign, so JAX raises an error.
            with jax.transfer_guard("disallow"):
                total, states = self.program.step(*arguments)
            record = None
            if block.last:
                self.center, record = self.finish(
                    self.keys, block.index, block.cohort, total, self.center
                )
                total = self.zero
            before = block, states
            yield block, states, record

    def _settle(self, block: Block, states: States, record: Records | None) -> Records | None:
        """Write a block's new states into the store, and return the record on the host."""
        # Empty slots have no row in the store.
        real = block.ids < self.store.num_clients
        rows = jax.tree.map(lambda leaf: leaf[real], jax.device_get(states))
        self.store.write(block.ids[real], rows)
        return jax.device_get(record)

    @override
    def evaluate(self, key: Key[Array, ""], last: int) -> PerClient:
        def scores(chunk: int) -> list[PerClient]:
            score = functools.partial(self._block_scores, self._score(chunk), key, last)
            blocks = map(score, range(0, self.store.num_clients, self._evaluation_slots))
            # The devices compute the next block while the host fetches one.
            return [jax.device_get(block) for block in _ahead(blocks)]

        blocks, self._evaluated_chunk = halved(scores, self._evaluated_chunk)
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: self.store.num_clients], *blocks)

    def _block_scores(
        self, step: functools.partial, key: Key[Array, ""], last: int, first: int
    ) -> PerClient:
        """Return the scores of a block that begins with client `first`, as `evaluate` does."""
        # The last block may end with empty slots, whose scores `evaluate` cuts off.
        ids = np.arange(first, first + self._evaluation_slots, dtype=np.int32)
        loaded = self._load(ids, tests=True)
        index = jax.device_put(ids[0], self.everyone)
        arguments = self._evaluation_arguments(loaded, index, key, last)
        return step.func(*arguments, **step.keywords)

    @override
    def saved(self) -> dict[str, Tree]:
        """Return the center, and only the places and checksums of the client states' rows."""
        return {"center": self.center, "states": self.store.saved()}

    @override
    def save(self, write: Callable[[], Any]) -> None:
        """Write the rows to disk, let `write` write a checkpoint, and protect the rows in it."""
        self.store.flush()
        write()
        self.store.commit()

    @override
    def restore(self, saved: dict[str, Tree]) -> None:
        self.store.restore(**saved["states"])
        self.center = saved["center"]
        self.restored = True

    @override
    def all_states(self) -> Tree:
        """Return the client states [C, ...] as mapped and read-only arrays (see `Store.states`)."""
        return self.store.states().tree()

    def _build(self, chunk: int) -> functools.partial:
        """Return the program of a chunk that adds a block, with the model's frozen weights."""
        return functools.partial(self._programs.add(chunk).func, frozen=self.population.frozen)

    def _score(self, chunk: int) -> functools.partial:
        """Return the program of a chunk for an evaluation, with the model's frozen weights."""
        return functools.partial(self._programs.score(chunk).func, frozen=self.population.frozen)

    def _shapes(self) -> tuple[Records, Callable[[], Sums]]:
        """Return the shapes of a round's records, and a program that makes sums of zero."""
        programs = self._programs
        by_client = self.by_client
        index = np.int32(0)
        cohort = self.draw.eval_shape(self.keys, index, self.center)
        loaded = self._load(self._empty(self.slots))
        example = self._arguments(index, cohort, loaded, None)

        def shapes() -> tuple[Records, Callable[[], Sums]]:
            total, _ = jax.eval_shape(functools.partial(programs.plain_add, 1), *example)
            _, record = programs.finish.eval_shape(self.keys, index, cohort, total, self.center)
            return record, _zeros_program(total, by_client)

        return remembered(("shapes", *self._key, key_of_arrays(example)), shapes)

    def _blocks(self, start: int, count: int) -> Iterator[Block]:
        """Yield the cohorts of `count` rounds from round `start`, in blocks.

        An empty cohort is a block of empty slots.
        """
        for index, cohort in self._draws(start, count):
            members = np.flatnonzero(jax.device_get(cohort.sampled))
            for first in range(0, max(1, len(members)), self.slots):
                ids = self._in_slots(members[first : first + self.slots])
                yield Block(index, cohort, ids, last=first + self.slots >= len(members))

    def _draws(self, start: int, count: int) -> Iterator[tuple[Array, Cohort]]:
        """Return an iterator over the indices and cohorts of rounds."""
        rounds = (
            jax.device_put(np.int32(index), self.everyone) for index in range(start, start + count)
        )
        # As a generator, the draws read the center that the previous round has left.
        draws = ((index, self.draw(self.keys, index, self.center)) for index in rounds)
        # A cohort that depends on the memory can be drawn only after the previous round.
        if jax.tree.leaves(self.center.memory):
            return draws
        return _ahead(draws)

    def _in_slots(self, members: Int[np.ndarray, "n"]) -> Int[np.ndarray, "S"]:
        """Return the client of each slot of a block with these clients, or C for an empty slot."""
        ids = self._empty(self.slots).reshape(self.population.mesh.size, -1)
        # The devices' numbers of clients differ by at most one.
        parts = np.array_split(members, len(ids))
        for row, part in zip(ids, parts, strict=True):
            row[: len(part)] = part
        return ids.reshape(-1)

    def _empty(self, slots: int) -> Int[np.ndarray, "S"]:
        """Return the indices of empty slots."""
        return np.full(slots, self.store.num_clients, np.int32)

    def _arguments(
        self,
        index: Int[Array | np.int32, ""],
        cohort: Cohort,
        loaded: Loaded,
        total: Sums | None,
    ) -> tuple:
        """Return the arguments of the program that adds a block of loaded clients."""
        return (
            loaded.clients,
            self.keys,
            index,
            cohort,
            loaded.ids,
            self.center,
            total,
            loaded.states,
        )

    def _evaluation_arguments(
        self,
        loaded: Loaded,
        first: Int[Array | np.int32, ""],
        key: Key[Array, ""],
        last: int,
    ) -> tuple:
        """Return the arguments of the evaluation of a block that begins with client `first`."""
        return loaded.clients, first, key, self.center.server, loaded.states, np.int32(last)

    def _load(self, ids: Int[np.ndarray, "S"], tests: bool = False) -> Loaded:
        """Send some clients' rows and states to the devices.

        Args:
            ids: Indices of the clients. An index of C or more is an empty slot without examples.
            tests: Whether to include test examples.
        """
        # An empty slot reads the last client's state, which `rounds` never writes back.
        known = np.minimum(ids, self.store.num_clients - 1)
        train = self._lists("train", ids, known)
        test = self._lists("test", ids, known, wanted=tests)
        clients = self.population.clients._replace(**train, **test)
        on_host = (ids, clients, self.store.read(known))
        shardings = (self.by_client, self.layout, self.by_client)
        return Loaded(*jax.device_put(on_host, shardings))

    def _lists(
        self,
        split: str,
        ids: Int[np.ndarray, "S"],
        known: Int[np.ndarray, "S"],
        wanted: bool = True,
    ) -> dict[str, Any]:
        """Return the lists of rows in a split and their sizes, as fields of `Clients` by name.

        Args:
            split: "train" or "test".
            ids: Indices of the clients. An index of C or more is an empty slot.
            known: The same indices, with a client's index in place of each empty slot.
            wanted: Whether to include examples at all.
        """
        lists = getattr(self.population.clients, split)
        size = np.asarray(getattr(self.population.clients, f"{split}_size"))
        # Lists that are not wanted, and empty slots, have the size 0.
        counts = wanted & (ids < self.store.num_clients)
        own = np.where(counts, size[known], 0).astype(np.int32)
        parts = np.split(known, self.population.mesh.size)
        sizes = np.split(own, len(parts))
        rows = [rows_of(lists, *chosen) for chosen in zip(sizes, parts, strict=True)]
        length = 0
        if wanted:
            length = self._most_rows(split, len(parts[0]))
        return {split: blocks_of_lists(rows, sizes, length), f"{split}_size": own}

    def _renew(
        self, ids: Int[np.ndarray, "S"], states: States, before: Block, new: States
    ) -> States:
        """Return the states, with newer ones for clients that were in the previous block.

        Args:
            ids: Index of the client in each slot.
            states: States of these clients, as the host has them.
            before: The previous block.
            new: States of that block's clients after it, which the host does not have yet.
        """
        source = np.arange(self.slots, dtype=np.int32)
        both, here, there = np.intersect1d(ids, before.ids, return_indices=True)
        # Empty slots of both blocks have the index C in common.
        real = both < self.population.num_clients
        if not real.any():
            return states
        source[here[real]] = self.slots + there[real]
        return self.renew(states, new, jax.device_put(source, self.everyone))

    def _rounded(self, slots: int) -> int:
        """Round a number of slots up to a multiple of the devices, after limiting it to C."""
        devices = self.population.mesh.size
        return -(-min(max(slots, 1), self.population.num_clients) // devices) * devices


def _most_rows(clients: Clients, split: str, slots: int) -> int:
    """Return how many rows of a split any clients in so many slots have at most."""
    sizes = np.asarray(getattr(clients, f"{split}_size"))
    return int(np.sort(sizes)[-slots:].sum(dtype=np.int64))


def _zeros_program(shapes: Tree, sharding: NamedSharding) -> Callable[[], Tree]:
    """Return a program without arguments that makes zeros of these shapes and dtypes."""

    def zeros() -> Tree:
        return zeros_of(shapes)

    # Zeros that a program makes need no transfer.
    return jax.jit(zeros, out_shardings=sharding)


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the same items, but request each of them before its predecessor is yielded.

    There must be at least one item.
    """
    last = next(items)
    for item in items:
        yield last
        last = item
    yield last
