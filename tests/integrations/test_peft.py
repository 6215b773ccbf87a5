"""LoRA adapters of PEFT: zero-initialised factors, frozen bases, merges, deployment."""

from __future__ import annotations

import pytest
import torch

import pdecay
from pdecay import Lp

pytest.importorskip("transformers", reason="pip install pdecay[transformers]")
peft = pytest.importorskip("peft", reason="pip install peft")

from .gpt2 import prompt, sparse_model  # noqa: E402


def adapted(model):
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


def train(model, steps=12, target=0.5):
    groups = pdecay.param_groups(model, exclude="*lora_B*")
    optimizer = pdecay.PAdam(groups, lr=1e-2, decay=Lp(0.8, 1e-2))
    steered = pdecay.SparsityTarget(optimizer, target, steps)
    model.train()
    for _ in range(steps):
        model(prompt(), labels=prompt()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return steered.sparsity, model.eval()


def factors(model, name):
    return [weight for key, weight in model.named_parameters() if name in key]


def test_zero_initialised_factor_does_not_decay():
    model = adapted(sparse_model())
    decayed, rest = pdecay.param_groups(model)
    assert {id(one) for one in decayed["params"]} == {id(one) for one in factors(model, "lora_A")}
    assert {id(one) for one in rest["params"]} == {id(one) for one in factors(model, "lora_B")}
    # After some training the factor is not zero, so that only its name can exclude it.
    factors(model, "lora_B")[0].data.fill_(1.0)
    assert len(pdecay.param_groups(model)[0]["params"]) == 5
    assert len(pdecay.param_groups(model, exclude="*lora_B*")[0]["params"]) == 4


def test_target_leaves_the_frozen_base_alone():
    base = sparse_model()
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    sparsity, model = train(adapted(base))
    assert abs(sparsity - 0.5) < 1e-2
    assert all(weight.count_nonzero() for weight in factors(model, "lora_B"))
    restored = model.unload().state_dict()
    assert all(torch.equal(restored[name], weight) for name, weight in before.items())


def test_merge_fills_the_zeros():
    base = sparse_model()
    weight = base.transformer.h[0].mlp.c_fc.weight
    zero = weight.detach() == 0
    assert zero.float().mean() > 0.75
    _, model = train(adapted(base))
    merged = model.merge_and_unload()
    weight = merged.transformer.h[0].mlp.c_fc.weight
    assert (weight == 0).float().mean() < 0.1
    weight.data.masked_fill_(zero, 0.0)  # the zeros of the base again; train on with freeze_zeros
    assert torch.equal(weight == 0, zero)


def test_deploy_keeps_the_adapter_beside_a_sparse_base():
    _, model = train(adapted(sparse_model()))
    example = {"input_ids": prompt()}
    deployed = pdecay.deploy(model, example, choose="sparse", seconds=0)
    sparse = [layer.name for layer in deployed.report.layers if layer.choice == "sparse"]
    assert any(name.endswith("c_fc.base_layer") for name in sparse)
    with torch.no_grad():
        expected, got = model(**example).logits, deployed(**example).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_peft_model_is_not_saved_as_a_folder(tmp_path):
    from pdecay.integrations.transformers import from_pretrained, save_pretrained

    _, model = train(adapted(sparse_model()))
    with pytest.raises(TypeError, match=r"got PeftModel.*model.merge_and_unload\(\)"):
        save_pretrained(model, tmp_path)
    merged = model.merge_and_unload()
    save_pretrained(merged, tmp_path)
    with torch.no_grad():
        back = from_pretrained(tmp_path)(prompt()).logits
        assert torch.equal(back, merged(prompt()).logits)
