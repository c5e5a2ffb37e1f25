"""Clipping, noise, sampling, mechanisms, accounting and statements of privacy."""

from jaxfl.privacy.accounting.calibration import calibrate, calibrate_examples, calibrate_upload
from jaxfl.privacy.accounting.ledgers import epsilon, example_epsilon, planned_ledger
from jaxfl.privacy.accounting.planning import largest_cohort, most_rounds, plan
from jaxfl.privacy.audit import Canaries
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.dropouts import Dropouts
from jaxfl.privacy.mechanisms import (
    AdaptiveClip,
    BandedNoise,
    BLTNoise,
    Extrapolated,
    Krum,
    Mechanism,
    Median,
    PrivacyFilter,
    PrivateMask,
    Release,
    Skellam,
    TrimmedMean,
    blt,
)
from jaxfl.privacy.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Full,
    MinSeparation,
    Poisson,
    Sampling,
)
from jaxfl.privacy.schedule import (
    client_noise,
    fixed_budgets,
    paper_noise,
    round_budgets,
    round_noise,
)
from jaxfl.privacy.statement import format_statement, privacy_statement

__all__ = [
    "DPSGD", "AdaptiveClip", "BLTNoise", "BallsInBins", "BandedNoise", "Canaries", "CyclicPoisson",
    "Dropouts", "Extrapolated", "FixedSize", "Full", "Krum", "Mechanism", "Median", "MinSeparation",
    "Poisson", "PrivacyFilter", "PrivateMask", "Release", "Sampling", "Skellam", "TrimmedMean",
    "blt", "calibrate",
    "calibrate_examples", "calibrate_upload", "client_noise", "epsilon", "example_epsilon",
    "fixed_budgets", "format_statement", "largest_cohort", "most_rounds", "paper_noise", "plan",
    "planned_ledger", "privacy_statement", "round_budgets", "round_noise",
]  # fmt: skip
