"""The command line: help, version, one-line errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import pdecay
from pdecay import cli


@pytest.fixture
def in_project(tmp_path, monkeypatch):
    """A working directory into which the test writes a user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_module", raising=False)

    def write(text):
        (tmp_path / "users_module.py").write_text(text)

    yield write
    sys.modules.pop("users_module", None)


def test_no_command_prints_help(run_cli):
    shown = run_cli()
    assert all(cli.name_of(command) in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=cli.name_of)
def test_help_of_each_command_has_a_valid_example(run_cli, command):
    shown = run_cli(cli.name_of(command), "--help")
    assert f"example:\n  {command.EXAMPLE}" in shown
    cli._parser().parse_args(command.EXAMPLE.split()[1:])  # the example is a valid command


def test_version(run_cli):
    assert run_cli("--version") == f"pdecay {pdecay.__version__}\n"


def test_version_imports_no_heavy_package():
    code = (
        "import runpy, sys; sys.argv = ['pdecay', '--version']\n"
        "try: runpy.run_module('pdecay', run_name='__main__')\n"
        "except SystemExit as exit_: assert exit_.code == 0, exit_.code\n"
        "heavy = {'torch', 'matplotlib', 'sklearn', 'rich', 'pdecay.lab'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pdecay {pdecay.__version__}\n"


def test_unknown_command_is_reported(run_cli):
    assert "invalid choice: 'demmo'" in run_cli("demmo", code=2)


@pytest.mark.parametrize("seed", ["-1", "x", "1.5", ""])
def test_invalid_seed_is_reported(run_cli, seed):
    assert f"must be a whole number >= 0, got {seed!r}" in run_cli("demo", f"--seed={seed}", code=2)


def test_unwritable_output_folder_is_reported_before_the_work(run_cli, tmp_path, monkeypatch):
    from pdecay.lab.demo import demo

    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: pytest.fail("the demo was started"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"cannot write to {str(out)!r}" in run_cli("demo", "--out", str(out), code=2)


def test_output_folder_of_another_user_is_reported(run_cli, tmp_path, monkeypatch):
    from pdecay.lab.demo import demo

    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root can create another user's folder")
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: pytest.fail("the demo was started"))
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777)
    (tmp_path / "pdecay-demo").mkdir()
    os.chown(tmp_path / "pdecay-demo", 65533, 65533)
    assert "cannot write to 'pdecay-demo': This folder belongs to another user" in run_cli(
        "demo", code=2
    )


def test_output_folder_is_created(tmp_path, monkeypatch):
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
def test_missing_extra_is_reported(run_cli, monkeypatch, tmp_path, module, package):
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("pdecay.lab"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pdecay, "lab", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])
    shown = run_cli("demo", "--out", str(tmp_path), code=2)
    assert shown == (f"pdecay demo: error: {package} is not installed: pip install 'pdecay[lab]'\n")


class _Missing:
    """An importer that does not find one package."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_import_error_of_pdecay_is_not_reported_as_missing_extra(monkeypatch, tmp_path):
    def broken(args):
        raise ModuleNotFoundError("No module named 'pdecay.lba'", name="pdecay.lba")

    monkeypatch.setattr(cli.demo, "run", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_full_disk_and_interrupt_are_one_line(capsys, monkeypatch, error, code):
    def stopped(args):
        raise error

    monkeypatch.setattr(cli.demo, "run", stopped)
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


def test_doctor_accepts_a_healthy_model(run_cli, in_project):
    in_project(HEALTHY)
    shown = run_cli("doctor", "users_module:build", code=0)
    assert "nothing found" in shown


@pytest.mark.parametrize("function", ["build", "Holder.build"])
def test_doctor_reports_an_error(run_cli, in_project, function):
    in_project(SICK)
    shown = run_cli("doctor", f"users_module:{function}", code=1)
    assert "error: nothing decays" in shown
    assert "cure: " in shown


def test_doctor_hint_is_not_an_error(run_cli, in_project):
    in_project(HEALTHY.replace("0.8", "1.5"))
    shown = run_cli("doctor", "users_module:build", code=0)
    assert shown.startswith("hint: ")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("users_module", "expected MODULE:FUNCTION"),
        (":build", "expected MODULE:FUNCTION"),
        ("users_module:", "expected MODULE:FUNCTION"),
        ("no_such.module:build", "cannot import 'no_such.module': ModuleNotFoundError: No module"),
        ("my_project/training.py:build", "give the module's name, such as my_project.training"),
        (".relative:build", "cannot import '.relative'"),
        ("users_module:missing", "'users_module' has no 'missing'"),
        ("users_module:number", "must be a function, got int"),
        ("users_module:needs", "failed: TypeError: needs() missing 1 required"),
        ("users_module:fails", "failed: ValueError: two lines ("),
        ("users_module:nothing", "must return (model, optimizer), got NoneType"),
        ("users_module:strings", "must return (model, optimizer): doctor needs a torch.nn.Module"),
    ],
)
def test_invalid_doctor_target_is_reported(run_cli, in_project, target, message):
    in_project(
        "number = 3\n"
        "def needs(argument): pass\n"
        "def fails(): raise ValueError('two\\nlines')\n"
        "def nothing(): pass\n"
        "def strings(): return 'model', 'optimizer'\n"
    )
    assert message in run_cli("doctor", target, code=2)


def test_syntax_error_in_users_module_is_reported(run_cli, in_project):
    in_project("def build(:\n")
    assert "cannot import 'users_module': SyntaxError" in run_cli(
        "doctor", "users_module:build", code=2
    )


def test_bench_names_its_parts(run_cli):
    error = run_cli("bench", "foo", code=2)
    assert "must be one of step, avx2, growth, target, train, start, deploy, got 'foo'" in error


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("pdecay d", {"demo", "doctor"}), ("pdecay train digits --sc", {"--scale"})],
)
def test_completion_script_completes(run_cli, typed, expected):
    script = run_cli("completion", "bash")
    words = typed.split()
    script += f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _pdecay; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert expected <= set(done.stdout.split())


@pytest.mark.slow
def test_train_prints_its_record_as_json(run_cli, tmp_path):
    arguments = ("digits", "--scale", "quick", "--method", "target", "--steps", 20)
    record = json.loads(run_cli("train", *arguments, "--out", tmp_path / "run", "--json"))
    assert record["result"]["sparsity"] == pytest.approx(0.9, abs=1e-3)


@pytest.mark.slow
def test_file_names_that_are_not_utf8_are_shown(tmp_path):
    """Print them with escapes, and draw them with replacement characters."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors")
    pdecay.save({"weight": torch.eye(3)}, path)
    command = [sys.executable, "-m", "pdecay", "inspect", path, "--plot", tmp_path / "x.png"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    assert b"\\udcff.safetensors" in done.stdout
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize("command", ["compact", "deploy", "export --onnx x.onnx"])
def test_example_without_rows_is_reported(run_cli, in_project, command):
    in_project("import torch\ndef build(): return torch.nn.Linear(2, 2), torch.zeros(0, 2)")
    name, *options = command.split()
    shown = run_cli(name, "users_module:build", *options, code=2)
    assert "example_inputs has no elements" in shown


def test_plan_is_not_written_to_a_pipe(run_cli, in_project, tmp_path):
    in_project("import torch\ndef build(): return torch.nn.Linear(2, 2), torch.zeros(1, 2)")
    os.mkfifo(tmp_path / "pipe")  # writing to it would block
    shown = run_cli("deploy", "users_module:build", "--save-plan", tmp_path / "pipe", code=2)
    assert "--save-plan: " in shown
    assert "is a pipe or a device" in shown


def test_two_names_of_one_output_file_are_reported(run_cli, in_project, tmp_path):
    in_project("import torch\ndef build(): return torch.nn.Linear(2, 2), torch.zeros(1, 2)")
    (tmp_path / "link").symlink_to(tmp_path)
    names = tmp_path / "a.safetensors", tmp_path / "link" / "a.safetensors"
    shown = run_cli(
        "export", "users_module:build", "--sparse", names[0], "--dense", names[1], code=2
    )
    assert "--sparse and --dense must be different files" in shown
