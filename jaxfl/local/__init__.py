"""What a client does: local training, and what it computes from its own examples."""

from jaxfl.local.train import LocalSGD

__all__ = ["LocalSGD"]
