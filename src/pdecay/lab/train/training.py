"""Train a task with a method: a run that may be killed at any moment, and goes on to the last bit.

    settings = Settings.of("digits", "padam", scale="quick", p=0.8, lam=0.03)
    record = train(settings, Path("runs/first"))

What a step does depends on the settings, its number and what the checkpoint holds, and on nothing
else: batches and dropout are functions of the seed and of the step's number.
"""

from __future__ import annotations

import functools
import pickle
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from pdecay._core.validation import check_count
from pdecay._optim.attachment import is_decaying
from pdecay._optim.kernels.selection import kernel_for
from pdecay._utils.files import LockedError, lock, remove_unfinished, replacing
from pdecay.lab.bench import steps as bench
from pdecay.lab.tasks import Task, task
from pdecay.lab.train import records
from pdecay.lab.train.records import Record
from pdecay.lab.train.session import Session
from pdecay.lab.train.settings import Settings
from pdecay.lab.train.threads import threads_of

__all__ = ["Progress", "RunError", "Settings", "StoppedError", "train"]

CHECKPOINT, RECORD, WEIGHTS = "checkpoint.pt", "record.jsonl", "weights.pt"


class RunError(Exception):
    """A folder cannot be trained in; the message says why and what to do."""


class StoppedError(Exception):
    """The run was asked to stop, and can go on from the checkpoint that it has written."""


class Progress(Protocol):
    """What is told while a run goes on."""

    def begin(self, settings: Settings, step: int) -> None:
        """The training starts (at step 0) or goes on."""

    def step(self, step: int, loss: float) -> None:
        """So many steps are done; the loss before the last of them."""

    def point(self, point: Mapping[str, Any]) -> None:
        """The model was evaluated: a point of the record's curve."""


def train(
    settings: Settings,
    folder: Path,
    *,
    device: str | None = None,
    threads: int | None = None,
    checkpoint_every: float = 30.0,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Record:
    """Train in a folder, go on with what is there, or give the record if all is done.

    Args:
        settings: what to train.
        folder: gets the checkpoint, and in the end the record and the weights.
        device: where; the CPU by default. A run stays on the device that it started on.
        threads: of torch; as many as it has now by default. A run keeps the number that it
            started with, as sums differ in the last bits.
        checkpoint_every: so many seconds.
        progress: is told how it goes.
        stop: asked after every step; when it says so, a checkpoint is written.

    Raises:
        RunError: the folder has a run of other settings, another process is at work in it, or its
            checkpoint is damaged.
        StoppedError: `stop` said so.
    """
    if threads is not None:
        check_count("threads", threads)
    if device is not None:
        _check_device(device)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder):
            finished = _finished(settings, folder)
            if finished is None:
                remove_unfinished(folder)
                run = _Run(settings, folder, device, threads, checkpoint_every)
                finished = run.complete(progress, stop)
            (folder / CHECKPOINT).unlink(missing_ok=True)
            return finished
    except LockedError as error:
        raise RunError(str(error)) from error  # the cause tells callers that they may retry


class _Run:
    """One process's part in a run, from a checkpoint or from the start."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        device: str | None,
        threads: int | None,
        checkpoint_every: float,
    ) -> None:
        self.settings, self.folder, self.checkpoint_every = settings, folder, checkpoint_every
        self.saved = _load(folder / CHECKPOINT, settings)
        kept = self.saved or {}
        self.device = _kept(folder, "device", device, kept.get("device"), "cpu")
        self.threads = _kept(
            folder, "threads", threads, kept.get("threads"), torch.get_num_threads()
        )
        self.started = kept.get("started", _now())
        self.seconds = kept.get("seconds", 0.0)
        self.resumed = kept["resumed"] + 1 if kept else 0
        self.environments: list[dict[str, Any]] = kept.get("environments", [])
        self.began = time.monotonic()

    def complete(self, progress: Progress | None, stop: Callable[[], bool]) -> Record:
        settings = self.settings
        with torch.random.fork_rng(), threads_of(self.threads):
            session = Session(
                _job(settings.task, settings.scale, self.device),
                settings.build(),
                seed=settings.seed,
                lr=settings.lr,
                steps=settings.steps,
            )
            self._enter(session.run.optimizer)
            if self.saved is not None:
                session.load_state_dict(self.saved["session"])
                self.saved = None  # the memory of a second model and its moments
            if progress is not None:
                progress.begin(settings, session.step)
            self._walk(session, progress, stop)
            result = session.finish()
        if progress is not None:
            progress.point(session.curve[-1])
        with replacing(self.folder / WEIGHTS) as file:
            torch.save(session.model.state_dict(), file)
        record = self._record(session, result)
        records.write(self.folder / RECORD, [record])
        return record

    def _enter(self, optimizer: Optimizer) -> None:
        """Note where we are; on another machine a run goes on, but no longer to the last bit."""
        here = _environment(optimizer, self.device, self.threads)
        if self.environments and self.environments[-1]["kernel"] != here["kernel"]:
            raise RunError(
                f"the run in {self.folder} took its steps by {self.environments[-1]['kernel']} and "
                f"would take them by {here['kernel']} now, with other last bits: see what the "
                "warning says of the C kernel, or delete the folder to start again"
            )
        if not self.environments or self.environments[-1] != here:
            self.environments.append(here)

    def _walk(self, session: Session, progress: Progress | None, stop: Callable[[], bool]) -> None:
        last_save = time.monotonic()
        while not session.done:
            if session.at_a_mark:
                point = session.add_point()
                if progress is not None:
                    progress.point(point)
                if session.diverged:
                    return
            loss = session.advance()
            if progress is not None:
                progress.step(session.step, loss)
            asked = stop() and not session.done
            if asked or time.monotonic() - last_save >= self.checkpoint_every:
                self._save(session)
                last_save = time.monotonic()
            if asked:
                raise StoppedError(f"stopped at step {session.step} of {session.steps}")

    def _save(self, session: Session) -> None:
        if session.diverged:
            return  # the step before it is what leads there again
        state = {
            "settings": self.settings.to_dict(),
            "device": self.device,
            "threads": self.threads,
            "started": self.started,
            "seconds": self._seconds(),
            "resumed": self.resumed,
            "environments": self.environments,
            "session": session.state_dict(),
        }
        with replacing(self.folder / CHECKPOINT) as file:
            torch.save(state, file)

    def _seconds(self) -> float:
        return float(self.seconds + time.monotonic() - self.began)

    def _record(self, session: Session, result: dict[str, Any]) -> Record:
        *before, environment = self.environments
        return {
            "schema": records.SCHEMA,
            "id": self.settings.id,
            "settings": self.settings.to_dict(),
            "result": result,
            "curve": session.curve,
            "status": "diverged" if session.diverged else "ok",
            "environment": {**environment, "before": before} if before else environment,
            "timing": {
                "started": self.started,
                "finished": _now(),
                "seconds": round(self._seconds(), 3),
                "resumed": self.resumed,
            },
        }


def _environment(optimizer: Optimizer, device: str, threads: int) -> dict[str, Any]:
    machine = bench.machine()
    return {
        "pdecay": machine["pdecay"],
        "torch": str(machine["torch"]),  # a subclass of str, which no checkpoint may hold
        "python": platform.python_version(),
        "platform": machine["system"],
        "processor": machine["processor"],
        "threads": threads,
        "device": device,
        "kernel": _kernel(optimizer),
    }


def _kernel(optimizer: Optimizer) -> str:
    """By which of pdecay's ways the steps go; they agree to about 1e-6, not to the last bit."""
    group = optimizer.param_groups[0]
    path = kernel_for(group["params"][0], group.get("fused")) if is_decaying(optimizer) else None
    return "torch" if path is None else path.__name__.rpartition(".")[2]


@functools.lru_cache(maxsize=1)  # a sweep's next run has the same task: its data are read once
def _job(name: str, scale: str, device: str) -> Task:
    return task(name, scale, device=device)


def _finished(settings: Settings, folder: Path) -> Record | None:
    path = folder / RECORD
    if not path.exists():
        return None
    (record,) = records.read(path)
    _check_same(folder, record["settings"], settings)
    return record


def _load(path: Path, settings: Settings) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        there = saved["settings"]
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        reason = "it has more in it than numbers and tensors"
        if not isinstance(error, pickle.UnpicklingError):
            reason = str(error).partition("\n")[0]
        raise RunError(
            f"{path} is no checkpoint of a run ({reason}): it was altered or cut short; delete "
            "it to start the run again"
        ) from None
    _check_same(path.parent, there, settings)
    return saved


def _check_same(folder: Path, there: Mapping[str, Any], settings: Settings) -> None:
    asked = settings.to_dict()
    if there == asked:
        return
    flat_there, flat_asked = ({**one, **one["options"]} for one in (there, asked))
    differing = [
        f"{name} is {flat_there.get(name)!r} there and {flat_asked.get(name)!r} here"
        for name in dict.fromkeys([*flat_there, *flat_asked])
        if name != "options" and flat_there.get(name) != flat_asked.get(name)
    ]
    raise RunError(
        f"{folder} has a run of other settings ({'; '.join(differing)}): choose another folder, "
        "or delete that one"
    )


def _kept(folder: Path, name: str, asked: Any, kept: Any, default: Any) -> Any:
    """How a run was started is how it goes on, and whoever asks for another way is told."""
    if kept is None:
        return default if asked is None else asked
    if asked is not None and asked != kept:
        raise RunError(
            f"the run in {folder} started with {name} {kept!r}, and goes on to the last bit only "
            f"so: ask for {kept!r}, not {asked!r}, or choose another folder"
        )
    return kept


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
