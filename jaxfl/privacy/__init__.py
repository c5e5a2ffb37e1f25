"""Clip, noise, who adds it, and what it guarantees."""

from jaxfl.privacy.accounting import calibrate, calibrate_upload, epsilon, planned_ledger
from jaxfl.privacy.mechanism import FixedSize, Full, Mechanism, Poisson
from jaxfl.privacy.statement import format_statement, privacy_statement

__all__ = [
    "FixedSize", "Full", "Mechanism", "Poisson", "calibrate", "calibrate_upload", "epsilon", "format_statement",
    "planned_ledger", "privacy_statement",
]  # fmt: skip
