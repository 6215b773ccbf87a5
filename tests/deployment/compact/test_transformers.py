"""compact on architectures of the transformers package."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree, agree_in_float64, difference, outputs, tensors_of
from pdecay.lab.models import GPT

from .models import kill, trained

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
WORDS = {**SIZES, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PIXELS = {**SIZES, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
GPT2 = {"vocab_size": 99, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4}  # fmt: skip
HEADS = {"num_attention_heads": [1, 2, 2, 4], "sr_ratios": [4, 2, 1, 1]}

# For each model: its configuration, and where a projection reads its attention's heads.
MODELS = {
    "GPT2LMHeadModel": (GPT2, r"attn\.c_proj\.weight"),
    "BertForSequenceClassification": (WORDS, r"attention\.output\.dense\.weight"),
    "LlamaForCausalLM": ({**WORDS, "num_key_value_heads": 2}, r"o_proj\.weight"),
    "MixtralForCausalLM": (
        {**WORDS, "num_key_value_heads": 2, "num_local_experts": 2},
        r"o_proj\.weight",
    ),
    "BloomForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        None,  # interleaves queries, keys and values, so that heads are kept
    ),
    "T5ForConditionalGeneration": ({**T5, "decoder_start_token_id": 0}, r"Attention\.o\.weight"),
    "BartModel": (
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "max_position_embeddings": 32},
        r"out_proj\.weight",
    ),
    "MambaForCausalLM": ({"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1}, None),
    "ViTForImageClassification": (PIXELS, r"o_proj\.weight"),
    "SwinForImageClassification": (SWIN, r"o_proj\.weight"),
    "ResNetForImageClassification": ({"embedding_size": 8, **STAGES}, None),
    "RegNetForImageClassification": ({"embedding_size": 8, "groups_width": 8, **STAGES}, None),
    "MobileNetV2ForImageClassification": ({"image_size": 32, "depth_multiplier": 0.25}, None),
    "ConvNextForImageClassification": ({"image_size": 32, **STAGES}, None),
    "PoolFormerForImageClassification": (STAGES, None),
    "SegformerForSemanticSegmentation": ({**STAGES, **HEADS, "decoder_hidden_size": 16}, None),
}  # fmt: skip


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name][0]))
    trained(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3)  # initial weights are too small to affect the outputs
    tokens = torch.randint(3, 99, (2, 7))
    if model.main_input_name == "pixel_values":
        return model.eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}
    if model.config.is_encoder_decoder:
        return model.eval(), {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    return model.eval(), {"input_ids": tokens}


def settle_norms(model: nn.Module, example: dict[str, torch.Tensor]) -> None:
    """Update the statistics of batch norms, so that the signal reaches the outputs."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        outputs(model, Inputs.of(example))
    model.eval()


pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(("seed", "name"), list(enumerate(MODELS)))
def test_outputs_do_not_change(seed, name):
    model, example = build(name, seed)
    # Deep networks lose their signal with fewer dead units.
    kill(model, seed, share=0.05 if "MobileNet" in name else 0.2)
    settle_norms(model, example)
    smaller = compact(model, example)
    other = Inputs.of(example).randomized(torch.Generator().manual_seed(99))
    expected = outputs(model, other)
    assert agree(expected, outputs(smaller, other)) or agree_in_float64(model, smaller, other)
    if name != "MambaForCausalLM":  # its units are all tied together
        assert smaller.compact_report.units > 0
    # a network with constant outputs could not fail this test
    assert difference(expected, outputs(model, Inputs.of(example))) > 1e-3


@pytest.mark.parametrize("name", [name for name, (_, heads) in MODELS.items() if heads])
def test_dead_heads_are_removed(name):
    model, example = build(name)
    pattern = MODELS[name][1]
    width = 16 if model.config.model_type in ("llama", "mixtral") else 8  # pairs share keys
    planted = []
    for key, param in model.named_parameters():
        if re.search(pattern, key) and "mlp" not in key:
            axis = 0 if name == "GPT2LMHeadModel" else 1  # its weights are transposed
            param.data.narrow(axis, width, width).zero_()
            planted.append((key, axis, param.shape[axis] - width))
    assert planted
    smaller = compact(model, example)
    for key, axis, size in planted:
        assert smaller.get_parameter(key).shape[axis] == size, key


@pytest.mark.parametrize(
    ("name", "layer", "columns"),
    [
        ("GPT2LMHeadModel", "transformer.h.0.mlp.c_proj", 0),
        ("LlamaForCausalLM", "model.layers.1.mlp.down_proj", 1),
        ("ViTForImageClassification", "vit.layers.0.mlp.fc2", 1),
        ("T5ForConditionalGeneration", "decoder.block.0.layer.2.DenseReluDense.wo", 1),
        ("ConvNextForImageClassification", "convnext.encoder.stages.1.layers.0.pwconv2", 1),
    ],
)
def test_dead_feed_forward_units_are_removed(name, layer, columns):
    model, example = build(name)
    weight = model.get_parameter(f"{layer}.weight")
    weight.data.narrow(columns, 2, 9).zero_()
    smaller = compact(model, example)
    assert smaller.get_parameter(f"{layer}.weight").shape[columns] == weight.shape[columns] - 9
    assert smaller.compact_report.removed == {"unread": 9}


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj"])
def test_unit_is_dead_if_gate_or_value_is_zero(layer):
    model, example = build("LlamaForCausalLM")
    model.get_parameter(f"model.layers.0.mlp.{layer}.weight").data[:5] = 0
    smaller = compact(model, example)
    mlp = smaller.model.layers[0].mlp
    assert [mlp.gate_proj.out_features, mlp.up_proj.out_features, mlp.down_proj.in_features] == [
        43, 43, 43,
    ]  # fmt: skip


def test_expert_units_are_removed_in_multiples_the_kernel_needs():
    model, example = build("MixtralForCausalLM")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.data[:, :, 3:9] = 0  # six units; the kernel needs multiples of 4
    smaller = compact(model, example)
    assert smaller.model.layers[0].mlp.experts.down_proj.shape[2] == 44
    (kept,) = (one for one in smaller.compact_report.kept if "gate_up_proj" in one.layer)
    assert kept.units == (7, 8, 55, 56)
    assert "multiple of 4" in kept.reason


def test_fixed_size_in_one_module_keeps_only_its_units():
    model, example = build("MixtralForCausalLM")
    attention, experts = model.model.layers[0].self_attn, model.model.layers[0].mlp.experts
    attention.o_proj.weight.data[:, 3] = 0  # one dimension of a head
    experts.down_proj.data[:, :, 4:8] = 0
    smaller = compact(model, example).model.layers[0]
    assert smaller.self_attn.v_proj.out_features == attention.v_proj.out_features
    assert smaller.mlp.experts.down_proj.shape[2] == 44


def test_generate_works_with_fewer_heads():
    model, example = build("GPT2LMHeadModel")
    model.transformer.h[0].attn.c_proj.weight.data[8:16] = 0
    smaller = compact(model, example)
    with torch.no_grad():
        expected = model.generate(**example, max_new_tokens=5, do_sample=False, pad_token_id=0)
        got = smaller.generate(**example, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(expected, got)
    assert next(tensors_of(model(**example))).shape == next(tensors_of(smaller(**example))).shape


def test_lab_gpt_loses_a_dead_head():
    torch.manual_seed(0)
    model, tokens = GPT(20, 8, 2, 4, 24), torch.randint(0, 20, (2, 8))
    model.layers[1].attention.project.weight.data[:, 6:12] = 0  # nothing reads the second head
    smaller = compact(model, tokens)
    attention = smaller.layers[1].attention
    assert attention.heads == 3
    assert attention.qkv.weight.shape == (3 * 18, 24)
    torch.testing.assert_close(smaller(tokens), model(tokens), rtol=1e-4, atol=1e-5)
