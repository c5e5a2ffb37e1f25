"""Figure 5: the same scenario with the noise of (8) and (13), and honest twins.

python -m experiments.padpfl.figure_5 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(5, __doc__)
