"""Table 2: fixed against round-level budgets; what the claimed epsilons are, and what honest ones allow.

python -m experiments.adp_pfl.table_2 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import BUDGETS, HONEST, HONEST_EPSILONS, PER_ROUND
from experiments.adp_pfl.tables import LOCAL, PLAIN, Entry, run

if __name__ == "__main__":
    run(
        "table_2",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, HONEST_EPSILONS) for method in BUDGETS),
            *(Entry(method, PER_ROUND, (3.0, 6.0, 9.0)) for method in BUDGETS),
        ],
    )
