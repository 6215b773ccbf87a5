"""The command line: help, versions, and one clear line for every mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pdecay
from pdecay import cli


@pytest.fixture
def in_project(tmp_path, monkeypatch):
    """A directory with a user's module in it, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_module", raising=False)

    def write(text):
        (tmp_path / "users_module.py").write_text(text)

    yield write
    sys.modules.pop("users_module", None)


def mistake(capsys, *argv):
    """What a bad command line says, after a check that it is one line and nothing else."""
    try:
        code = cli.main(list(argv))
    except SystemExit as exit_:
        code = exit_.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    return shown.err


def test_no_command_is_the_help(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command.name in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_each_command_has_a_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command.name, "--help"])
    shown = capsys.readouterr().out
    assert f"example:\n  {command.example}" in shown
    cli._parser().parse_args(command.example.split()[1:])  # the example is a valid command


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pdecay {pdecay.__version__}\n"


def test_the_module_runs_and_loads_nothing_of_the_lab():
    code = (
        "import runpy, sys; sys.argv = ['pdecay', '--version']\n"
        "try: runpy.run_module('pdecay', run_name='__main__')\n"
        "except SystemExit as exit_: assert exit_.code == 0, exit_.code\n"
        "heavy = {'matplotlib', 'sklearn', 'rich', 'pdecay.lab'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pdecay {pdecay.__version__}\n"


def test_an_unknown_command(capsys):
    assert "invalid choice: 'demmo'" in mistake(capsys, "demmo")


@pytest.mark.parametrize("seed", ["-1", "x", "1.5", ""])
def test_a_bad_seed(capsys, seed):
    assert f"must be a whole number >= 0, got {seed!r}" in mistake(capsys, "demo", f"--seed={seed}")


def test_an_output_directory_that_cannot_be_is_told_before_the_work(capsys, tmp_path, monkeypatch):
    from pdecay.lab.demo import demo

    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: pytest.fail("it went to work"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"cannot write to {str(out)!r}" in mistake(capsys, "demo", "--out", str(out))


def test_an_output_directory_is_made(tmp_path, monkeypatch):
    from pdecay.lab.demo import demo

    asked = {}
    monkeypatch.setattr(demo, "run", lambda out, **kwargs: asked.update(kwargs, out=out))
    out = tmp_path / "a" / "b"
    assert cli.main(["demo", "--out", str(out), "--seed", "3", "--quick"]) == 0
    assert asked == {"out": out, "seed": 3, "quick": True}
    assert out.is_dir()
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("module", "package"), [("rich", "rich"), ("sklearn", "scikit-learn"), ("matplotlib",) * 2]
)
def test_a_missing_extra(capsys, monkeypatch, tmp_path, module, package):
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("pdecay.lab"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pdecay, "lab", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])
    shown = mistake(capsys, "demo", "--out", str(tmp_path))
    assert shown == (f"pdecay demo: error: {package} is not installed: pip install 'pdecay[lab]'\n")


class _Missing:
    """An importer to which one package is not installed."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_a_bug_of_ours_is_not_taken_for_a_missing_extra(monkeypatch, tmp_path):
    def broken(args):
        raise ModuleNotFoundError("No module named 'pdecay.lba'", name="pdecay.lba")

    command = cli.Command("demo", "s", "pdecay demo", lambda parser: None, broken)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_full_disk_and_an_impatient_user_get_one_line(capsys, monkeypatch, error, code):
    def stopped(args):
        raise error

    command = cli.Command("demo", "s", "pdecay demo", lambda parser: None, stopped)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err.count("\n") == 1


HEALTHY = """
import pdecay, torch
def build():
    model = torch.nn.Linear(4, 2)
    return model, pdecay.PAdam(pdecay.param_groups(model), decay=pdecay.Lp(0.8, 1e-3))
"""
SICK = """
import torch
def build():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
class Holder:
    build = staticmethod(build)
"""


def test_the_doctor_finds_nothing(capsys, in_project):
    in_project(HEALTHY)
    assert cli.main(["doctor", "users_module:build"]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["build", "Holder.build"])
def test_the_doctor_finds_an_error(capsys, in_project, function):
    in_project(SICK)
    assert cli.main(["doctor", f"users_module:{function}"]) == 1
    shown = capsys.readouterr().out
    assert "error: nothing decays" in shown
    assert "cure: " in shown


def test_a_hint_is_no_error(capsys, in_project):
    in_project(HEALTHY.replace("0.8", "1.5"))
    assert cli.main(["doctor", "users_module:build"]) == 0
    assert capsys.readouterr().out.startswith("hint: ")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("users_module", "expected MODULE:FUNCTION"),
        (":build", "expected MODULE:FUNCTION"),
        ("users_module:", "expected MODULE:FUNCTION"),
        ("no_such.module:build", "cannot import 'no_such.module': ModuleNotFoundError: No module"),
        (".relative:build", "cannot import '.relative'"),
        ("users_module:missing", "'users_module' has no 'missing'"),
        ("users_module:number", "must be a function, got a int"),
        ("users_module:needs", "failed: TypeError: needs() missing 1 required"),
        ("users_module:fails", "failed: ValueError: two lines ("),
        ("users_module:nothing", "must return (model, optimizer), got a NoneType"),
        ("users_module:strings", "must return (model, optimizer): doctor needs a torch.nn.Module"),
    ],
)
def test_a_bad_target_for_the_doctor(capsys, in_project, target, told):
    in_project(
        "number = 3\n"
        "def needs(argument): pass\n"
        "def fails(): raise ValueError('two\\nlines')\n"
        "def nothing(): pass\n"
        "def strings(): return 'model', 'optimizer'\n"
    )
    assert told in mistake(capsys, "doctor", target)


def test_a_module_that_does_not_compile(capsys, in_project):
    in_project("def build(:\n")
    assert "cannot import 'users_module': SyntaxError" in mistake(
        capsys, "doctor", "users_module:build"
    )
