"""The checks of torch's optimizer suite that apply, run on PAdam, PSGD and attached optimizers.

Each test states one behaviour that torch checks for its own optimizers, over the settings of
torch's database. A listed difference (see ``subjects.difference``) must fail: if it starts to
hold, the list is out of date.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from .subjects import SUBJECTS, Subject, difference

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*lr_scheduler.step:UserWarning",
    "ignore:these tensors are all zero:UserWarning",
)


def over(holds_for: Callable[[Subject], Any] = lambda subject: True):
    """Run a check over all subjects; expect a failure where a difference is listed."""

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        check = test.__name__.removeprefix("test_")
        params = []
        for subject in filter(holds_for, SUBJECTS):
            reason = difference(check, subject)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            params.append(pytest.param(subject, id=str(subject), marks=marks))
        return pytest.mark.parametrize("subject", params)(test)

    return mark


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]):
    record_property("upstream", request.node.nodeid)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    seeded = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (3,), (2, 3, 2), ())
    return [nn.Parameter(torch.randn(s, generator=seeded, dtype=dtype)) for s in shapes]


def train(optimizer: Optimizer, steps: int, start: int = 0) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in range(start, start + steps):
        seeded = torch.Generator().manual_seed(t)
        for param in params:
            param.grad = torch.randn(param.shape, generator=seeded, dtype=param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def assert_close(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-8)


def supports(impl: str) -> Callable[[Subject], bool]:
    return lambda subject: impl in subject.info.supported_impls


@over()
def test_goes_the_right_direction(subject):
    for settings in subject.inputs():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(10, 5))
        bias = nn.Parameter(torch.randn(10))
        x, target = torch.randn(5), torch.randn(10)
        optimizer = subject.build([weight, bias], **settings)

        def closure():
            optimizer.zero_grad()  # noqa: B023
            loss = (weight.mv(x) + bias - target).pow(2).sum()  # noqa: B023
            loss.backward()
            return loss

        before = closure().item()
        for _ in range(20):
            optimizer.step(closure)
        after = closure().item()
        assert after > before if settings.get("maximize") else after < before, settings


@over(supports("foreach"))
def test_foreach_equals_loop(subject):
    for loop, foreach in zip(
        subject.inputs(foreach=False), subject.inputs(foreach=True), strict=True
    ):
        expected = train(subject.build(parameters(), **loop), 5)
        assert_close(train(subject.build(parameters(), **foreach), 5), expected, rtol=1e-10)


@over(supports("fused"))
def test_fused_equals_loop(subject):
    for settings in subject.inputs(foreach=False):
        expected = train(subject.build(parameters(), **settings), 5)
        del settings["foreach"]
        assert_close(train(subject.build(parameters(), fused=True, **settings), 5), expected)


@over()
def test_default_equals_loop(subject):
    for settings in subject.inputs(foreach=False):
        expected = train(subject.build(parameters(), **settings), 5)
        del settings["foreach"]
        assert_close(train(subject.build(parameters(), **settings), 5), expected)


@over(lambda subject: not subject.decays)
def test_without_decay_equals_torch(subject):
    for settings in subject.inputs():
        if "weight_decay" not in settings:  # its default is 0 in PAdam and 0.01 in AdamW
            settings = subject.without_l2(settings)
        theirs = subject.info.optim_cls(parameters(), **settings)
        ours = subject.build(parameters(), **settings)
        assert_close(train(ours, 5), train(theirs, 5))


@over()
def test_missing_gradients_change_nothing(subject):
    for settings in subject.inputs():
        params = parameters()
        before = [param.detach().clone() for param in params]
        optimizer = subject.build(params, **settings)
        optimizer.step()
        assert all(map(torch.equal, before, params)), settings


@over()
def test_zero_gradients_change_nothing(subject):
    for settings in subject.inputs():
        if settings.get("weight_decay"):
            continue
        params = parameters()
        before = [param.detach().clone() for param in params]
        optimizer = subject.build(params, **subject.without_l2(settings))
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert_close(params, before, rtol=1e-12)


@over()
def test_repr_names_class_and_groups(subject):
    for settings in subject.inputs():
        text = repr(subject.build(parameters(), **settings))
        assert text.startswith(subject.name.removeprefix("attach(").removesuffix(")"))
        assert "Parameter Group 0" in text


@over()
def test_resume_from_state_dict_is_deterministic(subject):
    for settings in subject.inputs():
        optimizer = subject.build(parameters(), **settings)
        weights = [weight.clone() for weight in train(optimizer, 3)]
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        expected = train(optimizer, 3, start=3)
        params = [nn.Parameter(weight) for weight in weights]
        resumed = subject.build(params, **settings)
        resumed.load_state_dict(saved)
        assert all(map(torch.equal, train(resumed, 3, start=3), expected)), settings


@over()
def test_older_state_dict_without_newer_flags_loads(subject):
    for settings in subject.inputs():
        optimizer = subject.build(parameters(), **settings)
        train(optimizer, 2)
        old = copy.deepcopy(optimizer.state_dict())
        for flag in subject.info.not_og_supported_flags:
            for group in old["param_groups"]:
                group.pop(flag, None)
        optimizer.load_state_dict(old)
        train(optimizer, 2)


@over()
def test_step_count_that_is_a_number_loads(subject):
    for settings in subject.inputs():
        optimizer = subject.build(parameters(), **settings)
        train(optimizer, 2)
        old = copy.deepcopy(optimizer.state_dict())
        for state in old["state"].values():
            if "step" in state:
                state["step"] = state["step"].item()
        optimizer.load_state_dict(old)
        train(optimizer, 2)
        for state in optimizer.state.values():
            assert "step" not in state or isinstance(state["step"], Tensor)


@over()
def test_copies_step_alike(subject):
    optimizer = subject.build(parameters(), lr=0.1)
    train(optimizer, 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, 2, start=2)
    for copied in copies:
        assert copied.param_groups[0]["lr"] == 0.1
        assert_close(train(copied, 2, start=2), expected)


@over()
def test_copies_keep_public_attributes(subject):
    optimizer = subject.build(parameters(), lr=0.1)
    copied = copy.deepcopy(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public <= set(vars(copied))


@over()
def test_hooks_run_in_order(subject):
    called = []
    optimizer = subject.build(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after", "saved", "load", "loaded"]


@over()
def test_schedulers(subject):
    for makers in subject.info.scheduler_inputs:
        rates = []
        for build in (subject.build, subject.info.optim_cls):
            optimizer = build(parameters(), lr=0.1)
            schedulers = [make(optimizer) for make in makers]
            for t in range(12):
                train(optimizer, 1, start=t)
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates[0] == rates[1] != 0.1


@over()
def test_tensor_learning_rate_equals_number(subject):
    for settings in subject.inputs():
        settings.pop("lr", None)
        expected = train(subject.build(parameters(), lr=0.0078125, **settings), 4)
        tensor = train(subject.build(parameters(), lr=torch.tensor(0.0078125), **settings), 4)
        assert_close(tensor, expected, rtol=1e-5)


@over()
def test_group_settings_override_defaults(subject):
    a, b = parameters()[:1], parameters()[2:3]
    settings = subject.without_l2({"lr": 0.1})
    optimizer = subject.build([{"params": a}, {"params": b, "lr": 0.0}], **settings)
    before = b[0].detach().clone()
    train(optimizer, 3)
    # Rprop and Adafactor find their own step sizes.
    if type(optimizer).__name__ not in ("Rprop", "Adafactor"):
        assert torch.equal(b[0], before)
    optimizer.add_param_group({"params": parameters()[3:]})
    train(optimizer, 1)


@over(lambda subject: subject.info.supports_complex)
def test_complex_equals_pairs_of_reals(subject):
    for settings in subject.inputs():
        values = torch.randn(3, 2, dtype=torch.complex128, generator=torch.Generator())
        ours = nn.Parameter(values.clone())
        pairs = nn.Parameter(torch.view_as_real(values).clone())
        both = [subject.build([weight], **settings) for weight in (ours, pairs)]
        for t in range(3):
            gradient = torch.randn(3, 2, dtype=torch.complex128, generator=torch.Generator())
            ours.grad, pairs.grad = gradient * (t + 1), torch.view_as_real(gradient * (t + 1))
            for optimizer in both:
                optimizer.step()
        assert_close([torch.view_as_real(ours.detach())], [pairs.detach()])


def error_cases() -> list[Any]:
    cases = []
    for subject in SUBJECTS:
        for case in subject.info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            desc = case.optimizer_error_input.desc
            reason = difference("errors", subject, desc)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            cases.append(pytest.param(subject, case, id=f"{subject}-{desc}", marks=marks))
    return cases


@pytest.mark.parametrize(("subject", "case"), error_cases())
def test_errors(subject, case):
    given = case.optimizer_error_input
    params = parameters(torch.float32) if given.params is None else given.params
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            subject.build(params, **given.kwargs)
        return

    def build_and_step() -> None:
        optimizer = subject.build(params, **given.kwargs)
        if case.error_on is OptimizerErrorEnum.STEP_ERROR:
            optimizer.step()

    with pytest.raises(case.error_type, match=case.error_regex):
        build_and_step()


@over()
def test_mixed_dtypes_in_one_group(subject):
    single, double = parameters(torch.float32), parameters(torch.float64)
    weights = train(subject.build([single[0], double[2]], lr=0.01), 3)
    assert [weight.dtype for weight in weights] == [torch.float32, torch.float64]
    assert all(weight.isfinite().all() for weight in weights)


@over(lambda subject: "Adafactor" not in subject.name)  # it divides by the size
def test_empty_parameters_are_accepted(subject):
    empty = nn.Parameter(torch.empty(0, 3))
    weight = parameters()[0]
    train(subject.build([empty, weight], lr=0.01), 2)
    assert empty.shape == (0, 3)


@over()
def test_non_contiguous_parameters_and_gradients(subject):
    for settings in subject.inputs():
        weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
        plain = nn.Parameter(weight.detach().contiguous().clone())
        both = [subject.build([param], **settings) for param in (weight, plain)]
        for t in range(3):
            gradient = torch.randn(4, 3, dtype=torch.float64) * (t + 1)
            weight.grad, plain.grad = gradient.t(), gradient.t().contiguous()
            for optimizer in both:
                optimizer.step()
        assert_close([weight.detach()], [plain.detach()])


@over()
def test_named_parameters_are_saved(subject):
    model = nn.Linear(3, 2)
    optimizer = subject.build(model.named_parameters(), lr=0.01)
    train(optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(saved)


@over()
def test_closure_is_called_once_and_its_loss_returned(subject):
    params = parameters()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        for param in params:
            param.grad = torch.ones_like(param)
        return 3.5

    assert subject.build(params, lr=0.01).step(closure) == 3.5
    assert calls == [True]


@over()
def test_default_dtype_float64_works(subject):
    torch.set_default_dtype(torch.float64)
    try:
        expected = train(subject.build(parameters(), lr=0.01), 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(train(subject.build(parameters(), lr=0.01), 3), expected)


@over()
def test_profiler_names_the_step(subject):
    optimizer = subject.build(parameters(), lr=0.01)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(optimizer, 1)
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert any(event.name == name for event in profile.events())


@over()
def test_no_cyclic_references(subject):
    params = parameters()
    optimizer = subject.build(params, lr=0.01)
    train(optimizer, 2)
    alive = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
