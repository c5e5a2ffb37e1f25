"""Where a run's randomness comes from: its key, or fresh bits of the system that only the owner can read."""

import collections
import os
import pathlib
import secrets
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl.engine import processes
from jaxfl.engine.round import Keys
from jaxfl.privacy.noise import derive
from jaxfl.run import fingerprint, report

_POINT = 2**31
"""No round has this number: keys of points are derived apart from those of rounds."""


class Streams(NamedTuple):
    """How a run's streams follow from its key."""

    secret: bool
    """Cohorts and noise from fresh bits of the system."""
    paired: bool = False
    """The same noise for points of the same key."""

    def keys(self, key: Key[Array, "*P"], folder: pathlib.Path | None) -> Keys:
        """The streams of one run, or of each point; secret ones from the folder, or new."""
        if not self.secret:
            return Keys(key, key, key if self.paired or not key.ndim else _apart(key))
        count = 1 if self.paired else key.size
        bits = _secret_bits(count, folder if jax.process_index() == 0 else None)
        noise = jax.random.wrap_key_data(jnp.asarray(processes.of_first(bits)), impl="threefry2x32")
        noise = jnp.broadcast_to(noise, (key.size, 2)).reshape(*key.shape, 2)
        return Keys(key, noise, noise)

    def told(self, key: Key[Array, "*P"]) -> dict[str, Any]:
        """What a statement says about the randomness."""
        equal = key.ndim > 0 and len(np.unique(jax.random.key_data(key), axis=0)) < len(key)
        return {"randomness": "secret" if self.secret else "seed", "paired": self.paired and equal}

    def facts(self, keys: Keys) -> fingerprint.Facts:
        """What distinguishes runs of one key; a hash, which reveals no secret key."""
        secret = fingerprint.of_key(keys.noise)["key"] if self.secret else None
        return {"the secret key of the noise": secret, "paired_noise": self.paired}


def _apart(key: Key[Array, "P"]) -> Key[Array, "P"]:
    """Distinct keys: of equal ones the first is kept, as in `simulate`."""
    uses, apart = collections.Counter[bytes](), []
    for one_key, data in zip(key, np.asarray(jax.random.key_data(key))):
        number = uses[data.tobytes()]
        uses[data.tobytes()] += 1
        apart.append(derive(one_key, _POINT, number) if number else one_key)
    return jnp.stack(apart)


def _secret_bits(count: int, folder: pathlib.Path | None) -> UInt32[np.ndarray, "P 2 2"]:
    """128 bits for each point: those in the folder, or fresh ones, which only the owner may read there."""
    path = None if folder is None else folder / report.NOISE_KEY
    if path is not None and path.exists():
        bits = np.frombuffer(path.read_bytes(), np.uint32)
        if bits.size != 4 * count:
            raise ValueError(f"{str(path)!r} holds {bits.size // 4} keys, not {count}: choose another folder")
        return bits.reshape(count, 2, 2)
    fresh = secrets.token_bytes(16 * count)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(fresh)
    return np.frombuffer(fresh, np.uint32).reshape(count, 2, 2)
