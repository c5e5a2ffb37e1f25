"""Run on two nodes of a Ray cluster with four GPUs each: python ray_train.py FOLDER [ROUNDS].

Ray starts JAX's distributed runtime in each worker, so that no launcher is needed.
"""

import pathlib
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def work(config: dict) -> None:
    """Run `main` of `run.py` in one worker.

    Args:
        config: The folder of the run as `folder`, and as `rounds` a sequence with the number of
            rounds, which is empty for the default of `run.py`.
    """
    # The driver must not start JAX, so only workers import it.
    import run

    import jaxfl

    jaxfl.configure()
    run.main(config["folder"], *config["rounds"])


def main(folder: str, *rounds: int) -> None:
    """Start one worker per node, and start all of them again if one is lost.

    Args:
        folder: Folder of the run, on a file system that all nodes share.
        rounds: Number of rounds. Without it, the default of `run.py` counts.
    """
    # Ray copies the files next to this one to the workers, and they import `run` there.
    ray.init(runtime_env={"working_dir": str(pathlib.Path(__file__).parent)})
    trainer = JaxTrainer(
        work,
        # Workers run in a folder of their own.
        train_loop_config={"folder": str(pathlib.Path(folder).absolute()), "rounds": rounds},
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=True,
            # A worker takes all GPUs of its node.
            resources_per_worker={"GPU": 4},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name="jaxfl",
            storage_path=str(pathlib.Path(folder).absolute().parent / "ray"),
            # Workers are started again at most three times, and resume from the last checkpoint.
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
