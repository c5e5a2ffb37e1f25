"""Differentially private, personalized federated learning with thousands of simulated clients."""

from jaxfl import algorithms, data, models, privacy, tasks
from jaxfl.engine.memo import clear_caches
from jaxfl.local import LocalSGD
from jaxfl.models.saved import load_model
from jaxfl.models.trained import TrainedModel
from jaxfl.report.comparison import Comparison
from jaxfl.report.page import write_report
from jaxfl.report.plan_page import write_plan
from jaxfl.run import callbacks
from jaxfl.run.attack import membership
from jaxfl.run.candidates import Candidate, grid, spread
from jaxfl.run.compare import compare
from jaxfl.run.costs import Clock, deployment_cost, plot_costs, traffic
from jaxfl.run.evaluate import evaluate
from jaxfl.run.flags import configure
from jaxfl.run.recorder import Result
from jaxfl.run.simulate import simulate, sweep
from jaxfl.tasks import Metric, Task
from jaxfl.types import Algorithm, ClientData, Clients, Ledger, Message, Model, Terms

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Candidate",
    "ClientData",
    "Clients",
    "Clock",
    "Comparison",
    "Ledger",
    "LocalSGD",
    "Message",
    "Metric",
    "Model",
    "Result",
    "Task",
    "Terms",
    "TrainedModel",
    "algorithms",
    "callbacks",
    "clear_caches",
    "compare",
    "configure",
    "data",
    "deployment_cost",
    "evaluate",
    "grid",
    "load_model",
    "membership",
    "models",
    "plot_costs",
    "privacy",
    "simulate",
    "spread",
    "sweep",
    "tasks",
    "traffic",
    "write_plan",
    "write_report",
]
