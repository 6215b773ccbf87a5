"""deploy and generate on models of transformers."""

from __future__ import annotations

import pytest
import torch

import pdecay

transformers = pytest.importorskip("transformers", reason="pip install pdecay[transformers]")

from pdecay.integrations.transformers import generation_example  # noqa: E402

from .gpt2 import make_model, model_with_dead_units, prompt, sparse_model  # noqa: E402

WAYS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams, static cache": {"num_beams": 2, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "padding": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])},
    "sampling": {"do_sample": True, "top_k": 5},
}
for way in WAYS.values():
    way["repetition_penalty"] = 1.5  # a model with random weights repeats one token otherwise


def generate(model, **options):
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **options}
    options.setdefault("attention_mask", torch.ones_like(prompt()))
    return model.generate(prompt(), **options)


@pytest.fixture(scope="module")
def models():
    model = model_with_dead_units()
    example = generation_example(prompt(), 3)
    deployed = pdecay.deploy(model, example, choose="sparse", seconds=0)
    return model, pdecay.compact(model, example), deployed


def test_all_linear_layers_are_sparse(models):
    report = models[2].report
    assert {(layer.kind, layer.choice) for layer in report.layers} == {
        ("Conv1D", "sparse"),
        ("Linear", "sparse"),
    }
    assert len(report.layers) == 9  # four in each block, and the tied head
    assert report.difference < 1e-5
    assert report.removed >= 8


@pytest.mark.parametrize("way", WAYS)
def test_compacted_and_deployed_models_generate_the_same_tokens(models, way):
    expected = generate(models[0], **WAYS[way])
    assert len(expected[:, 6:].unique()) > 3  # not one token repeated
    for other in models[1:]:
        assert torch.equal(generate(other, **WAYS[way]), expected)


def test_example_has_prefill_and_decode_shapes():
    model = sparse_model()
    shapes = []

    def record(module, args):
        shapes.append(tuple(args[0].shape[:-1]))

    model.transformer.h[0].mlp.c_fc.register_forward_pre_hook(record)
    example = generation_example(prompt(), 3, attention_mask=torch.ones(2, 6))
    logits = example.call(model)
    assert shapes == [(2, 6), (2, 1), (2, 1), (2, 1)]
    assert [tuple(one.shape[:2]) for one in logits] == [(2, 1)] * 4
    # The cached calls return the logits of one call with all tokens.
    whole = model(torch.cat([prompt(), prompt()[:, :3]], 1)).logits[:, 5:]
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-4, atol=1e-4)


def test_encoder_decoder():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(torch.rand_like(parameter) > 0.7)
    example = generation_example(prompt(), 2)
    deployed = pdecay.deploy(model, example, choose="sparse", seconds=0)
    assert deployed.report.chosen == "sparse"
    assert len(example.call(deployed)) == 3
    assert torch.equal(generate(deployed), generate(model))


def test_cache_as_example_is_refused():
    cache = transformers.DynamicCache()
    with pytest.raises(ValueError, match=r"generation_example\(input_ids, new_tokens\)"):
        pdecay.deploy(make_model(), {"input_ids": prompt(), "past_key_values": cache})


@pytest.mark.parametrize(("ids", "count"), [(torch.arange(3), 2), ([1, 2], 2), (prompt(), 0)])
def test_invalid_example_is_refused(ids, count):
    with pytest.raises(ValueError, match=r"input_ids must be|new_tokens must be"):
        generation_example(ids, count)


def test_sparsity_counts_output_units_of_conv1d_as_rows():
    model = make_model()
    model.transformer.h[0].mlp.c_fc.weight.data[:, 5] = 0  # an output unit
    model.transformer.h[0].mlp.c_fc.weight.data[2] = 0  # an input unit
    dead = pdecay.sparsity(model).dead_units
    assert dead == {"transformer.h.0.mlp.c_fc.weight": {"rows": (5,), "columns": (2,)}}


def test_param_groups_decay_conv1d_weights_only():
    decayed, rest = pdecay.param_groups(make_model())
    assert len(decayed["params"]) == 2 + 2 * 4  # embeddings, and four layers in each block
    assert all(parameter.ndim < 2 for parameter in rest["params"])


def test_sparse_linear_of_conv1d():
    layer = transformers.pytorch_utils.Conv1D(5, 32)
    layer.weight.data.mul_(torch.rand(32, 5) > 0.5)
    layer.bias.data.normal_()
    sparse, x = pdecay.SparseLinear(layer), torch.randn(3, 32)
    assert (sparse.in_features, sparse.out_features) == (32, 5)
    with torch.inference_mode():
        torch.testing.assert_close(sparse(x), layer(x))
        torch.testing.assert_close(sparse.to_dense()(x), layer(x))
