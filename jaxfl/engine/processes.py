"""Several processes as one run: the same settings, the same decisions."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax._src import (
    distributed,
)  # JAX has no public way to exchange text before it starts its devices
from jax.experimental import multihost_utils

_PATIENCE_SECONDS = 1800
"""How long processes wait for each other."""

_MEETINGS = itertools.count()


_T = TypeVar("_T")


def by_first(work: Callable[[], _T]) -> _T | None:
    """Return what `work` returns in process 0, and None in others. All processes raise where process 0 does.

    Raises:
        OSError, ValueError: in process 0, what `work` raised; in others a ValueError.
    """
    problem: OSError | ValueError | None = None
    result: _T | None = None
    if jax.process_index() == 0:
        try:
            result = work()
        except (OSError, ValueError) as error:
            problem = error
    if largest(problem is not None)[0]:
        raise problem or ValueError("process 0 of this run has stopped. Read its error.")
    return result


def largest(*values: float | int) -> list[float | int]:
    """The largest of each value over all processes, as float32, so that all take the same decision."""
    if jax.process_count() == 1:
        return list(values)
    return multihost_utils.process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


def of_first(array: np.ndarray) -> np.ndarray:
    """The first process's array, for all of them."""
    return (
        array
        if jax.process_count() == 1
        else np.asarray(multihost_utils.broadcast_one_to_all(array))
    )


def agree(facts: Mapping[str, str]) -> None:
    """Go on only if all processes give the same facts; all of them must make this call.

    Nothing is compiled, and no device is used. A single process does nothing.

    Args:
        facts: what must not differ, by name; digests of long values.

    Raises:
        ValueError: in every process, with the values that differ, and their processes.
    """
    client, process = distributed.global_state.client, distributed.global_state.process_id
    if client is None:
        return
    meeting = f"jaxfl/{next(_MEETINGS)}"
    client.key_value_set(f"{meeting}/{process}", json.dumps(dict(facts)))
    client.wait_at_barrier(meeting, _PATIENCE_SECONDS * 1000)
    by_process = {
        int(key.rpartition("/")[2]): json.loads(text)
        for key, text in client.key_value_dir_get(meeting)
    }
    if differing := differences([by_process[process] for process in sorted(by_process)]):
        raise ValueError(
            f"{differing}: start the same run, with the same command, in all processes"
        )


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """What differs between processes, in words; empty if nothing does.

    >>> differences([{"data": "a", "jax": "0.10"}, {"data": "b", "jax": "0.10"}, {"data": "a", "jax": "0.10"}])
    "data differs by process: 'a' in 0, 2; 'b' in 1"
    >>> differences([{"data": "a"}, {"data": "a"}])
    ''
    """
    texts = []
    for name in dict.fromkeys(name for named in facts for name in named):
        processes: dict[str | None, list[str]] = {}
        for process, named in enumerate(facts):
            processes.setdefault(named.get(name), []).append(str(process))
        if len(processes) > 1:
            values = (f"{value!r} in {', '.join(where)}" for value, where in processes.items())
            texts.append(f"{name} differs by process: {'; '.join(values)}")
    return "; ".join(texts)
