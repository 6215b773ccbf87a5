"""Folders of Hugging Face models with sparse weights."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

import pdecay

transformers = pytest.importorskip("transformers", reason="pip install pdecay[transformers]")

from pdecay.integrations.transformers import (  # noqa: E402
    from_pretrained,
    generation_example,
    save_pretrained,
)

from .gpt2 import make_model, model_with_dead_units, prompt, sparse_model  # noqa: E402


@torch.no_grad()
def logits(model):
    return model(prompt()).logits


@pytest.mark.parametrize("dense", [False, True])
def test_saved_folder_loads(tmp_path, same, dense):
    model = sparse_model()
    model.generation_config.max_new_tokens = 7
    report = pdecay.save(model, tmp_path / "model", dense=dense)
    assert (report.nbytes < 0.4 * report.dense_nbytes) is not dense
    back = from_pretrained(tmp_path / "model")
    assert type(back) is type(model)
    assert same(dict(back.state_dict()), dict(model.state_dict()))
    assert back.lm_head.weight is back.transformer.wte.weight
    assert back.generation_config.max_new_tokens == 7
    assert not back.training
    # also into a model that exists, and as a state dict
    other = pdecay.load(tmp_path / "model", make_model())
    assert torch.equal(logits(other), logits(model))
    assert same(dict(pdecay.load(tmp_path / "model")), dict(model.state_dict()))


def test_example_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.safetensors to save the program"):
        pdecay.save(make_model(), tmp_path / "model", example_inputs=prompt())
    assert not (tmp_path / "model").exists()


def test_second_save_replaces_weights_of_the_other_kind(tmp_path):
    first, second = make_model(), sparse_model()
    save_pretrained(first, tmp_path)
    save_pretrained(second, tmp_path, dense=True)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(second))
    save_pretrained(first, tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(first))
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_save_warns_of_weights_that_transformers_would_load_instead(tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    model = sparse_model()
    with pytest.warns(
        UserWarning, match=r"also has model.safetensors.index.json: transformers would"
    ):
        save_pretrained(model, tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))
    save_pretrained(model, tmp_path, dense=True)  # found first
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_dense_folder_loads_in_transformers(tmp_path):
    model = sparse_model()
    save_pretrained(model, tmp_path, dense=True)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(back), logits(model))


def test_folder_of_transformers_loads(tmp_path):
    model = sparse_model()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("dense", [False, True])
def test_compacted_sizes_round_trip(tmp_path, same, dense):
    smaller = pdecay.compact(model_with_dead_units(), prompt())
    save_pretrained(smaller, tmp_path, dense=dense)
    back = from_pretrained(tmp_path)
    assert back.transformer.h[0].attn.c_attn.weight.shape == (32, 72)
    assert back.transformer.h[0].attn.c_attn.nf == 72
    assert same(dict(back.state_dict()), dict(smaller.state_dict()))
    assert torch.equal(logits(back), logits(smaller))
    tokens = back.generate(prompt(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = smaller.generate(prompt(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected)
    # A second round trip, and one of the model's own save_pretrained, keep the sizes, too.
    save_pretrained(back, tmp_path / "again")
    back.save_pretrained(tmp_path / "own")
    for name in ("again", "own"):
        assert torch.equal(logits(from_pretrained(tmp_path / name)), logits(smaller))
    if dense:
        with pytest.raises(RuntimeError, match="mismatch"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_new_bias_of_compacted_layer_round_trips(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, attention_bias=False,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config).eval()
    mlp = model.gpt_neox.layers[0].mlp
    mlp.dense_h_to_4h.weight.data[:3] = 0
    mlp.dense_h_to_4h.bias.data.fill_(1.0)
    mlp.dense_4h_to_h.bias = None
    smaller = pdecay.compact(model, prompt())
    assert smaller.gpt_neox.layers[0].mlp.dense_4h_to_h.bias is not None
    assert smaller.compact_report.removed == {"constant": 3}
    save_pretrained(smaller, tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(smaller))


def test_deployed_model_is_saved_as_plain_weights(tmp_path):
    model = model_with_dead_units()
    deployed = pdecay.deploy(model, generation_example(prompt(), 2), choose="sparse", seconds=0)
    assert deployed.report.chosen == "sparse"
    save_pretrained(deployed, tmp_path)
    back = from_pretrained(tmp_path)
    assert back.lm_head.weight is back.transformer.wte.weight
    smaller = pdecay.compact(model, prompt())
    assert torch.equal(logits(back), logits(smaller))
    again = pdecay.deploy(back, prompt(), choose="sparse", seconds=0)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)


def test_folded_batch_norms_are_refused(tmp_path):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(torch.rand_like(parameter) > 0.8)
    deployed = pdecay.deploy(model, torch.randn(1, 3, 32, 32), choose="sparse", seconds=0)
    assert deployed.report.folded
    with pytest.raises(ValueError, match=r"Identity instead of BatchNorm2d.*Save the trained"):
        pdecay.save(deployed, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_explicit_and_automatic_classes(tmp_path):
    model = sparse_model()
    save_pretrained(model, tmp_path)
    for kind in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        assert torch.equal(logits(from_pretrained(tmp_path, kind)), logits(model))
    with pytest.raises(ValueError, match="does not fit this GPT2Model"):
        from_pretrained(tmp_path, transformers.GPT2Model)
    edit_config(tmp_path, architectures=["Missing"])
    with pytest.raises(ValueError, match=r"\['Missing'\], none of which .* give model_class"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "attributes",
    [
        {"transformer.h.0.attn": {"split_size": "os"}},
        {"transformer.h.0.attn": {"forward": 3}},
        {"transformer.h.0.attn": {"training": 1}},
    ],
)
def test_other_attributes_than_sizes_are_refused(tmp_path, attributes):
    save_pretrained(make_model(), tmp_path)
    edit_config(tmp_path, pdecay={"attributes": attributes})
    with pytest.raises(ValueError, match=r"config.json sets transformer.h.0.attn"):
        from_pretrained(tmp_path)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_dtype_round_trips(tmp_path):
    model = sparse_model().bfloat16()
    save_pretrained(model, tmp_path)
    back = from_pretrained(tmp_path)
    assert back.dtype == torch.bfloat16
    assert torch.equal(logits(back), logits(model))


def test_layers_in_float32_of_a_half_precision_model_round_trip(tmp_path, same):
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "first")
    model = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "first", dtype=torch.float16
    )
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float16, torch.float32}
    save_pretrained(model, tmp_path / "second")
    back = from_pretrained(tmp_path / "second")
    assert same(dict(back.state_dict()), dict(model.state_dict()))
    assert back.encoder.embed_tokens.weight is back.shared.weight


def test_module_with_several_names_round_trips(tmp_path, same):
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.resize_token_embeddings(108, mean_resizing=False)  # the encoder shares the module now
    assert model.encoder.embed_tokens is model.shared
    save_pretrained(model, tmp_path)
    back = from_pretrained(tmp_path)
    assert same(dict(back.state_dict()), dict(model.state_dict()))
    assert back.encoder.embed_tokens.weight is back.shared.weight


def test_parametrized_layers_round_trip(tmp_path, same):
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=20,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    model = transformers.Wav2Vec2ForCTC(config).eval()  # with a weight norm
    save_pretrained(model, tmp_path)
    back = from_pretrained(tmp_path)
    assert same(dict(back.state_dict()), dict(model.state_dict()))
    signal = torch.randn(1, 800)
    with torch.no_grad():
        assert torch.equal(back(signal).logits, model(signal).logits)


def test_changes_that_the_configuration_does_not_have_are_refused(tmp_path):
    untied = make_model()
    untied.lm_head.weight = torch.nn.Parameter(2 * untied.lm_head.weight.detach())
    with pytest.raises(ValueError, match=r"lm_head.weight differs from transformer.wte.weight"):
        save_pretrained(untied, tmp_path / "untied")
    untied.config.tie_word_embeddings = False
    save_pretrained(untied, tmp_path / "untied")
    assert torch.equal(logits(from_pretrained(tmp_path / "untied")), logits(untied))
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    more = transformers.BertForSequenceClassification(config)
    more.classifier = torch.nn.Linear(32, 7)
    with pytest.raises(ValueError, match=r"has the shape \[7, 32\].*update model.config"):
        save_pretrained(more, tmp_path / "more")
    more.config.num_labels = 7
    save_pretrained(more, tmp_path / "more")
    assert torch.equal(from_pretrained(tmp_path / "more").classifier.weight, more.classifier.weight)


def test_method_of_transformers_is_refused_for_sparse_layers(tmp_path):
    deployed = pdecay.deploy(sparse_model(), prompt(), choose="sparse", seconds=0)
    assert deployed.report.chosen == "sparse"
    for one in (deployed, copy.deepcopy(deployed), pickle.loads(pickle.dumps(deployed))):
        with pytest.raises(TypeError, match=r"call pdecay\.save\(model, folder\)"):
            one.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    pdecay.save(deployed, tmp_path)
    from_pretrained(tmp_path).save_pretrained(tmp_path / "plain")


@pytest.mark.parametrize("dense", [False, True])
def test_file_of_a_deployed_model_has_plain_weights(tmp_path, dense):
    model = sparse_model()
    example = {"input_ids": prompt()}
    deployed = pdecay.deploy(model, example, choose="sparse", seconds=0)
    assert deployed.report.chosen == "sparse"
    pdecay.save(deployed, tmp_path / "gpt2.safetensors", dense=dense)
    other = pdecay.load(tmp_path / "gpt2.safetensors", make_model())
    assert torch.equal(logits(other), logits(model))


def test_errors_name_the_cure(tmp_path):
    with pytest.raises(TypeError, match=r"needs a transformers.PreTrainedModel, got Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model.pdecay.safetensors nor"):
        from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="would initialise the model at random"):
        pdecay.save(make_model(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()


def test_failed_save_keeps_the_old_configuration(tmp_path, monkeypatch):
    model = make_model()
    pdecay.save(model, tmp_path)
    before = (tmp_path / "config.json").read_bytes()

    def full_disk(config, folder):
        Path(folder, "config.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(model.config), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        pdecay.save(model, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_folder_with_weights_of_transformers_and_pdecay_is_refused(tmp_path):
    model = sparse_model()
    pdecay.save(model, tmp_path)
    model.transformer.ln_f.bias.data += 1  # trained on, and saved by Trainer
    model.save_pretrained(tmp_path)
    for read in (pdecay.load, from_pretrained):
        with pytest.raises(ValueError, match="has both model"):
            read(tmp_path)
    pdecay.save(model, tmp_path)  # removes the other file
    bias = pdecay.load(tmp_path)["transformer.ln_f.bias"]
    assert torch.equal(bias, model.transformer.ln_f.bias)
