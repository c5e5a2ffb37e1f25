"""Clip, noise, who adds it, and what it guarantees."""

from jaxfl.privacy.accounting import (
    calibrate,
    calibrate_examples,
    calibrate_upload,
    epsilon,
    example_epsilon,
    planned_ledger,
)
from jaxfl.privacy.mechanism import FixedSize, Full, Mechanism, PerExample, Poisson
from jaxfl.privacy.statement import format_statement, privacy_statement

__all__ = [
    "FixedSize", "Full", "Mechanism", "PerExample", "Poisson", "calibrate", "calibrate_examples", "calibrate_upload",
    "epsilon", "example_epsilon", "format_statement", "planned_ledger", "privacy_statement",
]  # fmt: skip
