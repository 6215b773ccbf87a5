"""Exact round trips of all dtypes, values, layouts, names and ties."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdecay.deployment.files import load, save
from pdecay.deployment.files.dtypes import BY_TORCH

from .contents import check_same, random_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
ENOUGH = 10**9
SHARES = [0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.99, 1.0]

TENSORS = st.builds(
    random_bits,
    st.lists(st.integers(0, 9), max_size=4) | st.tuples(st.integers(100, 3000)),
    st.sampled_from(list(BY_TORCH)),
    st.sampled_from(SHARES),
    st.integers(0, 9),
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, TENSORS, max_size=6))
def test_state_dict_round_trip(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("one") / "file"
    report = save(state, path)
    assert report.nbytes == path.stat().st_size
    check_same(state, load(path, max_bytes=ENOUGH))
    safetensors.deserialize(path.read_bytes())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", list(BY_TORCH), ids=str)
def test_round_trip_of_every_dtype_and_sparsity(path, dtype, share):
    state = {"w": random_bits((30, 41), dtype, share, 1)}
    save(state, path)
    check_same(state, load(path, max_bytes=ENOUGH))


def test_special_values_keep_their_bits(path):
    bits = [0x7F800000, 0x7FC00001, 0x7F800001, 0xFFC12345, 0x00000001, 0x80000001, 0x7F7FFFFF]
    values = torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32)
    state = {"w": torch.cat([values, torch.zeros(900, dtype=torch.int32)]).view(torch.float32)}
    save(state, path)
    assert torch.equal(load(path)["w"].view(torch.int32), state["w"].view(torch.int32))


@pytest.mark.parametrize("share", [0.1, 0.99])
def test_negative_zero_is_stored_as_zero(path, share):
    torch.manual_seed(0)
    w = torch.randn(4000) * (torch.rand(4000) < share)
    w = torch.where(torch.rand(4000) < 0.5, -w, w)
    assert (torch.signbit(w) & (w == 0)).any()
    report = save({"w": w}, path)
    back = load(path)["w"]
    assert torch.equal(back, w)
    assert not (torch.signbit(back) & (back == 0)).any()
    assert report.nbytes == save({"w": w + 0.0}, path).nbytes


def test_denormals_are_kept_while_flushing_denormals(path):
    w = torch.zeros(1000)
    w[::20] = torch.tensor([1], dtype=torch.int32).view(torch.float32)  # 1e-45
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        save({"w": w}, path)
        back = load(path)["w"]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(back.view(torch.int32), w.view(torch.int32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(30, 20).t(),
        torch.randn(30, 20)[::2, 3:9],
        torch.randn(5, 1).expand(5, 7),
        torch.randn(1).expand(9),
        torch.randn(10)[2::5][:1],
        torch.randn(()),
        torch.tensor(0.0),
        torch.zeros(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5, dtype=torch.complex64).conj(),
        torch.randn(4, 5, dtype=torch.complex64).conj().imag,
        torch.randn(6, requires_grad=True) * 2,
        nn.Parameter(torch.randn(3)),
        torch.randn([1] * 64),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)[:4]}",
)
@pytest.mark.parametrize("dense", [False, True])
def test_views_are_saved_by_value(path, tensor, dense):
    save({"w": tensor}, path, dense=dense)
    back = load(path)["w"]
    assert torch.equal(back, tensor.detach())
    assert back.is_contiguous()


@pytest.mark.parametrize("dense", [False, True])
def test_bool_bytes_are_normalized(path, dense):
    w = torch.tensor([0, 1, 2, 255] * 50, dtype=torch.uint8).view(torch.bool)
    save({"w": w}, path, dense=dense)
    assert load(path)["w"].view(torch.uint8).tolist() == [0, 1, 1, 1] * 50
