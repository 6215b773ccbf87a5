import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pdecay
from pdecay.lab import machine

PACKAGE = Path(pdecay.__file__).parent


@pytest.mark.skipif(not (PACKAGE.parents[1] / ".git").exists(), reason="not in a clone")
def test_the_commit_of_the_clone_is_described():
    found = machine.describe()["commit"]
    head = subprocess.check_output(
        ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"], text=True
    ).strip()
    assert re.fullmatch(f"{head}\\+?", found)


@pytest.mark.slow
def test_an_installed_package_in_another_repository_has_no_commit(tmp_path):
    """The repository of a virtual environment is not that of the packages in it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    site = tmp_path / "site-packages"
    shutil.copytree(PACKAGE, site / "pdecay", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from pdecay.lab import machine; print(machine.describe().get('commit'))"
    output = subprocess.check_output(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        text=True,
    )
    assert output.strip() == "None"
