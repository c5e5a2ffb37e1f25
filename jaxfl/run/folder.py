"""Folders of runs: their creation, what must be free in them, and their reports' removal."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxfl._support.files import kind, leftovers, write_json
from jaxfl.engine.state_file import ROWS
from jaxfl.report.layout import (
    CHECKPOINTS,
    CONFIG,
    LOCK,
    NOISE_KEY,
    REPORTS,
    STATES,
    checkpoints,
    points_of,
)


def run_folder(root: str | os.PathLike, method: str, config: Any, seed: int) -> pathlib.Path:
    """Create `<root>/<method>/<hash>/seed=<n>/` with `config.json`, and return the folder's path.

    The hash has ten hexadecimal digits, and is that of method and configuration without the seed.

    Args:
        root: Folder of all runs.
        method: Name of the algorithm, which must be the name of a folder.
        config: A dataclass or a mapping. Its values are JSON values, paths, arrays, or
            dataclasses of these.
        seed: Seed of this run.

    Raises:
        ValueError: The method's name is not the name of a folder, the seed is not an integer, or a
            value has another type.
    """
    _check_run_name(method, seed)
    if dataclasses.is_dataclass(config):
        config = dataclasses.asdict(config)
    values = dict(config)
    values.pop("seed", None)
    # Sorted names give one hash, whatever their order in the configuration.
    text = json.dumps({"method": method} | values, sort_keys=True, default=_as_json)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    folder = pathlib.Path(root) / method / digest / f"seed={seed}"
    folder.mkdir(parents=True, exist_ok=True)
    # The folder of a finished run may be read-only.
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
        write_json(folder / CONFIG, json.loads(text) | {"seed": int(seed)})
    return folder


def _check_run_name(method: Any, seed: Any) -> None:
    """Require that a method is the name of a folder, and that a seed is a whole number."""
    named = isinstance(method, str) and method not in ("", ".", "..")
    if not named or re.search(r"[/\\\x00-\x1f]", method):
        raise ValueError(
            f"method must be the name of a folder, got {method!r}. Leave out slashes and control "
            "characters."
        )
    # True would pass as the seed 1.
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed must be a whole number, got {seed!r}. Give for instance 0.")


def check_names(folder: pathlib.Path, runs: Sequence[pathlib.Path]) -> None:
    """Require that a run or a sweep can write its files, and that earlier reports are a run's.

    A run that wrote reports before has left its lock file or a checkpoint in the folder.

    Args:
        folder: Folder of the run or the sweep.
        runs: Folder of the run, or of each point of the sweep.

    Raises:
        ValueError: A link or a file has the name of a folder, or a folder has the name of a file.
            Or a file that no run has written has the name of a report.
    """
    # A link in place of a folder would make the run write elsewhere.
    folders = [folder / CHECKPOINTS, folder / STATES, *(run for run in runs if run != folder)]
    for path in folders:
        if (found := kind(path)) not in (None, "a folder"):
            raise ValueError(
                f"{str(path)!r} must be a folder, got {found}. Remove it, or choose another folder."
            )
    reports = [run / name for run in runs for name in REPORTS]
    for path in (folder / NOISE_KEY, *reports):
        if kind(path) == "a folder":
            raise ValueError(
                f"{str(path)!r} must be a file, got a folder. Remove it, or choose another folder."
            )
    if kind(folder / LOCK) or checkpoints(folder / CHECKPOINTS):
        return
    for path in reports:
        if kind(path):
            raise ValueError(
                f"folder must hold files named as reports only if a run wrote them, got "
                f"{str(path)!r} without a run's {LOCK!r} or {CHECKPOINTS!r}. Move the file, or "
                "choose another folder."
            )


def clear(folder: pathlib.Path, points: bool) -> None:
    """Remove client states, secret bits, reports and their temporary files, but no other files.

    Folders of client states and of points are removed if they are empty then.

    Args:
        folder: Folder of the run or the sweep.
        points: Whether the reports are those of a sweep's points.
    """
    if jax.process_index() != 0:
        return
    runs = [folder]
    folders = [folder / STATES]
    if points:
        runs = points_of(folder)
        folders += runs
    reports = [run / name for run in runs for name in REPORTS]
    for path in (folder / NOISE_KEY, *reports):
        for own in (path, *leftovers(path)):
            own.unlink(missing_ok=True)
    (folder / STATES / ROWS).unlink(missing_ok=True)
    for own in folders:
        # The folder may be missing, or may hold other files.
        with contextlib.suppress(OSError):
            own.rmdir()


def _as_json(value: Any) -> Any:
    """Return a JSON value for a value of another type.

    An array of more than 1000 entries becomes a hash. Unknown types raise a ValueError.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.size <= 1000:
            return array.tolist()
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return {"sha256": digest, "shape": array.shape, "dtype": array.dtype.name}
    raise ValueError(
        f"config must hold numbers, texts, arrays, paths, dataclasses, or lists of these, got "
        f"{value!r}. Convert the value."
    )
