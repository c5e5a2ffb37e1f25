"""Several processes as one run: they take the same decisions, from the same settings."""

import itertools
import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax._src import distributed  # JAX has no public way to exchange a text before its devices are in use
from jax.experimental import multihost_utils

_PATIENCE_SECONDS = 1800
"""How much later than another a process may come to the same point."""

_MEETINGS = itertools.count()


def largest(*values: float | int) -> list[float | int]:
    """The largest of each value over all processes, as float32: what they decide by it is decided alike."""
    if jax.process_count() == 1:
        return list(values)
    return multihost_utils.process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


def of_first(array: np.ndarray) -> np.ndarray:
    """The first process's array, for all of them."""
    return array if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(array))


def agree(facts: Mapping[str, str]) -> None:
    """Go on only if all processes say the same; all of them have to come to this call.

    Nothing is compiled, and no device is used. Does nothing in a process by itself.

    Args:
        facts: what must not differ, by name; digests where it is long.

    Raises:
        ValueError: in every process, with the values that differ, and whose they are.
    """
    client, process = distributed.global_state.client, distributed.global_state.process_id
    if client is None:
        return
    place = f"jaxfl/{next(_MEETINGS)}"
    client.key_value_set(f"{place}/{process}", json.dumps(dict(facts)))
    client.wait_at_barrier(place, _PATIENCE_SECONDS * 1000)
    said = {int(key.rpartition("/")[2]): json.loads(text) for key, text in client.key_value_dir_get(place)}
    if differing := differences([said[process] for process in sorted(said)]):
        raise ValueError(f"{differing}: start the same run, with the same command, in all processes")


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """What differs between processes, in words; empty if nothing does.

    >>> differences([{"data": "a", "jax": "0.10"}, {"data": "b", "jax": "0.10"}, {"data": "a", "jax": "0.10"}])
    "data differs by process: 'a' in 0, 2; 'b' in 1"
    >>> differences([{"data": "a"}, {"data": "a"}])
    ''
    """
    told = []
    for name in dict.fromkeys(name for said in facts for name in said):
        processes: dict[str | None, list[str]] = {}
        for process, said in enumerate(facts):
            processes.setdefault(said.get(name), []).append(str(process))
        if len(processes) > 1:
            values = (f"{value!r} in {', '.join(where)}" for value, where in processes.items())
            told.append(f"{name} differs by process: {'; '.join(values)}")
    return "; ".join(told)
