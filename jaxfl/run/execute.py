"""Execution of a plan: its folder, its engine and its records, then its loop, then its results."""

import json
import os
import pathlib
from collections.abc import Sequence

import jax

from jaxfl.engine import processes
from jaxfl.engine.interface import Engine
from jaxfl.engine.memo import described, key_of_method, remembered
from jaxfl.engine.program import Points
from jaxfl.engine.resident import Resident
from jaxfl.engine.round import Keys
from jaxfl.engine.streamed import Stream
from jaxfl.report import layout
from jaxfl.run import bars, signals
from jaxfl.run.callbacks import Callback, entered
from jaxfl.run.central import Central
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.costs import traffic_by_point
from jaxfl.run.fingerprint import Facts
from jaxfl.run.folder import check_names, clear
from jaxfl.run.followers import Bar, Callbacks, Health, Saver
from jaxfl.run.health import Watch
from jaxfl.run.kept import check_kept
from jaxfl.run.lock import Lock
from jaxfl.run.loop import SEGMENT_ROUNDS, Loop
from jaxfl.run.plan import RunPlan, Settings
from jaxfl.run.recorder import EvaluationSchedule, Journal, Result
from jaxfl.run.trained import Origin, Snapshot

_PICTURES = 20
"""Largest number of points that each have a picture. A picture takes a third of a second."""


def execute(
    plan: RunPlan,
    lock: Lock,
    folders: Sequence[pathlib.Path | None],
    callbacks: Sequence[Callback] = (),
) -> list[Result]:
    """Run a plan until its last round, or until something stops it, and write the reports.

    Args:
        plan: The plan.
        lock: Lock of the run's folder.
        folders: Folder of the reports of the run, or of each point. None writes nothing.
        callbacks: Callbacks of the run.

    Returns:
        The result of the run, or of each point.
    """
    settings = plan.settings
    _agree_on_options(settings, lock)
    # All arguments are checked before `resume="never"` removes the files of an earlier run.
    central = _central(plan)
    if settings.keep == "best":
        check_kept(plan.stateful, settings.states)
    _prepare(plan, lock, folders)
    loop = _begun(plan, lock, folders, central)
    shown = settings.progress and jax.process_index() == 0
    if loop.restored and loop.checkpoints is not None:
        what_follows = "resuming"
        if loop.finished:
            what_follows = "nothing is computed"
        read = f"round {loop.done} of {settings.rounds} read from {loop.checkpoints.newest()}"
        bars.tell(f"{plan.name}: {read}; {what_follows}", shown)
    with entered(callbacks):
        return _finish(loop, callbacks, shown)


def _agree_on_options(settings: Settings, lock: Lock) -> None:
    """Require the options in all processes that decide when processes wait for one another.

    If they differed, one process would wait for others that never come.
    """
    audit = settings.audit
    options = {
        "folder": "none" if lock.folder is None else "one",
        "chunk": settings.first_chunk,
        "resume": settings.resume,
        "secret_noise": settings.secret_noise,
        "audit": None if audit is None else audit.count,
    }
    processes.agree({name: str(value) for name, value in options.items()})


def _finish(loop: Loop, callbacks: Sequence[Callback], shown: bool) -> list[Result]:
    """Run a loop to its end, and return each run's result. An error leaves reports too."""
    plan = loop.plan
    watch = Watch(
        plan.name,
        plan.clients,
        plan.algorithms,
        public=plan.settings.report == "public",
        central=plan.settings.central is not None,
    )
    try:
        _run_with_followers(loop, callbacks, watch, shown)
    except Exception as error:
        if loop.checkpoints is not None:
            error.add_note(_resume_note(loop.done, loop.checkpoints.newest()))
        raise
    finally:
        # A run that an error stops has reports too, of the rounds so far.
        scores = loop.canary_scores()
        results = [journal.finish(loop.done, own) for journal, own in zip(loop.journals, scores)]
        watch.end(loop.records)
    # After an error the states may be deleted, but only a run without one gets here.
    return _with_states(results, loop)


def _run_with_followers(
    loop: Loop, callbacks: Sequence[Callback], watch: Watch, shown: bool
) -> None:
    """Run a loop to its end with all followers, and let its rounds finish after a signal."""
    plan = loop.plan
    shown = shown and not loop.finished
    bar = bars.progress_bar(plan.name, plan.settings.rounds, shown, loop.done)
    with bar as update, signals.deferred() as asked:
        # Checkpoints come last, because callbacks decide whether the run ends here.
        followers = [Health(watch), Callbacks(callbacks), Bar(update), Saver()]
        try:
            loop.go(followers, asked)
        except KeyboardInterrupt:
            # Another process may have got the signal.
            raise signals.stopped(asked() or loop.signal, loop.where()) from None


def _prepare(plan: RunPlan, lock: Lock, folders: Sequence[pathlib.Path | None]) -> None:
    """Make and check the run's folder, and empty it if the run starts over."""
    if lock.folder is None:
        return
    lock.folder.mkdir(parents=True, exist_ok=True)
    check_names(lock.folder, [path for path in folders if path is not None])
    if plan.settings.resume == "never":
        # Nobody else may use the folder while its files are removed.
        lock.take(shared=False)
        clear(lock.folder, plan.points is not None)


def _begun(
    plan: RunPlan,
    lock: Lock,
    folders: Sequence[pathlib.Path | None],
    central: Central | None,
) -> Loop:
    """Return the loop of a plan at its first round, or where the run in the folder stopped."""
    settings = plan.settings
    folder = lock.folder
    _, key_of_rounds, _ = plan.keys
    bits = settings.streams.bits(plan.key, folder)
    keys = settings.streams.keys(key_of_rounds, bits)
    engine = _engine(plan, keys, folder)
    schedule = plan.schedule(engine)
    journals = _journals(plan, engine, schedule, _written(lock, folders))
    if folder is None and jax.process_count() == 1:
        return Loop(plan, engine, journals, None, central)
    # Several processes must be one run, even if they have no folder.
    facts = _facts(plan, engine, keys, central)
    shared = facts | schedule._asdict()
    processes.agree({name: json.dumps(fact) for name, fact in shared.items()})
    if folder is None:
        return Loop(plan, engine, journals, None, central)
    checkpoints = Checkpoints(folder / layout.CHECKPOINTS, facts, schedule)
    loop = Loop(plan, engine, journals, checkpoints, central)
    if settings.resume == "never":
        checkpoints.clear()
    else:
        _resume(loop, checkpoints, lock)
    # The checkpoint of a resumed run names its bits already.
    if loop.done == 0:
        bits.begin(facts)
    return loop


def _written(lock: Lock, folders: Sequence[pathlib.Path | None]) -> Sequence[pathlib.Path | None]:
    """Return the folders into which this process writes reports, with None for the others."""
    # One process writes for all, and a finished run can also be read from a read-only folder.
    if jax.process_index() == 0 and lock.folder is not None and os.access(lock.folder, os.W_OK):
        return folders
    return [None] * len(folders)


def _facts(plan: RunPlan, engine: Engine, keys: Keys, central: Central | None) -> Facts:
    """Return all facts that a checkpoint of the run must share (see `jaxfl.run.fingerprint`)."""
    facts = plan.facts(engine) | plan.settings.streams.facts(keys)
    if central is not None:
        facts |= central.facts()
    if plan.settings.keep == "best":
        facts["keep"] = "best"
    return facts


def _engine(plan: RunPlan, keys: Keys, folder: pathlib.Path | None) -> Engine:
    """Return the engine of a plan. Client states lie on the devices, or in files for "host"."""
    settings = plan.settings
    method = plan.method
    init_key, _, _ = plan.keys
    devices = settings.devices
    chunk = settings.first_chunk
    if isinstance(method, Points) or settings.states == "device":
        return Resident(init_key, keys, method, plan.clients, devices, chunk, SEGMENT_ROUNDS)
    states: pathlib.Path | None = None
    if folder is not None:
        states = folder / layout.STATES
    return Stream(init_key, keys, method, plan.clients, devices, chunk, states)


def _central(plan: RunPlan) -> Central | None:
    """Return the central test set of a plan, or None if it has none."""
    settings = plan.settings
    if settings.central is None:
        return None
    first = plan.algorithms[0]
    return Central(plan.points or first, first, settings.central, settings.devices)


def _journals(
    plan: RunPlan,
    engine: Engine,
    schedule: EvaluationSchedule,
    folders: Sequence[pathlib.Path | None],
) -> list[Journal]:
    """Return an empty journal of the run, or of each point."""
    settings = plan.settings
    # All points have the same shapes of records.
    record = engine.record()
    facts = settings.streams.describe(plan.key) | {"stateful": engine.stateful}
    # Bytes follow from shapes, so a process counts them once for equal methods.
    key = ("traffic", key_of_method(plan.method), described(engine.population))
    traffic = remembered(key, lambda: traffic_by_point(plan.algorithms, plan.clients))
    return [
        Journal(
            algorithm,
            plan.clients,
            schedule,
            record,
            folder,
            public=settings.report == "public",
            facts=facts,
            pictures=len(plan.algorithms) <= _PICTURES,
            central=settings.central is not None,
            best=settings.keep == "best",
            traffic={"bytes_up": sent.up, "bytes_down": sent.down},
        )
        for algorithm, folder, sent in zip(plan.algorithms, folders, traffic, strict=True)
    ]


def _resume(loop: Loop, checkpoints: Checkpoints, lock: Lock) -> None:
    """Resume from the folder if it holds a state. A finished run is only read."""
    # A finished run is only read, which several processes may do at once.
    lock.take(shared=checkpoints.ends(loop.plan.settings.rounds))
    loop.restore()
    # `ends` reads names alone. If the last checkpoint is damaged, the run continues, and needs the
    # folder for itself.
    if not loop.finished:
        lock.take(shared=False)


def _resume_note(done: int, newest: str | None) -> str:
    """Return the note for an error that ends a run with a folder.

    Args:
        done: Number of finished rounds.
        newest: Path of the last checkpoint, or None before the first one.
    """
    note = f"stopped after round {done}, before the first checkpoint"
    resumed = "begin again"
    if newest is not None:
        note = f"stopped after round {done}; the last checkpoint is {newest}"
        resumed = "resume from it"
    if jax.process_count() == 1:
        return note
    process = f"process {jax.process_index()} of {jax.process_count()}"
    return f"{process} {note}: start all processes again to {resumed}"


def _with_states(results: Sequence[Result], loop: Loop) -> list[Result]:
    """Return the results with the states of server, mechanism and clients."""
    plan = loop.plan
    states = loop.states()
    best: list[Snapshot | None] = [None] * len(results)
    if loop.best is not None:
        best = loop.best.snapshots()
    keys = plan.split(plan.key)
    return [
        result._replace(
            server=center.server,
            memory=center.memory,
            states=states[i],
            restored=loop.restored,
            origin=Origin(plan.algorithms[i], plan.clients, keys[i]),
            best=best[i],
        )
        for i, (result, center) in enumerate(zip(results, loop.centers(), strict=True))
    ]
