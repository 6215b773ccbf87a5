"""Common fixtures: the exact path, the comparison of states, the contract suite's count."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from pdecay._optim.kernels import native

# The tensors of the tests are too small for several threads, and pytest runs several processes.
torch.set_num_threads(1)

# The examples in docstrings and pages import Keras in this process.
os.environ.setdefault("KERAS_BACKEND", "torch")

# A shell makes background processes ignore SIGINT, and child processes would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The arguments of `attach` in tests that compare bit by bit.
EXACT: dict[str, Any] = {"fused": False}


# Folders and files that `make quicktest` leaves out: other processes, browsers, databases, fuzzing,
# compilers, other frameworks, and suites over many optimizers. Single slow tests have the marker.
SLOW = (
    "bridge",
    "contract",
    "core/test_robust.py",
    "core/test_theory.py",
    "deployment/compact/test_architectures.py",
    "deployment/compact/test_random.py",
    "deployment/compact/test_transformers.py",
    "deployment/export",
    "deployment/files/test_fuzz.py",
    "deployment/files/test_size.py",
    "deployment/runtime/test_fuzz.py",
    "integrations",
    "keras_",
    "lab/bench",
    "lab/methods/test_paper.py",
    "lab/report/test_browser.py",
    "lab/sweep",
    "lab/train/test_kills.py",
    "native",
    "optax_",
    "optim/kernels/test_compiled.py",
    "optim/test_memory.py",
    "optim/test_torch_conventions.py",
    "test_functional.py",
    "upstream",
)
_MOST_CASES = 8  # of a parametrized test in `make quicktest`


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


def _is_slow(path: Path) -> bool:
    folder = Path(__file__).parent
    return any(path.is_relative_to(folder / name) for name in SLOW)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer random examples for `make quicktest`."""
    if _is_quick(config):
        hypothesis.settings.register_profile("quick", max_examples=20)
        hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the slow files, and with them other frameworks, for `make quicktest`."""
    return True if _is_quick(config) and _is_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    if _is_quick(config):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of parametrized tests beyond a random sample, the same in each run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        item
        for test, same in cases.items()
        for item in random.Random(test).sample(same, max(0, len(same) - _MOST_CASES))
    }


@pytest.fixture(scope="session", autouse=True)
def _private_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile kernels into a folder of this run: tests neither read nor fill the user's cache."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # all workers share it
    with pytest.MonkeyPatch.context() as patch:
        if "PDECAY_CACHE" not in os.environ:
            patch.setenv("PDECAY_CACHE", str(folder / "kernels"))
        yield


@pytest.fixture
def needs_native() -> None:
    """Skip the test if the C kernel cannot be compiled."""
    if reason := native.available():
        pytest.skip(reason)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line and check its exit code; return its output or, for 2, its error line."""

    def run(*argv: object, code: int = 0) -> str:
        from pdecay import cli

        try:
            actual = cli.main([str(word) for word in argv])
        except SystemExit as exit_:
            actual = exit_.code  # argparse
        shown = capsys.readouterr()
        assert actual == code, shown.err
        if code != 2:
            return shown.out
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert "Traceback" not in shown.err
        assert "\x1b" not in shown.err  # torch colours its errors
        return shown.err

    return run


@pytest.fixture
def exact() -> dict[str, Any]:
    return dict(EXACT)


@pytest.fixture
def same():
    """Return a function that compares two nested states bit by bit: keys, numbers and tensors."""
    return _same


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(_same(a, b) for a, b in zip(one, other, strict=True))
        )
    return bool(one == other or (one != one and other != other))  # NaN is NaN


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)  # -0.0 is not 0.0, NaN is NaN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of the contract suite and of torch's checks, also from xdist workers."""
    _summarize_contract(terminalreporter)
    _summarize_upstream(terminalreporter)


def _summarize_upstream(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        outcome: sum(
            any(key == "upstream" for key, _ in getattr(report, "user_properties", []))
            for report in terminalreporter.stats.get(outcome, [])
        )
        for outcome in ("passed", "xfailed", "failed")
    }
    if not any(counts.values()):
        return
    terminalreporter.section("checks of PyTorch's optimizer suite")
    terminalreporter.line(
        f"{sum(counts.values())} checks: {counts['passed']} passed, {counts['xfailed']} listed "
        f"differences, {counts['failed']} failed"
    )


def _summarize_contract(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of optimizers that the contract suite ran over."""
    ran: set[tuple[str, str]] = set()
    failed: set[tuple[str, str]] = set()
    for outcome, kept in (("passed", ran), ("failed", failed)):
        for report in terminalreporter.stats.get(outcome, []):
            kept.update(
                tuple(value.rsplit(".", 1))
                for key, value in getattr(report, "user_properties", [])
                if key == "optimizer"
            )
    ran |= failed
    if not ran:
        return
    parts = ", ".join(f"{n} of {package}" for package, n in Counter(p for p, _ in ran).items())
    terminalreporter.section("contract suite")
    terminalreporter.line(f"ran over {len(ran)} optimizers: {parts}; {len(failed)} failed")
    for package, name in sorted(failed):
        terminalreporter.line(f"failed: {package}.{name}")
