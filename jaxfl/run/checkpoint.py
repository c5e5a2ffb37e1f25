"""Checkpoints of a run, which a later call resumes bit-identically, or rejects as another run's."""

import contextlib
import hashlib
import json
import logging
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax

from jaxfl._support.files import is_regular, kind, opened, read, write_json
from jaxfl._support.lazy import orbax as ocp
from jaxfl.engine import processes
from jaxfl.engine.state_file import DamagedError
from jaxfl.report.layout import checkpoints
from jaxfl.run.fingerprint import Facts, differences, how_to_resume
from jaxfl.run.recorder import EvaluationSchedule
from jaxfl.types import Tree

_LOG = logging.getLogger("jaxfl")
_MANIFEST = "manifest.json"
_STATE = "state"
_UNFINISHED = "unfinished"

_CHECKPOINT_NAMES = re.compile(
    r"state(\.orbax-checkpoint-tmp.*)?|manifest\.json(\.[0-9a-f]{16})?|fingerprint"
)
"""Names in a checkpoint's folder, even if its writer was killed or was an earlier version."""

_UNREADABLE = ("[", "]", "\\")
"""Characters of a path from which the library for checkpoints cannot read."""

_SHOWN = 3
"""Number of damaged checkpoints that a message names."""

_FOLDER_REMEDY = "Choose another folder, delete this one, or start over in it with resume='never'"
"""Remedy of errors about a folder that cannot be resumed."""


class Checkpoints:
    """The newest two states of a run in a folder, each written atomically with checksums of files.

    Args:
        folder: Folder of the checkpoints, inside the run's folder. The first checkpoint creates it.
        fingerprint: Facts that must agree for a state to belong to this run (see
            `jaxfl.run.fingerprint`).
        plan: Plan of this run, which may have more rounds than the plan of a state.

    Raises:
        ValueError: The path of the folder has brackets or a backslash.
    """

    def __init__(self, folder: pathlib.Path, fingerprint: Facts, plan: EvaluationSchedule) -> None:
        self._folder = folder.absolute()
        # Facts from a file have lists in place of tuples, and must compare as equal.
        self._fingerprint = json.loads(json.dumps(fingerprint))
        if unreadable := [part for part in self._folder.parts if set(_UNREADABLE) & set(part)]:
            raise ValueError(
                f"folder must have a path without {' '.join(_UNREADABLE)}, because checkpoints "
                f"could not be read from it, got {unreadable[0]!r}. Choose another name."
            )
        self._plan = plan
        self._intact: int | None = None
        """Number of rounds of the newest state that this process wrote or read, or None."""

    def save(self, rounds: int, state: Tree, schedule: EvaluationSchedule) -> None:
        """Write a state, so that a kill at any moment leaves the previous one intact.

        Args:
            rounds: Number of rounds after which the run has this state.
            state: The state. Arrays may lie on several devices.
            schedule: Plan by which the run made this state. A run that was extended may have
                another plan now. If the plan keeps no client states, this state is the last one,
                and all others are removed.
        """
        # This process wrote or read this state already.
        if rounds == self._intact:
            return
        first = jax.process_index() == 0
        attempt = 0
        if first:
            attempt = self._start()
        # The other processes wait here for process 0.
        attempt = int(processes.maximum(attempt)[0])
        unfinished = self._folder / _unfinished(attempt)
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(unfinished / _STATE, args=ocp.args.StandardSave(_by_name(state)))
        if first:
            self._complete(unfinished, rounds, schedule)
        self._intact = rounds

    def _complete(
        self, unfinished: pathlib.Path, rounds: int, schedule: EvaluationSchedule
    ) -> None:
        """Give a state its manifest and its final name, and remove older states."""
        content = {
            "fingerprint": self._fingerprint,
            "plan": self._plan._asdict(),
            "made": schedule._asdict(),
            "round": rounds,
            "files": _file_hashes(unfinished),
        }
        # The manifest comes last, because it holds the hashes of all other files.
        write_json(unfinished / _MANIFEST, {"sha256": _of_json(content)} | content)
        own = self._folder / str(rounds)
        # A damaged checkpoint may have the name.
        _remove(own)
        _check_own(own)
        # The rename is atomic, so only a complete checkpoint has a number as its name.
        unfinished.rename(own)
        previous = self._intact
        # A state without client states is the last one, and needs no earlier one in reserve.
        if not schedule.states:
            previous = rounds
        # Older states go only now, after the new one has its final name.
        for other in {*self._steps()} - {rounds, previous}:
            _remove(self._folder / str(other))

    def _start(self) -> int:
        """Make an empty folder for an unfinished state, and return the number of its attempt."""
        attempt = 1
        while not _is_ours(self._folder / _unfinished(attempt)):
            attempt += 1
        unfinished = self._folder / _unfinished(attempt)
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        return attempt

    def restore(
        self,
        like: Callable[[EvaluationSchedule], Tree],
        take: Callable[[int, Tree, EvaluationSchedule], None],
    ) -> int:
        """Pass the newest intact state to `take`, and return the number of its rounds.

        Args:
            like: Function from a plan to arrays with the shapes and devices of its state.
            take: Function of the number of rounds, the state and its plan. If it raises a
                `DamagedError`, it gets the previous state.

        Returns:
            The number of rounds, or 0 if the folder holds no checkpoint.

        Raises:
            ValueError: The folder holds another run, or no intact checkpoint, or differs between
                processes.
        """
        self._check_same()
        damaged: list[str] = []
        for rounds in reversed(self._steps()):
            try:
                take(rounds, *self._read(rounds, like))
            except DamagedError as error:
                damaged.append(f"the checkpoint of round {rounds}: {error}")
                continue
            if damaged:
                text = "Ignoring damaged checkpoints in %s (%s). Resuming from round %d"
                _LOG.warning(text, self._run, _listed(damaged), rounds)
            self._intact = rounds
            return rounds
        if damaged:
            raise ValueError(
                f"folder must hold an intact checkpoint, got {self._run!r}, whose checkpoints are "
                f"damaged ({_listed(damaged)}). {_FOLDER_REMEDY}, or put the files back."
            )
        return 0

    def newest(self) -> str | None:
        """Return the newest state's path as text, or None. Known damaged states do not count."""
        if self._intact is not None:
            return str(self._folder / str(self._intact))
        steps = self._steps()
        if not steps:
            return None
        return str(self._folder / str(steps[-1]))

    def ends(self, rounds: int) -> bool:
        """Return whether the newest state has `rounds` rounds, by its name alone."""
        return self._steps()[-1:] == [rounds]

    def clear(self) -> None:
        """Remove all states. Files of other names stay."""
        if jax.process_index() == 0:
            for path in (self._folder / _unfinished(1), *checkpoints(self._folder)):
                _remove(path)
            # The folder may be missing, or may hold other files.
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        # The other processes wait until the files are gone.
        processes.maximum(0)

    @property
    def _run(self) -> str:
        """Path of the run's folder, for messages."""
        return str(self._folder.parent)

    def _steps(self) -> list[int]:
        return [int(path.name) for path in checkpoints(self._folder)]

    def _check_same(self) -> None:
        """Require that all processes have the same folder and facts, or raise a ValueError."""
        newest = -1
        if self._folder.exists():
            newest = max(self._steps(), default=0)
        # float32 represents 24 bits exactly.
        digest = int(_of_json([self._fingerprint, self._plan])[:6], 16)
        # A maximum of negative numbers is a minimum, so one exchange finds both ends.
        most, least, most_digest, least_digest = processes.maximum(newest, -newest, digest, -digest)
        if most != -least:
            raise ValueError(
                f"folder must be the same for all processes, got {self._run!r} with other "
                "checkpoints on some of them. Give a folder that all of them share."
            )
        if most_digest != -least_digest:
            raise ValueError(
                "processes must be one run, got arguments or data that differ. "
                "Start all of them with the same."
            )

    def _read(
        self, rounds: int, shapes: Callable[[EvaluationSchedule], Tree]
    ) -> tuple[Tree, EvaluationSchedule]:
        """Return the state after `rounds` rounds, and the plan by which the run made it.

        Args:
            rounds: Number of rounds of the state.
            shapes: Function from a plan to arrays with the shapes and devices of its state.

        Raises:
            DamagedError: A file is missing or damaged.
            ValueError: The state belongs to another run, or lacks the client states.
        """
        schedule = self._plan
        problem = None
        try:
            schedule = self._check_state(rounds)
        except DamagedError as error:
            problem = error
        # Only process 0 checks the files, and all processes must reject a state together.
        if processes.maximum(problem is not None)[0]:
            raise problem or DamagedError("see the error on process 0")
        return _stored(self._folder / str(rounds) / _STATE, shapes(schedule)), schedule

    def _check_state(self, rounds: int) -> EvaluationSchedule:
        """Require an intact state of this run, and return the plan by which the run made it.

        Raises:
            DamagedError: A file is missing or damaged.
            ValueError: The state belongs to another run, or lacks the client states.
        """
        folder = self._folder / str(rounds)
        content = _manifest(folder, self._fingerprint.get("format"))
        if content["round"] != rounds:
            raise DamagedError(f"it was made after round {content['round']}")
        planned = EvaluationSchedule(**content["plan"])
        schedule = EvaluationSchedule(**content["made"])
        extends = planned.rounds < self._plan.rounds
        stored = content["fingerprint"]
        current = self._fingerprint
        # Rounds and evaluations count as facts unless this call extends the run.
        if not extends:
            stored = stored | _lengths(planned)
            current = current | _lengths(self._plan)
        self._check_facts(stored, current)
        if not schedule.states and (extends or self._plan.states):
            raise ValueError(
                f"folder must hold client states, got {self._run!r}, whose run of {rounds} "
                "rounds did not keep them. Set keep_states=False and the same rounds to read "
                f"it. {_FOLDER_REMEDY}."
            )
        if jax.process_index() == 0:
            _check_files(folder, content["files"])
        return schedule

    def _check_facts(self, stored: Facts, current: Facts) -> None:
        """Require that a state has the facts of this run."""
        if differing := "; ".join(differences(stored, current)):
            raise ValueError(
                f"folder must be free or hold this run, got {self._run!r}, which holds another "
                f"run. What differs: {differing}. "
                f"{_resumable(stored, current) or _FOLDER_REMEDY}."
            )


def _stored(path: pathlib.Path, like: Tree) -> Tree:
    """Return the state at a path, with the structure, shapes and devices of `like`."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            state = reader.restore(path, args=ocp.args.StandardRestore(target))
    except Exception as error:
        # The fingerprint does not cover Orbax, another version of which may raise anything.
        cause = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise DamagedError(f"it cannot be read ({cause})") from error
    # The stored dict is flat, so the structure comes from the blank state.
    leaves = [state[name] for name in _by_name(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _lengths(plan: EvaluationSchedule) -> Facts:
    """Return the facts `rounds` and `evaluations`, which may differ only if a run is extended."""
    return {"rounds": plan.rounds, "evaluations": plan.evaluations}


def _unfinished(attempt: int) -> str:
    """Return the folder's name of an unfinished state.

    The number of the attempt exceeds 1 if files of other programs have the earlier attempts' names.
    """
    if attempt == 1:
        return _UNFINISHED
    return f"{_UNFINISHED}-{attempt}"


def _is_ours(path: pathlib.Path) -> bool:
    """Return whether the name is free, or belongs to a folder with only parts of a checkpoint."""
    found = kind(path)
    if found is None:
        return True
    if found != "a folder":
        return False
    return all(_CHECKPOINT_NAMES.fullmatch(part.name) for part in path.iterdir())


def _check_own(path: pathlib.Path) -> None:
    """Require that a path is free, or that a run wrote a checkpoint there."""
    if not _is_ours(path):
        raise ValueError(
            f"{str(path)!r} must be a checkpoint, got {kind(path)} that no run wrote. "
            "Move it, then run again."
        )


def _remove(path: pathlib.Path) -> None:
    """Remove a checkpoint, but no link or file, and no folder that holds other names."""
    if kind(path) is not None and _is_ours(path):
        shutil.rmtree(path)


def _resumable(stored: Facts, current: Facts) -> str:
    """Return the remedy that keeps the stored run, or "" if there is none."""
    to_resume = how_to_resume(stored, current)
    if not to_resume:
        return ""
    return f"{to_resume}. For a new run, choose another folder"


def _listed(damaged: list[str]) -> str:
    """Return the first few damaged checkpoints, and the number of the others, as text."""
    texts = damaged[:_SHOWN]
    if len(damaged) > _SHOWN:
        texts.append(f"and {len(damaged) - _SHOWN} more")
    return "; ".join(texts)


def _manifest(folder: pathlib.Path, layout: int | None) -> Facts:
    """Return the content of a folder's manifest.

    Args:
        folder: Folder of the checkpoint.
        layout: Format that the facts must have (see `fingerprint.FORMAT`).

    Raises:
        ValueError: A version of jaxfl with another format wrote the manifest.
        DamagedError: The manifest is missing or damaged.
    """
    path = folder / _MANIFEST
    content: Facts = {}
    # A damaged file may have any content, and raise any of these.
    with contextlib.suppress(
        OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError, MemoryError
    ):
        found = json.loads(read(path))
        if found.pop("sha256") == _of_json(found):
            content = found
    if {"plan", "round"} <= content.keys() and content["fingerprint"].get("format") == layout:
        return content
    # An earlier version had no manifest, but a folder of this name.
    if content or (kind(path) is None and (folder / "fingerprint").is_dir()):
        raise ValueError(
            f"folder must hold a run of this version of jaxfl, got {str(folder.parent.parent)!r} "
            f"with a run of an older version of jaxfl. {_FOLDER_REMEDY}."
        )
    raise DamagedError(f"{_MANIFEST} is {'missing' if kind(path) is None else 'damaged'}")


def _check_files(folder: pathlib.Path, sums: dict[str, str]) -> None:
    try:
        present = _file_hashes(folder)
    except OSError as error:
        raise DamagedError(f"its files cannot be read ({error.strerror or error})") from error
    for name, value in sums.items():
        if present.get(name) != value:
            raise DamagedError(f"{name} is {'damaged' if name in present else 'missing'}")


def _file_hashes(folder: pathlib.Path) -> dict[str, str]:
    """Return hashes of all files except the manifest, by path."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if is_regular(path) and name != _MANIFEST:
            with opened(path) as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _by_name(tree: Tree) -> dict[str, Any]:
    """Return the leaves by path. Orbax restores a flat dict unchanged, but loses empty tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
