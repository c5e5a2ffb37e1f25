"""Checkpoints of a run: everything a later call needs to go on bit-identically."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxfl import hosts
from jaxfl.types import Tree

_BEFORE = {"store": "device"}
"""What held before a fingerprint said so."""


class Checkpoints:
    """The newest two states of a run in one folder, written atomically.

    Args:
        folder: made if absent.
        fingerprint: what must agree for a state to belong to this run (JSON values).
    """

    def __init__(self, folder: pathlib.Path, fingerprint: dict[str, Any]) -> None:
        self._fingerprint = fingerprint
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, rounds: int, state: Tree) -> None:
        """Write the state after `rounds` rounds; a kill leaves the previous one intact."""
        if rounds in self._manager.all_steps():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)), fingerprint=ocp.args.JsonSave(self._fingerprint)
        )
        self._manager.save(rounds, args=items)

    def restore(self, like: Tree) -> tuple[int, Tree] | None:
        """The newest state with its number of rounds, on the devices that `like` is on; None if there is none.

        Raises:
            ValueError: the folder holds another run, or is not the same one for all processes.
        """
        rounds, folder = self._manager.latest_step(), self._manager.directory
        seen = -1 if not folder.exists() else rounds or 0
        most, least = hosts.largest(seen, -seen)
        if most != -least:
            raise ValueError(f"folder={str(folder.parent)!r} differs by process: give one that all of them share")
        if rounds is None:
            return None
        found = self._manager.restore(rounds, args=ocp.args.Composite(fingerprint=ocp.args.JsonRestore()))
        for name, value in self._fingerprint.items():
            if found["fingerprint"].get(name, _BEFORE.get(name)) != value:
                raise ValueError(
                    f"folder={str(self._manager.directory.parent)!r} holds a run with {name}="
                    f"{found['fingerprint'].get(name)!r}, not {value!r}: choose another folder or delete this one"
                )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        restored = self._manager.restore(rounds, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        leaves = [restored["state"][name] for name in _by_name(like)]
        return rounds, jax.tree.unflatten(jax.tree.structure(like), leaves)

    def newest(self) -> str:
        """Where the newest state is, if anywhere."""
        rounds = self._manager.latest_step()
        return "none" if rounds is None else str(self._manager.directory / str(rounds))

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()


def _by_name(tree: Tree) -> dict[str, Any]:
    """Leaves by path: a flat dict survives empty tuples and NamedTuples unchanged."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
