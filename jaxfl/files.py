"""Files that are complete or absent, and the cache folder."""

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def cache_folder() -> Path:
    """`JAXFL_CACHE_DIR`, by default `~/.cache/jaxfl`; it may not exist yet."""
    return Path(os.environ.get("JAXFL_CACHE_DIR") or "~/.cache/jaxfl").expanduser()


def write_json(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """Write JSON atomically: a reader sees the old file or the new one, never half of one."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows as JSON lines, atomically; a value that is not finite becomes null."""
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps({k: _plain(v) for k, v in row.items()}) + "\n" for row in rows))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays as one .npz, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block succeeds."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)  # with the permissions that the user's umask gives
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
