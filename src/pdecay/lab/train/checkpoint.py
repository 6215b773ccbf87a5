"""Checkpoint files: a ``torch.save`` file followed by its SHA-256 digest.

``torch.load`` verifies no checksums, so that a block of zeros, as a failing disk leaves it, would
silently change the state of a run.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from pdecay._utils.files import replacing

_DIGEST_SIZE = hashlib.sha256().digest_size


class DamagedError(Exception):
    """A checkpoint that cannot be loaded; the message gives the reason."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint by a new state, atomically.

    Raises:
        TypeError: if the state has objects with which :func:`load` would refuse the file. A method
            may add them at any step, and a run would be lost when it resumes.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if refused:
        raise TypeError(
            f"a checkpoint of this run could not be loaded, because it holds "
            f"{', '.join(sorted(refused))}: the state of a method and its optimizer must be "
            "numbers, strings and tensors, and lists and dicts of them (float(x) converts a "
            "number of NumPy)"
        )
    body = buffer.getbuffer()
    with replacing(path) as file:
        file.write(body)
        file.write(hashlib.sha256(body).digest())


def load(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, with all tensors on the CPU.

    Raises:
        DamagedError: if the file is damaged or is not a checkpoint.
    """
    content = path.read_bytes()
    body, digest = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedError("its contents do not match its digest")
    try:
        loaded = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DamagedError("it holds more than numbers and tensors") from None
    except Exception as error:  # a damaged file can raise any error
        raise DamagedError(str(error).partition("\n")[0]) from None
    if not isinstance(loaded, dict):
        raise DamagedError(f"it holds a {type(loaded).__name__}, expected a dict")
    return loaded
