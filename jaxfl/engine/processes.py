"""Several processes as one run, with the same settings and the same decisions."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

# JAX has no public way to exchange text before it starts its devices.
from jax._src import distributed
from jax.experimental import multihost_utils

_PATIENCE_SECONDS = 1800
"""Seconds after which `agree` fails because a process has not made the call."""

_MEETINGS = itertools.count()
"""Numbers of the calls of `agree`, which are the same in all processes."""

_T = TypeVar("_T")


def by_first(work: Callable[[], _T]) -> _T | None:
    """Return the result of `work` in process 0, and None in other processes.

    Raises:
        OSError: `work` raised it in process 0.
        ValueError: `work` raised it in process 0, or this is another process, and process 0 raised
            an error.
    """
    # All processes must reach `maximum`, so process 0 keeps its error until then.
    problem: OSError | ValueError | None = None
    result: _T | None = None
    if jax.process_index() == 0:
        try:
            result = work()
        except (OSError, ValueError) as error:
            problem = error
    if maximum(problem is not None)[0]:
        raise problem or ValueError("Process 0 of this run has stopped. Read its error.")
    return result


def maximum(*values: float | int) -> list[float | int]:
    """Return the largest of each value over all processes, which then take the same decision.

    Several processes get values rounded to float32. A single process gets its own values.
    """
    if jax.process_count() == 1:
        return list(values)
    return multihost_utils.process_allgather(np.array(values, np.float32)).max(axis=0).tolist()


def of_first(array: np.ndarray) -> np.ndarray:
    """Return the array that process 0 passes, in all processes. All arrays have one shape."""
    if jax.process_count() == 1:
        return array
    return np.asarray(multihost_utils.broadcast_one_to_all(array))


def agree(facts: Mapping[str, str]) -> None:
    """Require the same facts in all processes, each of which must make this call.

    Nothing is compiled, and no device is used. A single process does nothing.

    Args:
        facts: Values that must be equal in all processes, by name. Give digests of long values.

    Raises:
        ValueError: Facts differ. Every process raises it, with the values and their processes.
        jax.errors.JaxRuntimeError: A process has not made the call within half an hour.
    """
    client = distributed.global_state.client
    process = distributed.global_state.process_id
    # Only a single process can run without a client of JAX's coordination service.
    if client is None:
        return
    # A key can be set only once, so each call has keys of its own.
    meeting = f"jaxfl/{next(_MEETINGS)}"
    client.key_value_set(f"{meeting}/{process}", json.dumps(dict(facts)))
    # Before the barrier, the facts of a slow process may be missing.
    client.wait_at_barrier(meeting, _PATIENCE_SECONDS * 1000)
    by_process = {
        int(key.rpartition("/")[2]): json.loads(text)
        for key, text in client.key_value_dir_get(meeting)
    }
    if differing := disagreements([by_process[process] for process in sorted(by_process)]):
        raise ValueError(
            f"settings must be equal in all processes, got {differing}. "
            "Start the same run, with the same command, in all processes."
        )


def disagreements(facts: Sequence[Mapping[str, str]]) -> str:
    """Return the facts that differ between processes in words, or "" if none differs.

    >>> facts = [{"data": "a", "jax": "0.10"}, {"data": "b", "jax": "0.10"}]
    >>> disagreements([*facts, facts[0]])
    "data 'a' in process 0, 2 and 'b' in process 1"
    >>> disagreements([{"data": "a"}, {"data": "a"}])
    ''
    """
    texts = []
    for name in dict.fromkeys(name for named in facts for name in named):
        processes: dict[str | None, list[str]] = {}
        for process, named in enumerate(facts):
            processes.setdefault(named.get(name), []).append(str(process))
        if len(processes) > 1:
            values = (
                f"{value!r} in process {', '.join(where)}" for value, where in processes.items()
            )
            texts.append(f"{name} {' and '.join(values)}")
    return "; ".join(texts)
