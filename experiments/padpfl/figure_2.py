"""Figure 2: loss by round for five ways to weight clients of unequal data quality, no privacy.

python -m experiments.padpfl.figure_2 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(2, __doc__)
