"""Table 3: FedAvg, GDP-FL, LDP-Fed and PDP-FL on CIFAR-10 after ten rounds.

python -m experiments.pdp_fl.table_3 --scale paper
"""

from experiments.pdp_fl.setting import comparison

if __name__ == "__main__":
    comparison("cifar10", 10, 3, __doc__)
