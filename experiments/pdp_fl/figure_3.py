"""Figure 3: accuracy by round on CIFAR-10 in the four cases of budgets.

python -m experiments.pdp_fl.figure_3 --scale paper
"""

from experiments.pdp_fl.setting import cases

if __name__ == "__main__":
    cases("cifar10", 20, 3, __doc__)
