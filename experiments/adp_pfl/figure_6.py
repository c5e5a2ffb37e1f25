"""Figure 6: the percentile of Fisher information above which coordinates are kept, at epsilon 5.

python -m experiments.adp_pfl.figure_6 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import HONEST, PER_ROUND
from experiments.adp_pfl.tables import LOCAL, Entry, run

if __name__ == "__main__":
    run(
        "figure_6",
        __doc__,
        lambda setting: [
            LOCAL,
            *(Entry("Fisher", reading, (5.0,), setting.percentiles) for reading in (HONEST, PER_ROUND)),
        ],
    )
