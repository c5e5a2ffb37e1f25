"""Sources of a run's randomness: its key, or fresh system bits that only the owner can read."""

import collections
import hashlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl._support import files
from jaxfl.engine import processes
from jaxfl.engine.round import Keys
from jaxfl.privacy.noise import derive
from jaxfl.report import layout
from jaxfl.run import fingerprint

_BYTES = 16
"""Bytes of the secret bits of one run."""

_DIGEST_BYTES = 32
"""Bytes of the digest (SHA-256) of run and folder, which follows the bits in the file.

Files of earlier versions have no digest.
"""

_BITS_REMEDY = (
    "Put the run's own file back, start over with resume='never', which draws new bits, or choose "
    "another folder."
)
"""Remedy of errors about the file of the bits."""

_LARGEST_INDEX = 2**32 - 1
"""Largest number from which a key can be derived."""

_POINT = 2**31
"""Number that derives keys of points. No round has it, so points share no key with rounds."""


class Streams(NamedTuple):
    """Rule by which a run's streams of randomness follow from its key, or from secret bits."""

    secret: bool
    """Whether cohorts and noise come from fresh bits of the system."""
    paired: bool = False
    """Whether points of one key, or with secret bits all points, share cohorts and noise."""
    numbers: tuple[int, ...] | None = None
    """Number of each point among the points of its key, from 0. None numbers them in order."""

    def bits(self, key: Key[Array, "*P"], folder: pathlib.Path | None) -> "SecretBits":
        """Return the secret bits of one run, or of each point, read from the folder or drawn.

        Paired points share the bits of one run. Without `secret` there are no bits.
        """
        if not self.secret:
            count = 0
        elif self.paired:
            count = 1
        else:
            count = key.size
        path = None
        if folder is not None:
            path = folder / layout.NOISE_KEY
        return SecretBits(count, path)

    def keys(self, key: Key[Array, "*P"], bits: "SecretBits") -> Keys:
        """Return the streams of one run, or of each point, which follow from key and bits."""
        if not self.secret:
            own = key
            if key.ndim and not self.paired:
                own = _separated(key, self.numbers)
            # The clients' own draws come from `key`, which several points may share.
            return Keys(key, own, own)
        # Process 0 alone reads the file, so the other processes have drawn other bits.
        words = jnp.asarray(processes.of_first(bits.words))
        noise = jax.random.wrap_key_data(words, impl="threefry2x32")
        # Paired points have one pair of keys, which all of them get.
        noise = jnp.broadcast_to(noise, (key.size, 2)).reshape(*key.shape, 2)
        return Keys(key, noise, noise)

    def describe(self, key: Key[Array, "*P"]) -> dict[str, Any]:
        """Return the privacy statement's entries `randomness` ("secret" or "seed") and `paired`.

        `paired` is True only if some points do share noise.
        """
        equal = key.ndim > 0 and len(np.unique(jax.random.key_data(key), axis=0)) < len(key)
        source = "secret" if self.secret else "seed"
        # Paired points have the same secret bits, whatever their keys.
        shared = equal or (self.secret and key.size > 1)
        return {"randomness": source, "paired": self.paired and shared}

    def facts(self, keys: Keys) -> fingerprint.Facts:
        """Return facts that distinguish runs of one key. Hashes stand for keys."""
        facts: fingerprint.Facts = {"noise_key": None, "paired_noise": self.paired}
        if self.secret:
            # Nobody can guess 128 random bits, so their hash does not reveal them.
            facts["noise_key"] = fingerprint.of_key(keys.noise)["key"]
        # Cohorts of points also depend on `numbers`, which no other fact covers.
        if keys.clients.ndim and not self.secret and not self.paired:
            facts["cohort_key"] = fingerprint.of_key(keys.cohort)["key"]
        return facts


def _separated(key: Key[Array, "P"], numbers: Sequence[int] | None) -> Key[Array, "P"]:
    """Derive a key for each point from its number. Number 0 keeps its key, as in `simulate`."""
    if numbers is None:
        numbers = _order(key)
    derived = [
        derive(one, _POINT, number) if number else one
        for one, number in zip(key, numbers, strict=True)
    ]
    return jnp.stack(derived)


def check_apart(key: Key[Array, "P"], numbers: Sequence[int]) -> None:
    """Require different numbers for points of one key, because equal numbers would share noise.

    Raises:
        ValueError: Two points of one key have the same number, or a number exceeds 2**32 - 1.
    """
    if largest := [number for number in numbers if number > _LARGEST_INDEX]:
        raise ValueError(
            f"numbers must be at most {_LARGEST_INDEX}, got {largest[0]}. Number the points from 0."
        )
    keys = np.asarray(jax.random.key_data(key))
    points = [(data.tobytes(), number) for data, number in zip(keys, numbers)]
    if len(set(points)) < len(points):
        raise ValueError(
            f"numbers must differ for points of one key, got {list(numbers)}. Give each of these "
            "points its own number, or pass paired_noise=True to let them share cohorts and noise."
        )


def _order(key: Key[Array, "P"]) -> list[int]:
    """Return for each key the number of equal keys before it."""
    uses = collections.Counter[bytes]()
    numbers = []
    for data in np.asarray(jax.random.key_data(key)):
        numbers.append(uses[data.tobytes()])
        uses[data.tobytes()] += 1
    return numbers


class SecretBits:
    """Secret bits of a run, and their file in its folder, which names the run that owns them.

    A run that starts from a checkpoint has the bits that the checkpoint names by their hash. A run
    that starts from the beginning has bits that were drawn for it: new ones, or those that the same
    run left in the folder when it died before its first checkpoint. By then somebody may have read
    the first rows of that run's metrics. The same run must therefore repeat these rows with the
    same noise, and any other run must have other noise.

    Args:
        count: Number of runs that have bits of their own. With 0 there are neither bits nor a file.
        path: Path of the file. None writes no file. The first of several processes reads and writes
            the file.

    Raises:
        ValueError: The file cannot be read, belongs to another user, can be read by others, has
            another size, or has only zeros for a run.
    """

    def __init__(self, count: int, path: pathlib.Path | None) -> None:
        self._path = path
        if not count:
            self._path = None
        self._size = _BYTES * count
        self._found: bytes | None = None
        if self._path is not None:
            self._found = processes.by_first(self._read)
        # In the file, a digest may follow the bits.
        self._bits = (self._found or secrets.token_bytes(self._size))[: self._size]
        words = np.frombuffer(self._bits, np.uint32)
        self.words: UInt32[np.ndarray, "P 2 2"] = words.reshape(count, 2, 2)
        """Bits of each run as two keys of two words."""

    def begin(self, run: fingerprint.Facts) -> None:
        """Keep the bits for a run that starts from the beginning.

        Raises:
            ValueError: The file's bits were drawn for another run, or in another folder. Or the
                file system lets others than the owner read the new file.
            OSError: The file cannot be written.
        """
        if self._path is not None:
            processes.by_first(lambda: self._keep(run))

    def _read(self) -> bytes | None:
        """Return the content of the file, or None if there is no file.

        Raises:
            ValueError: The file cannot be read, belongs to another user, can be read by others, has
                another size, or has only zeros for a run.
        """
        path = self._path
        if path is None or files.kind(path) is None:
            return None
        try:
            with files.opened(path) as file:
                status = os.fstat(file.fileno())
                # The open file is checked, because its path may lead to another file by now.
                _check_permissions(path, status)
                if status.st_size not in (self._size, self._size + _DIGEST_BYTES):
                    wanted = f"the secret bits of {self._size // _BYTES} runs"
                    raise ValueError(
                        f"{str(path)!r} must hold {wanted}, got {status.st_size} bytes. "
                        f"{_BITS_REMEDY}"
                    )
                content = file.read(status.st_size)
        except OSError as error:
            raise ValueError(
                f"{str(path)!r} must be a file that this process can use, got one that it cannot "
                f"({error}). {_BITS_REMEDY}"
            ) from error
        # Some file systems leave zeros where a crash has lost the content.
        starts = range(0, self._size, _BYTES)
        if not all(any(content[start : start + _BYTES]) for start in starts):
            raise ValueError(f"{str(path)!r} must hold random bits, got only zeros. {_BITS_REMEDY}")
        return content

    def _keep(self, run: fingerprint.Facts) -> None:
        assert self._path is not None
        path = self._path
        # A killed process may have left secret bits in a temporary file.
        for other in files.leftovers(path):
            other.unlink(missing_ok=True)
        # The folder is a part of the digest, so a copy of the file is of no use in another folder.
        named = json.dumps([str(path.parent.resolve()), run], sort_keys=True)
        content = self._bits + hashlib.sha256(named.encode()).digest()
        if self._found is None:
            try:
                files.write_secret(path, content)
            except OSError as error:
                text = (
                    f"the folder must keep the secret bits, got {error.strerror!r}. Make room, or "
                    "choose another folder"
                )
                raise OSError(error.errno, text, str(path)) from error
            try:
                self._found = self._read()
            except ValueError:
                # Some file systems keep neither owner nor mode.
                path.unlink(missing_ok=True)
                raise
        # Bits without a digest may be of any run, so they do not pass.
        if self._found != content:
            raise ValueError(
                f"{str(path)!r} must hold bits of this run, got bits that were drawn for another "
                f"run or in another folder. Their noise must not be used twice. {_BITS_REMEDY}"
            )


def _check_permissions(path: pathlib.Path, found: os.stat_result) -> None:
    """Require that only the user of this process can open the file."""
    # Windows has no such modes.
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != os.geteuid():
        raise ValueError(
            f"{str(path)!r} must belong to user {os.geteuid()}, got user {found.st_uid}. "
            f"{_BITS_REMEDY}"
        )
    if found.st_mode & 0o077:
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        raise ValueError(
            f"{str(path)!r} must be open to its owner alone, got {mode}. "
            f"If nobody else has read it, call `chmod 600` for it. {_BITS_REMEDY}"
        )
