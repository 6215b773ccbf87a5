"""Saving and loading models: ties, metadata, ordinary files, limits and error messages."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from pdecay.deployment.files import load, read_metadata, save, table
from pdecay.deployment.files.dtypes import BY_TORCH
from tests.deployment.files.sparse_nets import Net, sparse_net

from .contents import check_same, random_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_model_round_trip_with_buffers_and_ties(path):
    model, other = sparse_net(), sparse_net(1)
    scratch = other.scratch.clone()
    memory = {name: value.data_ptr() for name, value in other.state_dict().items()}
    report = save(model, path)
    assert [t.name for t in report.tensors].count("head.weight") == 0
    assert load(path, other) is other
    check_same(model.state_dict(), other.state_dict())
    assert {name: value.data_ptr() for name, value in other.state_dict().items()} == memory
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.scratch, scratch)
    state = load(path)
    assert isinstance(state, OrderedDict)
    assert list(state) == list(model.state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    Net().load_state_dict(state)


def test_tied_tensor_fills_untied_weights(path):
    save(sparse_net(), path)
    other = Net()
    other.head.weight = nn.Parameter(torch.randn(50, 16))
    load(path, other)
    assert torch.equal(other.head.weight, other.embedding.weight)


@pytest.mark.parametrize("example", [None, torch.ones(1, 3)])
def test_tensor_with_the_name_of_the_program_is_refused(path, example):
    model = nn.ModuleDict({"pdecay": nn.Linear(3, 2)})
    model["pdecay"].register_buffer("program", torch.ones(2))
    model.forward = lambda x: model["pdecay"](x) * model["pdecay"].program
    with pytest.raises(ValueError, match=r"a tensor is named 'pdecay\.program'"):
        save(model, path, example_inputs=example)
    assert not path.exists()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_untied_tensors_fill_tied_weights_if_they_are_equal(path, dense, equal):
    first = torch.randn(4, 4)
    first[0, 0] = torch.nan
    save({"0.weight": first, "1.weight": first.clone() if equal else 2 * first}, path, dense=dense)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    if equal:
        load(path, model)
        assert torch.equal(model[1].weight.isnan(), first.isnan())
        assert torch.equal(model[1].weight[1:], first[1:])
    else:
        with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' are tied in the model"):
            load(path, model)
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dense", [False, True])
def test_ties_with_unusual_names(path, dense):
    weight, state = torch.randn(4), {}
    for name in ("", "format", "model", "tied:", "__metadata__"[: None if not dense else 5]):
        state[name] = weight
    save(state, path, dense=dense, metadata={"best": "format", "model": ""})
    back = load(path)
    check_same(state, back)
    assert len({id(tensor) for tensor in back.values()}) == 1


def test_different_views_of_one_memory_are_not_tied(path):
    memory = torch.randn(20)
    state = {"all": memory, "half": memory[:10], "square": memory.view(4, 5), "again": memory}
    save(state, path)
    back = load(path)
    check_same(state, back)
    assert back["again"] is back["all"]
    assert len({tensor.data_ptr() for tensor in back.values()}) == 3


@pytest.mark.parametrize("dense", [False, True])
def test_metadata(path, dense):
    save(sparse_net(), path, metadata={"note": 'ü\n"', "": ""}, dense=dense)
    metadata = read_metadata(path)
    assert metadata["note"] == 'ü\n"'
    assert metadata[""] == ""
    assert metadata["model"].endswith(".Net")
    assert float(metadata["sparsity"]) == pytest.approx(0.9, abs=0.03)
    assert metadata["format"] == ("pt" if dense else "pdecay")
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
    save(sparse_net().state_dict(), path, dense=dense)
    assert "model" not in read_metadata(path)
    save(sparse_net(), path, metadata={"model": "mine/net-7"}, dense=dense)
    assert read_metadata(path)["model"] == "mine/net-7"


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"a": 1}, TypeError, "must be strings, got 'a': 1"),
        ({1: "a"}, TypeError, "must be strings, got 1: 'a'"),
        ({"tied:a": "b"}, ValueError, "the metadata key 'tied:a' is reserved"),
        ({"sparsity": "0.5"}, ValueError, "the metadata key 'sparsity' is reserved"),
        ({"a": "\ud800"}, ValueError, "must be valid Unicode"),
    ],
)
def test_invalid_metadata_is_rejected(path, metadata, error, message):
    with pytest.raises(error, match=message):
        save(Net(), path, metadata=metadata)
    assert not path.exists()


def test_dense_file_is_read_by_safetensors(path):
    model, other = sparse_net(), Net()
    report = save(model, path, dense=True)
    assert report.nbytes == path.stat().st_size
    state = safetensors.torch.load_file(path)
    assert "head.weight" not in state
    expected = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    assert all(torch.equal(state.pop(name), value) for name, value in expected.items())
    assert not state
    assert safetensors.torch.load_model(other, path) == (set(), [])
    check_same(model.state_dict(), other.state_dict())
    back = load(path)
    assert back["head.weight"] is back["embedding.weight"]
    check_same(model.state_dict(), load(path, Net()).state_dict())


def test_dense_file_keeps_all_bits(path):
    state = {"w": torch.tensor([0.0, -0.0, float("nan")])}
    save(state, path, dense=True)
    assert torch.equal(load(path)["w"].view(torch.int32), state["w"].view(torch.int32))


def test_loads_files_written_by_safetensors(path):
    model, other = sparse_net(), Net()
    safetensors.torch.save_model(model, path)  # it omits the second name of tied weights
    load(path, other)
    check_same(model.state_dict(), other.state_dict())
    state = {
        str(dtype): random_bits((4, 6), dtype, 0.5, 0)
        for dtype in BY_TORCH
        if dtype not in (torch.complex32, torch.complex128)
    }
    safetensors.torch.save_file(state, path)
    back = load(path)
    assert all(torch.equal(_bytes(back.pop(name)), _bytes(state[name])) for name in state)
    assert not back
    ours = path.with_name("ours")
    save(state, ours, dense=True)
    assert dict(_plain(ours)) == dict(_plain(path))


def _plain(path):
    return [(name, tensor) for name, tensor in safetensors.deserialize(path.read_bytes())]


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_dense_file_rejects_unsupported_dtype(path):
    with pytest.raises(ValueError, match=r"'w' has dtype torch.complex128, which safetensors does"):
        save({"w": torch.zeros(3, dtype=torch.complex128)}, path, dense=True)
    assert not list(path.parent.iterdir())


def test_dense_file_rejects_reserved_name(path):
    state = {"__metadata__": torch.ones(3)}
    with pytest.raises(ValueError, match="safetensors reserves the name"):
        save(state, path, dense=True)
    save(state, path)
    check_same(state, load(path))


@pytest.mark.slow
def test_transformers_loads_dense_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[:, ::2] = 0
    config.save_pretrained(tmp_path)
    save(model, tmp_path / "model.safetensors", dense=True)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert back.lm_head.weight is back.transformer.wte.weight
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)


BAD_STATES = {
    "a list": ([torch.zeros(1)], TypeError, "needs a model or a state dict, got list"),
    "a number": ({"w": torch.zeros(1), "n": 3}, TypeError, "'n' is a int"),
    "a name": ({3: torch.zeros(1)}, TypeError, "names must be strings, got 3"),
    "half a character": ({"\ud800": torch.zeros(1)}, ValueError, "is not valid Unicode"),
    "meta": ({"w": torch.zeros(1, device="meta")}, ValueError, "'w' is on the meta device"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, ValueError, "layout torch.sparse_coo"),
    "lazy": (nn.LazyLinear(3), ValueError, "'weight' is not initialised"),
    "dtype": ({"w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}, ValueError, "bits8"),
    "dimensions": ({"w": torch.zeros([1] * 65)}, ValueError, "65 dimensions, more than 64"),
}


@pytest.mark.parametrize("case", BAD_STATES)
@pytest.mark.parametrize("dense", [False, True])
def test_unsaveable_state_leaves_no_file(path, case, dense):
    state, error, message = BAD_STATES[case]
    with pytest.raises(error, match=message):
        save(state, path, dense=dense)
    assert not list(path.parent.iterdir())


def test_quantized_tensor_is_rejected(path):
    with pytest.warns(UserWarning, match="deprecated"):
        w = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match="qint8, which files do not support"):
        save({"w": w}, path)


class TestReplacing:
    def test_failed_save_keeps_old_file(self, path, monkeypatch):
        save({"w": torch.ones(3)}, path)
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            save({"w": torch.zeros(3)}, path)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        assert torch.equal(load(path)["w"], torch.ones(3))

    def test_readers_never_see_partial_file(self, path):
        states = [
            {"w": torch.full((20_000,), float(i)) * (torch.rand(20_000) < 0.5)} for i in (1, 2)
        ]
        save(states[0], path)
        stop = threading.Event()

        def write():
            while not stop.is_set():
                for state in states:
                    save(state, path)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(100):
                found = load(path)["w"]
                assert any(torch.equal(found, state["w"]) for state in states)
        finally:
            stop.set()
            writer.join()

    def test_file_permissions_follow_umask(self, path):
        old = os.umask(0o027)
        try:
            save({"w": torch.ones(3)}, path)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_symbolic_link_is_followed(self, path, tmp_path):
        (tmp_path / "there").mkdir()
        path.symlink_to(tmp_path / "there" / "file")
        save({"w": torch.ones(3)}, path)
        assert path.is_symlink()
        assert (tmp_path / "there" / "file").is_file()

    def test_invalid_paths(self, tmp_path):
        with pytest.raises(IsADirectoryError):
            save({"w": torch.ones(3)}, tmp_path)
        with pytest.raises(FileNotFoundError):
            save({"w": torch.ones(3)}, tmp_path / "missing" / "file")

    def test_long_string_path(self, tmp_path):
        path = str(tmp_path / ("x" * 255))
        assert save({"w": torch.ones(3)}, path).path == path
        assert torch.equal(load(path)["w"], torch.ones(3))

    @pytest.mark.parametrize("moved", [False, True])
    @pytest.mark.parametrize("nonzeros", [10, 500])  # gaps and a mask
    def test_tensor_changed_during_save_is_an_error(self, path, monkeypatch, moved, nonzeros):
        w = torch.zeros(1000)
        w[torch.randperm(999)[:nonzeros]] = 2
        w[0], w[999] = 1, 0
        real = table.compress

        def change(*args):
            w[999] = 1
            if moved:  # as many non-zeros, at other positions
                w[0] = 0
            return real(*args)

        monkeypatch.setattr(table, "compress", change)
        with pytest.raises(RuntimeError, match="'w' changed during the save"):
            save({"w": w}, path)
        assert not path.exists()
