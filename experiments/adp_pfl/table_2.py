"""Table 2: fixed against round-level budgets; what the claimed epsilons are, and what honest ones allow.

python -m experiments.adp_pfl.table_2 --dataset mnist --scale paper
"""

from experiments.adp_pfl.setting import BUDGETS, HONEST, LOCAL, PER_ROUND, PLAIN, SUMMED, Entry, run

if __name__ == "__main__":
    claimed, honest = (3.0, 6.0, 9.0), (1.0, 3.0, 6.0, 9.0)
    run(
        "table_2",
        __doc__,
        lambda _: [
            LOCAL,
            PLAIN,
            *(Entry(method, HONEST, honest) for method in BUDGETS),
            *(Entry(method, reading, claimed) for reading in (SUMMED, PER_ROUND) for method in BUDGETS),
        ],
    )
