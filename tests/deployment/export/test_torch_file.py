"""Export to .pt2 and .pt files, and the commands `pdecay compact` and `pdecay export`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import pdecay
from pdecay.deployment.compact import compact
from pdecay.deployment.export import export_torch
from pdecay.deployment.files import load, save
from pdecay.deployment.model.errors import ExportError

USERS_MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(self.one(x).relu())

def build():
    torch.manual_seed(0)
    return Model(), torch.randn(1, 3)

def dead():
    model, example = build()
    model.two.weight.data[:, :3] = 0
    return model, example

def small():
    model, example = build()
    model.two.weight.data[:, :3] = 1e-9
    return model, example

def nothing(): pass
def strings(): return "model", "example"
def example_is_bad(): return build()[0], "example"
def example_does_not_fit(): return build()[0], torch.randn(1, 9)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Change to a directory that contains a user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "users_model.py").write_text(USERS_MODULE)
    yield tmp_path
    sys.modules.pop("users_model", None)


def dead_units():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].weight.data[:, :3] = 0
    return model, torch.randn(1, 3)


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_exported_model_can_be_loaded(tmp_path, suffix):
    model, example = dead_units()
    smaller = compact(model, example)
    saved = export_torch(smaller, tmp_path / f"small{suffix}", example)
    if suffix == ".pt":
        again = torch.load(saved.path, weights_only=False)
        assert again.compact_report == smaller.compact_report
    else:
        again = torch.export.load(saved.path).module()
    assert sum(p.numel() for p in again.parameters()) == 5 * 4 + 2 * 6
    many = torch.randn(7, 3)
    torch.testing.assert_close(again(many), model(many))
    assert [file.name for file in tmp_path.iterdir()] == [f"small{suffix}"]
    assert saved.how_to_load in str(saved)
    assert b"site-packages" not in saved.path.read_bytes()


def test_failed_export_leaves_no_file(tmp_path):
    class Local(nn.Linear):  # pickle cannot import a local class
        pass

    with pytest.raises(ExportError, match=r"write a .pt2 instead"):
        export_torch(Local(3, 2), tmp_path / "model.pt", torch.randn(1, 3))
    with pytest.raises(ValueError, match=r"must end with .pt2 or .pt, got"):
        export_torch(Local(3, 2), tmp_path / "model.bin", torch.randn(1, 3))
    with pytest.raises(FileNotFoundError):
        export_torch(Local(3, 2), tmp_path / "nowhere" / "model.pt2", torch.randn(1, 3))
    assert not list(tmp_path.iterdir())
    export_torch(Local(3, 2), tmp_path / "model.pt2", torch.randn(1, 3))


class Largest(nn.Module):
    def forward(self, x):
        return x.topk(2)  # a class that torch.export cannot store


def test_outputs_that_cannot_be_stored(tmp_path):
    with pytest.raises(ExportError, match=r"return_types\.topk"):
        export_torch(Largest(), tmp_path / "model.pt2", torch.randn(3, 4))
    assert not list(tmp_path.iterdir())


def test_compact_prints_removed_units(run_cli, project):
    shown = run_cli("compact", "users_model:dead")
    assert shown.startswith("50 parameters -> 32 (36.0% fewer)\nremoved 3 units")
    assert "one.weight  8x3       5x3" in shown
    assert [file.name for file in project.iterdir() if file.is_file()] == ["users_model.py"]


def test_compact_writes_program(run_cli, project):
    shown = run_cli("compact", "users_model:dead", "--out", "small.pt2")
    assert "written: small.pt2" in shown
    assert torch.export.load("small.pt2").module()(torch.randn(4, 3)).shape == (4, 2)


def test_compact_needs_exact_zeros_or_prune(run_cli, project):
    shown = run_cli("compact", "users_model:small")
    assert "removed 0 units" in shown
    assert "only exact zeros count (--prune T sets them)" in shown
    shown = run_cli("compact", "users_model:small", "--prune", "1e-6")
    assert "removed 3 units" in shown


@pytest.mark.parametrize("kind", ["torch", "sparse", "dense"])
def test_compact_loads_weights_from_file(run_cli, project, kind):
    import users_model

    model, _ = users_model.dead()
    if kind == "torch":
        torch.save(model.state_dict(), "weights.pt")
    else:
        save(model, "weights.pt", dense=kind == "dense")
    shown = run_cli("compact", "users_model:build", "--weights", "weights.pt")
    assert "removed 3 units" in shown


def test_key_selects_one_of_several_state_dicts(run_cli, project):
    import users_model

    models = {"student": users_model.dead()[0], "teacher": users_model.build()[0]}
    torch.save({name: model.state_dict() for name, model in models.items()}, "two.pt")
    argv = ("compact", "users_model:build", "--weights", "two.pt")
    assert "pass one of ['student', 'teacher'] as the key" in run_cli(*argv, code=2)
    assert "removed 3 units" in run_cli(*argv, "--key", "student")


VERSIONED_MODULE = """
import torch
from torch import nn

class Layer(nn.Linear):
    _version = 2
    scale = 1.0

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version", 1) < 2:  # the first version stored half of the weight
            state[prefix + "weight"] = 2 * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def forward(self, x):
        return self.scale * super().forward(x)

def build():
    return nn.Sequential(Layer(3, 2)), torch.ones(1, 3)
"""


@pytest.mark.parametrize("nested", [False, True])
def test_torch_files_keep_module_versions_and_extra_state(run_cli, project, nested):
    (project / "users_model.py").write_text(VERSIONED_MODULE)
    import users_model

    model, x = users_model.build()
    model[0].scale = 3.0
    state = model.state_dict()
    torch.save({"state_dict": state, "epoch": 3} if nested else state, "weights.pt")
    run_cli("compact", "users_model:build", "--weights", "weights.pt", "--out", "out.pt2")
    torch.testing.assert_close(torch.export.load("out.pt2").module()(x), model(x))


def test_export_writes_onnx_sparse_and_dense_files(run_cli, project):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import users_model

    shown = run_cli(
        "export", "users_model:dead", "--onnx", "m.onnx", "--sparse", "sparse.safetensors",
        "--dense", "dense.safetensors",
    )  # fmt: skip
    assert "compacted: 50 parameters -> 32\nm.onnx: " in shown
    model, _ = users_model.dead()
    x = torch.randn(3, 3)
    (got,) = runtime.InferenceSession("m.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach())
    for file in ("sparse.safetensors", "dense.safetensors"):
        again = load(file, users_model.Model())  # files hold the model before compaction
        torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["compact", "users_model:dead", "--out", "small.bin"],
            "--out: the name must end with .pt2",
        ),
        (["compact", "users_model:dead", "--out", "folder.pt2"], "--out: 'folder.pt2' is a folder"),
        (["compact", "users_model"], "expected MODULE:FUNCTION"),
        (["compact", "users_model:nothing"], "must return (model, example_inputs), got"),
        (["compact", "users_model:strings"], "must return a torch.nn.Module first, got str"),
        (["compact", "users_model:example_is_bad"], "example_inputs must be a tensor, a tuple"),
        (["compact", "users_model:example_does_not_fit"], "does not run on example_inputs"),
        (["compact", "users_model:dead", "--weights", "no.pt"], "No such file"),
        (["compact", "users_model:dead", "--weights", "users_model.py"], "users_model.py: "),
        (["compact", "users_model:dead", "--weights", "other.pt"], "does not fit the model"),
        (["compact", "users_model:dead", "--key", "model"], "--key needs --weights"),
        (["compact", "users_model:dead", "--prune", "-1"], "--prune: threshold"),
        (
            ["deploy", "users_model:dead", "--plan", "/dev/zero"],
            "--plan: /dev/zero is not a regular",
        ),
        (["compact", "."], "has no finished run of pdecay train"),
        (["export", "users_model:dead"], "give --onnx, --sparse or --dense"),
        (["export", "users_model:dead", "--onnx", "users_model.py/m.onnx"], "cannot write to"),
        (["export", "users_model:dead", "--onnx", "users_model.py"], "--onnx: the name must end"),
        (["export", "users_model:dead", "--dense", "m.pt"], "--dense: the name must end"),
        (
            ["export", "users_model:dead", "--dense", "m.safetensors", "--sparse", "m.safetensors"],
            "--sparse and --dense must be different files, got 'm.safetensors' for both",
        ),
    ],
)
def test_errors_are_one_line(run_cli, project, argv, message):
    torch.save(nn.Linear(2, 2).state_dict(), "other.pt")
    (project / "folder.pt2").mkdir()
    assert message in run_cli(*argv, code=2)


def test_compact_reads_training_run(run_cli, project):
    from pdecay.lab.train.training import Settings, train

    pytest.importorskip("sklearn")
    settings = Settings.of("digits", "padam", scale="quick", steps=60, p=0.5, lam=0.5)
    train(settings, project / "run")
    shown = run_cli("compact", "run", "--out", "small.pt2")
    assert "parameters ->" in shown
    assert pdecay.sparsity(torch.export.load("small.pt2").module()).total >= 0


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("doubles", [lambda n: n > 3, lambda n: n != 1])
def test_branch_on_the_batch_size_is_never_wrong(tmp_path, doubles, rows):
    class Branching(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x) if doubles(len(x)) else super().forward(x)

    model, x = Branching(4, 4), torch.randn(rows, 4)
    export_torch(model, tmp_path / "model.pt2", x)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x), model(x))
    for n in (1, 2, 3, 5):
        other = torch.randn(n, 4)
        try:
            found = program(other)
        except AssertionError:  # refused by torch
            continue
        torch.testing.assert_close(found, model(other))


def test_export_of_a_lazy_model_is_refused(run_cli, project):
    (project / "lazy_model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.LazyLinear(2), torch.randn(1, 3)\n"
    )
    shown = run_cli("export", "lazy_model:build", "--dense", "m.safetensors", code=2)
    assert "'weight' is not initialised: run the model once" in shown
    assert not (project / "m.safetensors").exists()


def test_run_of_an_unknown_task_is_refused(run_cli, project):
    from pdecay.lab.train import records

    settings = {"task": "other", "scale": "cpu", "method": "padam", "seed": 0, "lr": 0.1}
    settings |= {"steps": 1, "options": {}}
    result = dict.fromkeys(("accuracy", "loss", "sparsity", "tradeoff", "total_sparsity"))
    record = {"schema": 1, "id": records.run_id(settings), "settings": settings, "curve": []}
    record |= {"result": {**result, "weights": 1, "layers": []}, "status": "diverged"}
    (project / "run").mkdir()
    records.write(project / "run" / "record.jsonl", [{**record, "environment": {}, "timing": {}}])
    shown = run_cli("compact", "run", code=2)
    assert "run: there is no task 'other'; choose from digits" in shown


FULL_DISK = """
import resource, signal, sys
import torch
from torch import nn
from pdecay.deployment.export import export_torch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    export_torch(nn.Linear(200, 100), sys.argv[1], torch.randn(2, 200))
except OSError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, 20_000, 80_000])
def test_full_disk_is_an_error(tmp_path, size):
    """The writer of torch.export ends the process if a write fails while it is deleted."""
    path = tmp_path / "model.pt2"
    command = [sys.executable, "-c", FULL_DISK, str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"[Errno 27] File too large: {str(path)!r}\n"
    assert not list(tmp_path.iterdir())
