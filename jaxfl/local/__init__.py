"""Work of one client: local training, and statistics of its own examples."""

from jaxfl.local.train import LocalSGD

__all__ = ["LocalSGD"]
