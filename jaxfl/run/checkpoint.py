"""Checkpoints of a run: all that a later call needs to resume bit-identically, or to see that it must not."""

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

from jaxfl.engine import processes
from jaxfl.engine.state_file import DamagedError
from jaxfl.files import is_regular, kind, opened, read, write_json
from jaxfl.lazy import orbax as ocp
from jaxfl.run.fingerprint import Facts, differences, remedy
from jaxfl.run.recorder import Plan
from jaxfl.types import Tree

_LOG = logging.getLogger("jaxfl")
_MANIFEST, _STATE, _UNFINISHED = "manifest.json", "state", "unfinished"
_PARTS = re.compile(r"state(\.orbax-checkpoint-tmp.*)?|manifest\.json(\.[0-9a-f]{16})?|fingerprint")
"""Names in the folder of a checkpoint, also of one whose writer was killed, and of one of an earlier version."""

_UNREADABLE = ("[", "]", "\\")
"""Characters that the library for checkpoints takes for something else in a path."""

_ROUNDS = re.compile("[1-9][0-9]{0,17}")
"""Names of checkpoints: after how many rounds they were made."""

_SHOWN = 3
"""Damaged checkpoints that a message names."""

_REMEDY = "Choose another folder, delete this one, or start over in it with resume='never'"


class Checkpoints:
    """The newest two states of a run in one folder, written atomically, with a checksum of every file.

    Args:
        folder: for the checkpoints, inside the run's folder; made with the first one.
        fingerprint: facts that must agree for a state to belong to this run (see `jaxfl.run.fingerprint`).
        plan: of this run, which may have more rounds than that of a state.
    """

    def __init__(self, folder: pathlib.Path, fingerprint: Facts, plan: Plan) -> None:
        self._folder, self._fingerprint = folder.absolute(), json.loads(json.dumps(fingerprint))
        if unreadable := [part for part in self._folder.parts if set(_UNREADABLE) & set(part)]:
            raise ValueError(
                f"folder must have a path without {' '.join(_UNREADABLE)}, from which checkpoints could not be read, "
                f"got {unreadable[0]!r} in it. Choose another name."
            )
        self._plan = plan
        self._whole: int | None = None  # rounds of the newest state that is known to be intact

    def save(self, rounds: int, state: Tree, made: Plan) -> None:
        """Write the state after `rounds` rounds; a kill at any moment leaves the previous one intact.

        `made` is the plan whose first evaluations were made: before the run was extended, perhaps others than now. Of a
        plan without states, it is the last state, and others go.
        """
        if rounds == self._whole:
            return
        first = jax.process_index() == 0
        attempt = self._start() if first else 0
        attempt = int(processes.largest(attempt)[0])  # all wait for process 0
        unfinished = self._folder / _unfinished(attempt)
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(unfinished / _STATE, args=ocp.args.StandardSave(_by_name(state)))
        if first:
            content = {
                "fingerprint": self._fingerprint,
                "plan": self._plan._asdict(),
                "made": made._asdict(),
            }
            content["round"] = rounds
            content |= {"files": _sums(unfinished)}
            write_json(unfinished / _MANIFEST, {"sha256": _of_json(content)} | content)
            own = self._folder / str(rounds)
            _remove(own)  # a damaged one
            _check_own(own)
            unfinished.rename(own)
            for other in {*self._steps()} - {rounds, self._whole if made.states else rounds}:
                _remove(self._folder / str(other))
        self._whole = rounds

    def _start(self) -> int:
        """Make the folder of an unfinished state, and return the number in its name."""
        attempt = 1
        while not _is_ours(self._folder / _unfinished(attempt)):
            attempt += 1
        unfinished = self._folder / _unfinished(attempt)
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        return attempt

    def restore(self, like: Callable[[Plan], Tree], take: Callable[[int, Tree, Plan], None]) -> int:
        """Hand the newest intact state to `take`, with its rounds and plan; return its rounds, 0 if there is none.

        The state is on the devices of `like(plan)`. `take` may refuse it as damaged; then the previous one is tried.

        Raises:
            ValueError: the folder holds another run, or no intact checkpoint, or is not the same for all processes.
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
                text = (
                    "%s holds damaged checkpoints, which are not used: %s. Resuming from round %d"
                )
                _LOG.warning(text, self._run, _listed(damaged), rounds)
            self._whole = rounds
            return rounds
        if damaged:
            text = f"folder={self._run!r} holds no checkpoint that is whole ({_listed(damaged)})"
            raise ValueError(f"{text}. {_REMEDY}, or put the files back")
        return 0

    def newest(self) -> str:
        """Path of the newest state that is not known to be damaged, if any."""
        steps = self._steps() if self._whole is None else [self._whole]
        return str(self._folder / str(steps[-1])) if steps else "none"

    def ends(self, rounds: int) -> bool:
        """Whether the newest state is that after `rounds` rounds."""
        return self._steps()[-1:] == [rounds]

    def clear(self) -> None:
        """Remove all states. Files of other names stay."""
        if jax.process_index() == 0:
            for path in (self._folder / _unfinished(1), *checkpoints(self._folder)):
                _remove(path)
            with contextlib.suppress(OSError):  # it is missing, or holds other files
                self._folder.rmdir()
        processes.largest(0)

    @property
    def _run(self) -> str:
        return str(self._folder.parent)

    def _steps(self) -> list[int]:
        return [int(path.name) for path in checkpoints(self._folder)]

    def _check_same(self) -> None:
        """Require that all processes see one folder, and belong to one run."""
        newest = (self._steps() or [0])[-1] if self._folder.exists() else -1
        digest = int(_of_json([self._fingerprint, self._plan])[:6], 16)  # 24 bits, exact in float32
        most, least, most_digest, least_digest = processes.largest(newest, -newest, digest, -digest)
        if most != -least:
            raise ValueError(
                f"folder={self._run!r} differs by process: give one that all of them share"
            )
        if most_digest != -least_digest:
            raise ValueError(
                "processes were started with arguments or data that differ: start all with the same"
            )

    def _read(self, rounds: int, shapes: Callable[[Plan], Tree]) -> tuple[Tree, Plan]:
        """An intact state of this run, and the plan that it was made by."""
        folder, content, made, problem = self._folder / str(rounds), {}, self._plan, None
        try:
            content = _manifest(folder, self._fingerprint.get("format"))
            if content["round"] != rounds:
                raise DamagedError(f"it was made after round {content['round']}")
            planned, made = [Plan(**content["plan"]), self._plan], Plan(**content["made"])
            extends = planned[0].rounds < self._plan.rounds
            facts = [
                own | ({} if extends else {"rounds": plan.rounds, "evaluations": plan.evaluations})
                for own, plan in zip([content["fingerprint"], self._fingerprint], planned)
            ]
            if differing := "; ".join(differences(*facts)):
                text = f"folder={self._run!r} holds another run. What differs: {differing}"
                raise ValueError(f"{text}. {_resumable(*facts) or _REMEDY}")
            if not made.states and (extends or self._plan.states):
                text = f"folder={self._run!r} holds a run of {rounds} rounds whose clients' states were not kept"
                raise ValueError(f"{text}: it can only be read, with keep_states=False. {_REMEDY}")
            if jax.process_index() == 0:
                _check_files(folder, content["files"])
        except DamagedError as error:
            problem = error
        if processes.largest(problem is not None)[0]:
            raise problem or DamagedError("process 0 says in what way")
        like = shapes(made)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                state = reader.restore(folder / _STATE, args=ocp.args.StandardRestore(target))
        except (
            Exception
        ) as error:  # whatever Orbax, which the fingerprint does not cover, cannot read
            cause = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            raise DamagedError(f"it cannot be read ({cause})") from error
        return jax.tree.unflatten(
            jax.tree.structure(like), [state[name] for name in _by_name(like)]
        ), made


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of checkpoints in a folder, the newest last. Links and other names are left out."""
    if kind(folder) != "a folder":
        return []
    found = [
        path
        for path in folder.iterdir()
        if _ROUNDS.fullmatch(path.name) and kind(path) == "a folder"
    ]
    return sorted(found, key=lambda path: int(path.name))


def _unfinished(attempt: int) -> str:
    """Return a name for a state that is being written; the first one that is free of foreign files is taken."""
    return _UNFINISHED if attempt == 1 else f"{_UNFINISHED}-{attempt}"


def _is_ours(path: pathlib.Path) -> bool:
    """Return whether nothing has this name, or a folder that holds nothing but the parts of a checkpoint."""
    found = kind(path)
    return found is None or (
        found == "a folder" and all(_PARTS.fullmatch(part.name) for part in path.iterdir())
    )


def _check_own(path: pathlib.Path) -> None:
    """Require that a name of checkpoints is free, or that of a checkpoint."""
    if not _is_ours(path):
        raise ValueError(
            f"{str(path)!r} must be a checkpoint, and no run wrote it. Move it, then run again."
        )


def _remove(path: pathlib.Path) -> None:
    """Remove a checkpoint. What no run wrote stays, such as links, and folders that hold anything else."""
    if kind(path) is not None and _is_ours(path):
        shutil.rmtree(path)


def _resumable(stored: Facts, current: Facts) -> str:
    """Return the remedy that keeps the stored run, if there is one."""
    kept = remedy(stored, current)
    return f"{kept}. For a new run, choose another folder" if kept else ""


def _listed(damaged: list[str]) -> str:
    rest = [f"and {len(damaged) - _SHOWN} more"] if len(damaged) > _SHOWN else []
    return "; ".join(damaged[:_SHOWN] + rest)


def _manifest(folder: pathlib.Path, layout: int | None) -> Facts:
    """Return what a folder's manifest holds, where its facts are of this format (see `fingerprint.FORMAT`)."""
    path = folder / _MANIFEST
    content: Facts = {}
    with contextlib.suppress(
        OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError, MemoryError
    ):
        found = json.loads(read(path))
        if found.pop("sha256") == _of_json(found):
            content = found
    if {"plan", "round"} <= content.keys() and content["fingerprint"].get("format") == layout:
        return content
    if content or (kind(path) is None and (folder / "fingerprint").is_dir()):
        run = str(folder.parent.parent)
        text = (
            f"folder={run!r} holds a run of an older version of jaxfl, which this one does not read"
        )
        raise ValueError(f"{text}. {_REMEDY}")
    raise DamagedError(f"{_MANIFEST} is {'missing' if kind(path) is None else 'damaged'}")


def _check_files(folder: pathlib.Path, sums: dict[str, str]) -> None:
    try:
        present = _sums(folder)
    except OSError as error:
        raise DamagedError(f"its files cannot be read ({error.strerror or error})") from error
    for name, value in sums.items():
        if present.get(name) != value:
            raise DamagedError(f"{name} is {'damaged' if name in present else 'missing'}")


def _sums(folder: pathlib.Path) -> dict[str, str]:
    """Hashes of all files but the manifest, by path."""
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
    """Leaves by path: a flat dict survives empty tuples and NamedTuples unchanged."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
