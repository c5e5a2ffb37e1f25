"""Libraries that take long to import, which many programs never use: imported at the first use."""

import importlib
from typing import Any


class _Lazy:
    """Stand-in for a module, which is imported when an attribute of it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # Python keeps the modules that it has imported, so only the first call takes long.
        return getattr(importlib.import_module(self._name), attribute)


dp_accounting: Any = _Lazy("dp_accounting")
nnx: Any = _Lazy("flax.nnx")
orbax: Any = _Lazy("orbax.checkpoint")
safetensors: Any = _Lazy("safetensors")
safetensors_numpy: Any = _Lazy("safetensors.numpy")
