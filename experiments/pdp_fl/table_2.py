"""Table 2: FedAvg, GDP-FL, LDP-Fed and PDP-FL on MNIST after two rounds.

python -m experiments.pdp_fl.table_2 --scale paper
"""

from experiments.pdp_fl.setting import comparison

if __name__ == "__main__":
    comparison("mnist", 2, 2, __doc__)
