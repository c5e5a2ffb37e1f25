"""Privacy mechanisms, one per file, each with its noise and its accounting."""

from jaxfl.privacy.mechanisms.adaptive_clip import AdaptiveClip
from jaxfl.privacy.mechanisms.correlated import BandedNoise, BLTNoise, blt
from jaxfl.privacy.mechanisms.extrapolated import Extrapolated
from jaxfl.privacy.mechanisms.gaussian import Mechanism
from jaxfl.privacy.mechanisms.privacy_filter import PrivacyFilter, Release
from jaxfl.privacy.mechanisms.private_mask import PrivateMask
from jaxfl.privacy.mechanisms.robust import Krum, Median, TrimmedMean
from jaxfl.privacy.mechanisms.skellam import Skellam

__all__ = [
    "AdaptiveClip", "BLTNoise", "BandedNoise", "Extrapolated", "Krum", "Mechanism", "Median",
    "PrivacyFilter", "PrivateMask", "Release", "Skellam", "TrimmedMean",
    "blt",
]  # fmt: skip
