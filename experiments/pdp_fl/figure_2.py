"""Figure 2: accuracy by round on MNIST in the four cases of budgets.

python -m experiments.pdp_fl.figure_2 --scale paper
"""

from experiments.pdp_fl.setting import cases

if __name__ == "__main__":
    cases("mnist", 20, 2, __doc__)
