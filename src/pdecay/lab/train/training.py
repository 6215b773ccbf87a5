"""Train one run in a folder, with checkpoints, and write its record.

    settings = Settings.of("digits", "padam", scale="quick", p=0.8, lam=0.03)
    record = train(settings, Path("runs/first"))

A run that was killed at any time continues from its checkpoint with bit-identical results, as long
as the threads, the device and the kernel are the same. The loop is in :mod:`pdecay.lab.train.loop`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from pdecay._core.validation import check_count
from pdecay._optim.attachment import is_decaying
from pdecay._optim.kernels.selection import kernel_for
from pdecay._utils.errors import UserError
from pdecay._utils.files import LockedError, lock, remove_unfinished, replacing
from pdecay.lab import machine
from pdecay.lab.tasks import cached_task
from pdecay.lab.train import checkpoint, records
from pdecay.lab.train.loop import Trainer
from pdecay.lab.train.records import Record
from pdecay.lab.train.run_settings import Settings

__all__ = ["Progress", "RunError", "Settings", "StoppedError", "train"]

CHECKPOINT, RECORD, WEIGHTS = "checkpoint.pt", "record.jsonl", "weights.pt"


class RunError(UserError):
    """A run that cannot start or resume in its folder. The message says why and what to do."""


class StoppedError(Exception):
    """A run that was asked to stop. It can resume from its checkpoint."""


class Progress:
    """Callbacks that report the progress of a run; these report nothing."""

    def begin(self, settings: Settings, step: int) -> None:
        """Report that training starts at step 0 or resumes at a later step."""

    def step(self, step: int, loss: float) -> None:
        """Report the number of completed steps and the last training loss."""

    def point(self, point: Mapping[str, Any]) -> None:
        """Report an evaluation: a point of the record's curve."""


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
    """Start or resume a run in a folder, or return its record if it is finished.

    Args:
        settings: the run.
        folder: the folder for the checkpoint, and finally the record and the weights.
        device: the device, the CPU by default. A run cannot change its device.
        threads: the number of torch's threads, by default the current number. A run cannot change
            it, because sums in another order differ in the last bits.
        checkpoint_every: the seconds between checkpoints.
        progress: callbacks.
        stop: called after every step; if it returns true, a checkpoint is written and the run
            stops.

    Raises:
        RunError: the folder has a run with other settings, another process trains in it, or its
            checkpoint is damaged.
        StoppedError: `stop` returned true.
    """
    if threads is not None:
        check_count("threads", threads)
    if device is not None:
        _check_device(device)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder):
            record = _finished(settings, folder)
            if record is None:
                remove_unfinished(folder)
                record = _train(
                    settings,
                    folder,
                    device,
                    threads,
                    checkpoint_every,
                    progress or Progress(),
                    stop,
                )
            (folder / CHECKPOINT).unlink(missing_ok=True)
            return record
    except LockedError as error:
        raise RunError(str(error)) from error  # the cause tells callers that they may retry


def _train(
    settings: Settings,
    folder: Path,
    device: str | None,
    threads: int | None,
    checkpoint_every: float,
    progress: Progress,
    stop: Callable[[], bool],
) -> Record:
    saved = _load_checkpoint(folder / CHECKPOINT, settings)
    history = _history(folder, saved, device, threads)
    began = time.monotonic() - history["seconds"]
    with torch.random.fork_rng(), machine.use_threads(history["threads"]):
        trainer = Trainer(
            cached_task(settings.task, settings.scale, history["device"]),
            settings.build(),
            seed=settings.seed,
            lr=settings.lr,
            steps=settings.steps,
        )
        _add_environment(history, trainer.optimizer, folder)
        if saved is not None:
            trainer.load_state_dict(saved["trainer"])
            saved = None  # frees the memory of a second model and its moments
        progress.begin(settings, trainer.step)
        last_checkpoint = time.monotonic()
        for loss in trainer.train(progress.point):
            progress.step(trainer.step, loss)
            stopping = stop() and not trainer.done
            if stopping or time.monotonic() - last_checkpoint >= checkpoint_every:
                history["seconds"] = time.monotonic() - began
                state = {"settings": settings.to_dict(), "trainer": trainer.state_dict()}
                checkpoint.save(folder / CHECKPOINT, {**state, "history": history})
                last_checkpoint = time.monotonic()
            if stopping:
                raise StoppedError(f"stopped at step {trainer.step} of {trainer.steps}")
        result = trainer.finish()
    progress.point(trainer.curve[-1])
    with replacing(folder / WEIGHTS) as file:
        torch.save(trainer.model.state_dict(), file)
    *before, environment = history["environments"]
    record = {
        "schema": records.SCHEMA,
        "id": settings.id,
        "settings": settings.to_dict(),
        "result": result,
        "curve": trainer.curve,
        "status": "diverged" if trainer.diverged else "ok",
        "environment": {**environment, "before": before} if before else environment,
        "timing": {
            "started": history["started"],
            "finished": _now(),
            "seconds": round(time.monotonic() - began, 3),
            "resumed": history["resumed"],
        },
    }
    records.write(folder / RECORD, [record])
    return record


def _history(
    folder: Path, saved: dict[str, Any] | None, device: str | None, threads: int | None
) -> dict[str, Any]:
    """Return the facts about a run that outlive its processes; a resumed run must match them."""
    if saved is None:
        return {
            "device": "cpu" if device is None else device,
            "threads": torch.get_num_threads() if threads is None else threads,
            "started": _now(),
            "seconds": 0.0,
            "resumed": 0,
            "environments": [],
        }
    history: dict[str, Any] = saved["history"]
    for name, asked in (("device", device), ("threads", threads)):
        if asked is not None and asked != history[name]:
            raise RunError(
                f"the run in {folder} was started with {name}={history[name]!r}; resume with "
                f"{name}={history[name]!r}, not {asked!r}, for bit-identical results, or choose "
                "another folder"
            )
    return {**history, "resumed": history["resumed"] + 1}


def _add_environment(history: dict[str, Any], optimizer: Optimizer, folder: Path) -> None:
    """Add the environment to the run's history if it has changed.

    A run may resume on another machine, though not bit-identically. Another kernel is an error.
    """
    described = machine.describe()
    here: dict[str, Any] = {
        **{name: described[name] for name in ("pdecay", "commit") if name in described},
        "torch": described["torch"],
        "python": platform.python_version(),
        "platform": described["system"],
        "processor": described["processor"],
        "threads": history["threads"],
        "device": history["device"],
        "kernel": _kernel(optimizer),
    }
    environments = history["environments"]
    if environments and environments[-1]["kernel"] != here["kernel"]:
        raise RunError(
            f"the run in {folder} used the kernel {environments[-1]['kernel']!r}, but only "
            f"{here['kernel']!r} is available now, which differs in the last bits: see the warning "
            "about the C kernel, or delete the folder to start again"
        )
    if not environments or environments[-1] != here:
        environments.append(here)


def _kernel(optimizer: Optimizer) -> str:
    """Return the name of the decay kernel; kernels agree to about 1e-6, not bit by bit."""
    group = optimizer.param_groups[0]
    path = kernel_for(group["params"][0], group.get("fused")) if is_decaying(optimizer) else None
    return "torch" if path is None else path.__name__.rpartition(".")[2]


def _finished(settings: Settings, folder: Path) -> Record | None:
    path = folder / RECORD
    if not path.exists():
        return None
    record = records.read_one(path)
    _check_same(folder, record["settings"], settings)
    return record


def _load_checkpoint(path: Path, settings: Settings) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        saved = checkpoint.load(path)
        found, _, _ = saved["settings"], saved["trainer"], saved["history"]
    except (checkpoint.DamagedError, KeyError) as error:
        raise RunError(
            f"{path} is not a checkpoint of a run ({error}): it was altered, truncated or written "
            "by another version; delete it to start the run again"
        ) from None
    _check_same(path.parent, found, settings)
    return saved


def _check_same(folder: Path, found: Mapping[str, Any], settings: Settings) -> None:
    asked = settings.to_dict()
    if found == asked:
        return
    flat_found, flat_asked = ({**one, **one["options"]} for one in (found, asked))
    differing = [
        f"{name} is {flat_found.get(name)!r} there and {flat_asked.get(name)!r} here"
        for name in dict.fromkeys([*flat_found, *flat_asked])
        if name != "options" and flat_found.get(name) != flat_asked.get(name)
    ]
    raise RunError(
        f"{folder} has a run with other settings ({'; '.join(differing)}): choose another folder, "
        "or delete that one"
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
