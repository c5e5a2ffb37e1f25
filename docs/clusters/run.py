"""Train DP-FedAvg on handwritten digits, and write the results into a folder.

A recipe starts one such process per node: python -m jaxfl launch run.py FOLDER [ROUNDS]
"""

import sys

import jax
import optax

from jaxfl import LocalSGD, algorithms, data, models, privacy, simulate


def main(folder: str, rounds: int = 30) -> None:
    """Run the method, or resume it from the folder's newest checkpoint.

    Args:
        folder: Folder of the run, on a file system that all nodes share.
        rounds: Number of rounds.
    """
    digits = data.load("digits")
    rows = data.classes_per_client(digits.train_labels, digits.test_labels, 100, 3, seed=0)
    clients = data.make_clients(digits, *rows)
    sampling = privacy.Poisson(0.2)
    noise = privacy.calibrate(8.0, clients=100, rounds=rounds, sampling=sampling)
    method = algorithms.dp_fedavg(
        models.mlp((8, 8, 1), 10, hidden=()),
        local=LocalSGD(optax.sgd(0.3), batch_size=4, epochs=3),
        clip=1.0,
        noise_multiplier=noise,
        sampling=sampling,
    )
    result = simulate(0, method, clients, rounds=rounds, folder=folder, progress=False)
    if jax.process_index() == 0:
        accuracy = result.metrics[-1]["accuracy"]
        epsilon = result.statement["honest"]["aggregate"]["epsilon"]
        print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
