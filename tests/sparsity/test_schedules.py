import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import pdecay
from pdecay import PSGD, Lp, PAdam
from pdecay._sparsity.schedules import LamSchedule, PSchedule

LP = Lp(1.0, 0.5)


def an_optimizer(decay=LP):
    return PAdam([nn.Parameter(torch.ones(2, 2))], decay=decay)


def ps(optimizer):
    return [p for group in optimizer.param_groups for p, _ in group["decay"]]


def run(schedule, steps):
    values = [ps(schedule.optimizer)]
    for _ in range(steps):
        schedule.step()
        values.append(ps(schedule.optimizer))
    return values


def test_linear_between_milestones_and_constant_outside():
    schedule = PSchedule(an_optimizer(), [(2, 2.0), (6, 1.0)])
    assert run(schedule, 8) == [[2], [2], [2], [1.75], [1.5], [1.25], [1], [1], [1]]
    assert schedule.get_last_p() == [[1.0]]


def test_first_value_is_written_at_construction():
    optimizer = an_optimizer()
    PSchedule(optimizer, [(0, 2.0), (10, 0.8)])
    assert optimizer.param_groups[0]["decay"] == [[2.0, 0.5]]


def test_restarts():
    schedule = PSchedule(an_optimizer(), [(0, 2.0), (3, 0.5)], restart_every=4)
    assert [p for (p,) in run(schedule, 8)] == pytest.approx([2, 1.5, 1, 0.5, 2, 1.5, 1, 0.5, 2])


def test_sums_take_one_number_or_one_for_each_term():
    optimizer = an_optimizer(Lp(0.8, 1e-3) + Lp(2, 1e-2))
    schedule = PSchedule(optimizer, [(0, (2, 2)), (2, (0.8, 2))])
    assert run(schedule, 2) == [[2, 2], [pytest.approx(1.4), 2], [pytest.approx(0.8), 2]]
    optimizer = an_optimizer(Lp(0.8, 1e-3) + Lp(2, 1e-2))
    assert run(PSchedule(optimizer, [(0, 1.5)]), 1) == [[1.5, 1.5]] * 2


def test_groups_without_decay_are_unchanged():
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = PSGD([{"params": [a]}, {"params": [b], "decay": None}])
    PSchedule(optimizer, [(0, 1.5)]).step()
    assert [group["decay"] for group in optimizer.param_groups] == [[[1.5, 0.01]], []]


def test_zero_weights_move_at_p_2_and_stay_zero_below():
    w = nn.Parameter(torch.zeros(2, 2))
    optimizer = PSGD([w], lr=0.1, decay=Lp(2, 0.1))
    schedule = PSchedule(optimizer, [(0, 2.0), (2, 0.5)])
    for _ in range(3):
        w.grad = torch.ones_like(w)
        optimizer.step()
        schedule.step()
    assert w.abs().min() > 0
    with torch.no_grad():
        w.zero_()
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert not w.any()


def test_lam_schedule_is_independent_of_lr_with_decay_lr():
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = PSGD([{"params": [w], "decay_lr": 0.1}], lr=1e-3, decay=Lp(2, 1.0))
    schedule = LamSchedule(optimizer, [(0, 0.0), (1, 1.0)])
    for expected in (1.0, 1 / 1.1):
        w.grad = torch.zeros_like(w)
        optimizer.step()
        schedule.step()
        assert w[0, 0].item() == pytest.approx(expected)


def test_combines_with_lr_scheduler_on_attached_optimizer():
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([w], lr=1.0)
    pdecay.attach(optimizer, Lp(2, 0.1))
    lrs = LambdaLR(optimizer, lambda step: 0.5**step)
    schedules = [PSchedule(optimizer, [(0, 2.0), (4, 1.0)]), LamSchedule(optimizer, [(0, 3.0)])]
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
        for scheduler in (lrs, *schedules):
            scheduler.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["decay"], group["decay_scale"]) == (0.25, [[1.5, 0.1]], 3.0)


def test_resume_continues_the_schedule():
    first = PSchedule(an_optimizer(), [(0, 2.0), (10, 0.8)], restart_every=7)
    run(first, 5)
    second = PSchedule(an_optimizer(), [(0, 2.0), (10, 0.8)], restart_every=7)
    second.load_state_dict(first.state_dict())
    assert ps(second.optimizer) == ps(first.optimizer)
    assert run(second, 9) == run(first, 9)


@pytest.mark.parametrize(
    ("milestones", "restart", "message"),
    [
        ([], None, "at least one milestone"),
        ([(0, -1.0)], None, "a milestone's value must be finite and >= 0, got -1.0"),
        ([(0, float("nan"))], None, "finite"),
        ([(5, 1.0), (5, 2.0)], None, "in order of time, got 5 before 5"),
        ([(-1, 1.0)], None, "whole number >= 0, got -1"),
        ([(0, 1.0)], 0, "restart_every must be a whole number >= 1, got 0"),
        ([(0, (1.0, 2.0, 3.0))], None, "3 values of p for a decay of 1 terms"),
        ([(0, 1.0), (1, (1.0, 2.0))], None, "same number of values"),
    ],
)
def test_bad_milestones_change_nothing(milestones, restart, message):
    optimizer = an_optimizer()
    with pytest.raises(ValueError, match=message):
        PSchedule(optimizer, milestones, restart)
    assert optimizer.param_groups[0]["decay"] == [[1.0, 0.5]]


def test_lam_schedule_with_a_target_is_refused():
    optimizer = an_optimizer()
    schedule = LamSchedule(optimizer, [(0, 1.0), (5, 0.5)])
    pdecay.SparsityTarget(optimizer, 0.5, 10)
    with pytest.raises(ValueError, match="both set decay_scale"):
        schedule.step()
    with pytest.raises(ValueError, match="both set decay_scale"):
        LamSchedule(optimizer, [(0, 1.0)])


def test_lam_schedule_that_ends_at_0_warns_of_released_zeros():
    with pytest.warns(UserWarning, match="weights that are zero move again") as caught:
        LamSchedule(an_optimizer(), [(0, 1.0), (5, 0.0)])
    assert caught[0].filename == __file__
    LamSchedule(an_optimizer(Lp(2, 0.5)), [(0, 1.0), (5, 0.0)])  # makes no zeros


@pytest.mark.parametrize("load_first", [False, True])
def test_lam_schedule_does_not_undo_freeze_zeros(load_first):
    optimizer = an_optimizer()
    schedule = LamSchedule(optimizer, [(0, 1.0)])
    schedule.step()
    pdecay.freeze_zeros(optimizer)
    with pytest.raises(ValueError, match="would let the weights decay again after freeze_zeros"):
        schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    resumed = an_optimizer()
    if load_first:
        resumed.load_state_dict(saved[0])
    schedule = LamSchedule(resumed, [(0, 1.0)])
    if not load_first:
        resumed.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert resumed.param_groups[0]["decay_scale"] == optimizer.param_groups[0]["decay_scale"]
    resumed.param_groups[0]["decay_scale"] = 1.0
    schedule.step()
    assert schedule.last_step == 2


def test_rejects_optimizer_without_decay():
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(TypeError, match="needs an optimizer that decays"):
        PSchedule(plain, [(0, 1.0)])


def test_rejects_broken_checkpoint():
    schedule = PSchedule(an_optimizer(), [(0, 1.0)])
    with pytest.raises(ValueError, match="last_step must be a whole number >= 0, got -3"):
        schedule.load_state_dict({"last_step": -3})


class TestGroupsAddedToAnAttachedOptimizer:
    """`attach` writes the settings of a new group at the next step; others may read them first."""

    @staticmethod
    def attached():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
        pdecay.attach(optimizer, LP)
        return optimizer

    @staticmethod
    def add(optimizer):
        module = nn.Linear(2, 2, bias=False)
        optimizer.add_param_group({"params": module.parameters()})
        return module

    def test_schedules_write_to_it(self):
        optimizer = self.attached()
        schedule = PSchedule(optimizer, [(0, 2.0), (1, 0.8)])
        self.add(optimizer)
        schedule.step()
        assert ps(optimizer) == [0.8, 0.8]
        self.add(optimizer)
        PSchedule(optimizer, [(0, 1.5)])
        LamSchedule(optimizer, [(0, 0.5)])
        assert ps(optimizer) == [1.5] * 3
        assert [group["decay_scale"] for group in optimizer.param_groups] == [0.5] * 3

    def test_freeze_zeros_stops_its_decay(self):
        optimizer = self.attached()
        weight = self.add(optimizer).weight
        pdecay.freeze_zeros(optimizer)
        weight.grad = torch.zeros_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        assert torch.equal(weight, before)

    def test_doctor_and_sparsity_see_it(self):
        optimizer = self.attached()
        module = self.add(optimizer)
        assert pdecay.sparsity(module, optimizer=optimizer).layers[0].decayed
        optimizer = self.attached()
        pdecay.doctor(self.add(optimizer), optimizer)


@pytest.mark.parametrize("schedule", [PSchedule, LamSchedule])
def test_step_after_detach_names_the_missing_decay(schedule):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    handle = pdecay.attach(optimizer, Lp(0.8, 1e-2))
    running = schedule(optimizer, [(0, 1.0), (10, 0.8)])
    handle.detach()
    with pytest.raises(TypeError, match=f"{schedule.__name__} needs an optimizer that decays"):
        running.step()
