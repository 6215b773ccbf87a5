"""Tests of the torch.compile kernel: uncompiled for all settings, compiled for a few."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pdecay._optim.kernels import compiled, native
from tests.optim.kernels.settings import SGD, TERMS, TOLERANCE

OTHER_USER = 65533


@pytest.fixture
def eager(monkeypatch):
    """Run the functions without the compiler, which takes seconds for each setting."""
    monkeypatch.setattr(compiled, "_compile", lambda function, *_: function)


@pytest.mark.usefixtures("eager")
class TestMathematics:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("name", TERMS)
    def test_adam(self, twins, dtype, name):
        pair = twins(dtype)
        pair.adam(compiled, TERMS[name], 60)
        assert pair.difference() < TOLERANCE[dtype]
        assert pair.different_zeros() < 0.005

    @pytest.mark.parametrize(
        "options", [{"amsgrad": True}, {"maximize": True, "weight_decay": 0.3}], ids=str
    )
    def test_adam_settings(self, twins, options):
        pair = twins(torch.float64)
        pair.adam(compiled, TERMS["0.8"], 30, **options)
        assert pair.difference() < 1e-12

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "dampening": 0.5, "maximize": True},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("name", ["0.8", "elastic", "none"])
    def test_sgd(self, twins, options, name):
        pair = twins(torch.float64)
        pair.sgd(compiled, TERMS[name], 30, **options)
        assert pair.difference() < 1e-12

    @pytest.mark.parametrize("name", TERMS)
    def test_decay(self, twins, literal_factor, name):
        pair = twins(torch.float32)
        olds = [w.clone() for w in pair.fast]
        expected = [o.double() * literal_factor(o, TERMS[name], 1e-3) for o in olds]
        compiled.decay_(pair.fast, olds, terms=TERMS[name], rate=1e-3)
        for weight, value in zip(pair.fast, expected, strict=True):
            torch.testing.assert_close(weight.double(), value, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("name", [name for name in TERMS if name != "none"])
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("rate", [1e-45, 1e-3, 1e30])
    def test_extreme_weights_are_handled(self, name, dtype, rate):
        info = torch.finfo(dtype)
        size = 10.0 ** torch.arange(-320, 309, dtype=torch.float64)
        old = torch.cat([size, -size, torch.tensor([0.0, info.max, info.tiny])]).to(dtype)
        old = old[old.isfinite()]
        w = old.clone()
        compiled.decay_([w], [old], terms=TERMS[name], rate=rate)
        assert w.isfinite().all()
        assert (w.abs() <= old.abs()).all()
        assert not ((w != 0) & (w.abs() < info.tiny)).any()
        assert not torch.signbit(w[w == 0]).any()

    @pytest.mark.parametrize("name", TERMS)
    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_zero_lr_changes_nothing_even_at_zero(self, name, as_tensor):
        values = [0.0, 1.0, -1e-20, 1e-42, 3e38]
        w, old = torch.tensor(values), torch.tensor(values).flip(0)
        lr = torch.tensor(0.0) if as_tensor else 0.0
        compiled.decay_([w], [old], terms=TERMS[name], rate=lr)
        compiled.sgd_([w], [torch.zeros(5)], [], terms=TERMS[name], lr=lr, **SGD)
        assert w.tolist() == torch.tensor(values).tolist()

    @pytest.mark.parametrize("name", ["0", "0.8", "1", "elastic"])
    def test_zero_stays_zero_for_any_update(self, name):
        w = torch.zeros(9)
        compiled.sgd_([w], [torch.linspace(-1e20, 1e20, 9)], [], terms=TERMS[name], lr=1e-3, **SGD)
        assert torch.equal(w, torch.zeros(9))

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_zero_stays_zero_for_a_rate_below_single_precision(self, as_tensor):
        w, rate = torch.ones(9), 1e-50  # of the learning rate 1e-20 and the scale that holds zeros
        given = torch.tensor(rate, dtype=torch.float64) if as_tensor else rate
        compiled.decay_([w], [torch.zeros(9)], terms=TERMS["0.8"], rate=given)
        assert torch.equal(w, torch.zeros(9))

    @pytest.mark.parametrize("p", [2.1, 3])
    def test_zero_moves_for_p_above_2(self, p):
        w = torch.ones(9)
        compiled.decay_([w], [torch.zeros(9)], terms=[(p, 0.5)], rate=1.0)
        torch.testing.assert_close(w, torch.ones(9), rtol=1e-7, atol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_computes_in_float32_and_rounds_once(self, dtype):
        torch.manual_seed(0)
        old = torch.randn(1000).to(dtype)
        half, wide = old.clone(), old.float()
        compiled.decay_([half], [old], terms=TERMS["0.8"], rate=1e-2)
        compiled.decay_([wide], [old.float()], terms=TERMS["0.8"], rate=1e-2)
        assert torch.equal(half, wide.to(dtype))

    def test_momentum_that_is_more_precise_than_the_weight_is_not_rounded(self):
        torch.manual_seed(0)
        w, grad, buffer = torch.randn(100).bfloat16(), torch.randn(100).bfloat16(), torch.randn(100)
        wide = [[w.float()], [grad.float()], [buffer.clone()]]
        for streams in (wide, [[w], [grad], [buffer]]):
            settings = {**SGD, "momentum": 0.9}
            compiled.sgd_(*streams, terms=TERMS["0.8"], lr=0.1, **settings)
        assert torch.equal(w, wide[0][0].bfloat16())
        assert torch.equal(buffer, wide[2][0])

    def test_layouts_and_small_tensors_together(self):
        torch.manual_seed(0)
        plain = [torch.rand(4, 5, 6, 7), torch.rand(300, 400), torch.rand(3)]
        olds = [tensor.clone() for tensor in plain]
        other = [
            plain[0].to(memory_format=torch.channels_last),
            plain[1].T.clone().T,
            plain[2].clone(),
        ]
        compiled.decay_(plain, olds, terms=TERMS["0.8"], rate=1e-2)
        compiled.decay_(other, olds, terms=TERMS["0.8"], rate=1e-2)
        for one, two in zip(plain, other, strict=True):
            assert torch.equal(one, two)
        assert other[0].is_contiguous(memory_format=torch.channels_last)
        assert not torch.equal(plain[0], olds[0])

    def test_device_tensors_are_not_read(self, monkeypatch):
        """Pretend that all tensors are on an accelerator, where reading a value would wait."""
        tensors = [[torch.rand(10)] for _ in range(4)]
        expected = [[tensor.clone() for tensor in stream] for stream in tensors]
        settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        settings |= {"amsgrad": False, "maximize": False, "terms": TERMS["0.8"]}
        step = torch.tensor(4.0)
        compiled.adam_(*expected, [], [step.clone()], lr=1e-2, **settings)
        monkeypatch.setattr(compiled, "_on_host", lambda value: False)
        compiled.adam_(*tensors, [], [step], lr=torch.tensor(1e-2), **settings)
        assert step.item() == 5
        for (ours,), (theirs,) in zip(tensors, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_gradient_with_another_layout(self):
        w = torch.randn(6, 5)
        grad = torch.randn(5, 6).t()
        wanted, grads = w.clone(), grad.contiguous()
        compiled.sgd_([w], [grad], [], terms=[(0.8, 0.1)], lr=0.1, **SGD)
        compiled.sgd_([wanted], [grads], [], terms=[(0.8, 0.1)], lr=0.1, **SGD)
        assert torch.equal(w, wanted)

    def test_autograd_detects_the_changed_weight(self):
        w = torch.randn(3, requires_grad=True)
        product = (w * w).sum()
        compiled.sgd_([w], [torch.ones(3)], [], terms=[(0.8, 0.1)], lr=0.1, **SGD)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_compiled_matches_and_does_not_recompile(twins):
    """Other sizes, rates, p, lam and step counts reuse the compiled code."""
    from torch._dynamo.utils import counters

    try:
        pair = twins(torch.float32, shapes=[(200, 200), (7,), (300, 150), (5, 3)])
        pair.adam(compiled, TERMS["0.8"], 3)
        before = counters["stats"]["unique_graphs"]
        pair = twins(torch.float32, shapes=[(210, 200), (9,), (5, 4), (201, 202)])
        pair.adam(compiled, TERMS["1.9"], 20)
        pair.adam(compiled, TERMS["0.3"], 3, lr=1e-5, weight_decay=0.5)
        assert counters["stats"]["unique_graphs"] == before
    except native.KernelUnavailable as reason:
        pytest.skip(str(reason))
    assert pair.difference() < 1e-5


@pytest.fixture
def inductor_cache(tmp_path, monkeypatch):
    """Return the folder where inductor keeps code, which does not exist yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiled._compile.cache_clear()
    yield Path(default_cache_dir())
    compiled._compile.cache_clear()


@pytest.mark.parametrize("kind", ["writable", "foreign", "link", "file"])
def test_cache_of_another_user_is_not_used(inductor_cache, tmp_path, monkeypatch, kind):
    """Anyone can create /tmp/torchinductor_<user> first, and inductor runs what is there."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("read the cache"))
    target = tmp_path / "elsewhere" if kind == "link" else inductor_cache
    if kind == "file":
        target.touch()
    else:
        target.mkdir()
        target.chmod(0o777 if kind == "writable" else 0o755)
    if kind == "link":
        inductor_cache.symlink_to(target)
    if kind in ("foreign", "link"):
        if os.getuid() != 0:
            pytest.skip("only root can create another user's folder")
        os.lchown(inductor_cache, OTHER_USER, OTHER_USER)
    w = torch.ones(3)
    with pytest.raises(native.KernelUnavailable, match=r"could write to .*, where|File exists"):
        compiled.decay_([w], [w.clone()], terms=[(1, 1.0)], rate=1.0)
    assert torch.equal(w, torch.ones(3))


def test_cache_is_created_for_this_user_only(inductor_cache):
    compiled._check_cache()
    assert stat.S_IMODE(inductor_cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("own", [False, True])
def test_current_folder_is_searched_for_modules_only_if_this_process_does(
    inductor_cache, tmp_path, monkeypatch, own
):
    """Inductor runs ``python -c``, which searches it first, in a new process."""
    (tmp_path / "ctypes.py").write_text("open('trap', 'w')\n")
    monkeypatch.chdir(tmp_path)
    path = [folder for folder in sys.path if folder not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", path + [str(tmp_path)] * own)
    command = [sys.executable, "-c", "import ctypes"]
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_: subprocess.run(command))
    compiled._compile(compiled._decay, 2, 5, (), torch.float32, torch.device("cpu"))
    assert Path("trap").exists() == own


def test_compiler_failure_raises_before_any_change(monkeypatch):
    def broken(*_, **__):
        def raise_(*_):
            raise RuntimeError("no backend\nand more")

        return raise_

    monkeypatch.setattr(torch, "compile", broken)
    compiled._compile.cache_clear()
    w = torch.ones(3)
    try:
        with pytest.raises(native.KernelUnavailable, match=r"torch\.compile failed: no backend$"):
            compiled.decay_([w], [w.clone()], terms=[(1, 1.0)], rate=1.0)
    finally:
        compiled._compile.cache_clear()
    assert torch.equal(w, torch.ones(3))
