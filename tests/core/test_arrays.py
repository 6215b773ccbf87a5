import numpy as np
import pytest
import torch

from pdecay import Lp
from pdecay._core.arrays import namespace
from pdecay._core.tensors import TensorList
from pdecay._optim.engine import decay_factors, multiply_

PENALTIES = [
    Lp(0, 0.3),
    Lp(0.5, 0.1),
    Lp(0.8, 1e-30),
    Lp(1, 0.2),
    Lp(1.5, 1e38),
    Lp(2, 0.4),
    Lp(3, 0.1),
    Lp(4, 2),
    Lp(0.8, 1e-3) + Lp(2, 2e-3),
    Lp(1, 0) + Lp(0, 0.1) + Lp(2, 0.2) + Lp(3.5, 0.3),
]
RATES = {
    "number": 0.1,
    "integer": 1,
    "zero": 0.0,
    "float32 tensor": torch.tensor(0.1),
    "float64 tensor": torch.tensor(0.1, dtype=torch.float64),
    "zero tensor": torch.tensor(0.0),
    "tiny tensor": torch.tensor(1e-300, dtype=torch.float64),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weights(dtype):
    torch.manual_seed(0)
    special = [0.0, -0.0, 1e-40, 1e-38, 1e-4, -1.0, 6e4]
    return [
        torch.tensor(special).to(dtype),
        torch.randn(17, 5).to(dtype),
        torch.randn(4, 6).to(dtype).T,
        torch.randn(6, 4).to(dtype)[:, ::2],
        torch.zeros(0, 3, dtype=dtype),
        torch.tensor(0.5).to(dtype),
    ]


def bits(tensors):
    """Compare bits, so that 0.0 and -0.0 differ and a NaN equals itself."""
    return [(t.dtype, t.shape, bytes(t.flatten().clone().untyped_storage())) for t in tensors]


@dtypes
@pytest.mark.parametrize("rate", RATES.values(), ids=RATES.keys())
@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_list_is_bit_identical_to_single_tensors(penalty, rate, dtype):
    tensors = weights(dtype)
    before = bits(tensors)
    listed = penalty.factor(TensorList(tensors), rate).tensors
    assert bits(listed) == bits([penalty.factor(tensor, rate) for tensor in tensors])
    assert bits(tensors) == before, "the weights were changed in place"


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_s_of_a_list(penalty):
    tensors = weights(torch.float32)
    assert bits(penalty.s(TensorList(tensors)).tensors) == bits([penalty.s(t) for t in tensors])


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES.keys())
@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_foreach_steps_keep_order_of_mixed_dtypes(penalty, rate):
    tensors = [tensor for group in zip(*map(weights, DTYPES), strict=True) for tensor in group]
    single = decay_factors(tensors, penalty, rate)
    foreach = decay_factors(tensors, penalty, rate, foreach=True)
    assert bits(foreach) == bits(single)
    copies = [[tensor.clone() for tensor in tensors] for _ in range(2)]
    multiply_(copies[0], single)
    multiply_(copies[1], foreach, foreach=True)
    assert bits(copies[0]) == bits(copies[1])
    assert [copy.dtype for copy in copies[0]] == [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize("foreach", [False, True])
def test_empty_list(foreach):
    assert decay_factors([], Lp(1, 0.1), 0.1, foreach=foreach) == []
    multiply_([], [], foreach=foreach)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype, foreach):
    """The product w * factor is computed in float32; the factor is not rounded first."""
    torch.manual_seed(1)
    w = torch.randn(500).to(dtype)
    (factor,) = decay_factors([w], Lp(1, 0.1), 0.1, foreach=foreach)
    expected = (w.float() * factor).to(dtype)
    assert not torch.equal(expected, w * factor.to(dtype)), "the two must differ here"
    multiply_([w], [factor], foreach=foreach)
    assert torch.equal(w, expected)


class TestTensorList:
    def test_new_and_in_place_operators(self):
        tensors = [torch.tensor([1.0, 4.0]), torch.tensor([[9.0]])]
        x = TensorList(tensors)
        squares = x**2
        assert bits(squares.tensors) == bits([tensor**2 for tensor in tensors])
        assert tensors[0].tolist() == [1, 4], "** makes new tensors"
        first = tensors[0]
        x **= 0.5
        x += 1
        x *= 2
        x += squares
        x *= squares
        x *= torch.tensor(0.5)
        assert x.tensors[0] is first
        assert first.tolist() == [(4 + 1) * 1 / 2, (6 + 16) * 16 / 2]
        assert tensors[1].item() == (8 + 81) * 81 / 2

    def test_dtype_and_flush(self):
        x = TensorList([torch.tensor([1.0, 1e-310, 0.0], dtype=torch.float64)])
        assert x.dtype == torch.float64
        assert namespace(x).flush(x).tensors[0].tolist() == [1.0, 0.0, 0.0]


class TestNamespace:
    def test_each_framework_has_its_namespace(self):
        assert namespace(np.zeros(1)) is np
        assert namespace(np.float64(1)) is np
        assert namespace(1.5) is np
        assert namespace(torch.zeros(1)).abs is torch.abs
        assert namespace(torch.nn.Parameter(torch.zeros(1))) is namespace(torch.zeros(1))
        assert namespace(TensorList([])) is not namespace(torch.zeros(1))

    def test_array_api_object_provides_its_namespace(self):
        class Theirs:
            def __array_namespace__(self):
                return "theirs"

        assert namespace(Theirs()) == "theirs"

    @pytest.mark.parametrize(
        ("dtype", "floating"),
        [
            (torch.float16, True),
            (torch.float64, True),
            (torch.complex64, False),
            (torch.int8, False),
        ],
        ids=str,
    )
    def test_real_floating(self, dtype, floating):
        assert namespace(torch.zeros(1)).isdtype(dtype, "real floating") is floating
