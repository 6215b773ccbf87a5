"""compact on 104 architectures of the transformers package, with random dead units.

    python benchmarks/compact_zoo.py              # all, two minutes; writes the record and table
    python benchmarks/compact_zoo.py Gemma Swin   # only names that contain one of these

Each architecture is built small, with random weights (nothing is downloaded). Random rows, columns,
biases and norms are set to zero. Each runs once in float32 and once in float64, where differences
must be as small as rounding errors.

A run prints one line: parameters before and after, removed units and dead units that were kept, the
largest difference of the outputs relative to the largest element (also on another batch size than
the example's), and the operations without a rule. "constant outputs" marks a network with so many
dead units that its outputs hardly depend on its inputs; such a run proves little.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import documents
import pdecay
from pdecay.deployment.compact import CompactReport
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import agree_in_float64, difference, outputs
from provenance import provenance

TEXT, IMAGE, SOUND = (9,), (3, 32, 32), (800,)  # shapes without the batch
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
FLOAT32_ONLY = {"XGLMForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "JambaForCausalLM"}

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48}  # fmt: skip
WORDS = {**TINY, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED = {**WORDS, "num_key_value_heads": 2}
BERT = {**WORDS, "max_position_embeddings": 40}
OLD_GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
BOTH = {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 40}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
PATCHES = {**TINY, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
HEADS = {"num_attention_heads": [1, 2, 2, 4], "sr_ratios": [4, 2, 1, 1]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4}  # fmt: skip
AUDIO = {**TINY, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4],
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2}  # fmt: skip
FRAMES = {**TINY, "image_size": 16, "num_frames": 4}
SERIES = {"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4,
          "patch_stride": 4, "d_model": 16}  # fmt: skip
SHORT = {key: value for key, value in BOTH.items() if key != "max_position_embeddings"}

ZOO: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "GPT2LMHeadModel": (OLD_GPT, TEXT),
    "GPTJForCausalLM": ({**OLD_GPT, "rotary_dim": 4}, TEXT),
    "CodeGenForCausalLM": ({**OLD_GPT, "rotary_dim": 4}, TEXT),
    "GPTBigCodeForCausalLM": (OLD_GPT, TEXT),
    "OpenAIGPTLMHeadModel": (OLD_GPT, TEXT),
    "CTRLModel": ({**OLD_GPT, "dff": 48}, TEXT),
    "GPTNeoForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40}, TEXT),
    "GPTNeoXForCausalLM": (WORDS, TEXT),
    "BloomForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, TEXT),
    "FalconForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        TEXT),
    "MptForCausalLM": (
        {"vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
        TEXT),
    "OPTForCausalLM": (
        {**BERT, "ffn_dim": 48, "word_embed_proj_dim": 32}, TEXT),
    "XGLMForCausalLM": (
        {"vocab_size": 99, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48,
         "max_position_embeddings": 40}, TEXT),
    "LlamaForCausalLM": (SHARED, TEXT),
    "MistralForCausalLM": (SHARED, TEXT),
    "Qwen2ForCausalLM": (SHARED, TEXT),
    "Qwen3ForCausalLM": ({**SHARED, "head_dim": 8}, TEXT),
    "Gemma2ForCausalLM": ({**SHARED, "head_dim": 8}, TEXT),
    "Gemma3ForCausalLM": ({**SHARED, "head_dim": 8}, TEXT),
    "CohereForCausalLM": (SHARED, TEXT),
    "GraniteForCausalLM": (SHARED, TEXT),
    "NemotronForCausalLM": (SHARED, TEXT),
    "Olmo2ForCausalLM": ({**WORDS, "num_key_value_heads": 4}, TEXT),
    "PhiForCausalLM": (WORDS, TEXT),
    "Phi3ForCausalLM": (WORDS, TEXT),
    "StableLmForCausalLM": (SHARED, TEXT),
    "Starcoder2ForCausalLM": (SHARED, TEXT),
    "MixtralForCausalLM": ({**SHARED, "num_local_experts": 4}, TEXT),
    "Qwen2MoeForCausalLM": (
        {**SHARED, "num_experts": 4, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24}, TEXT),
    "JambaForCausalLM": (
        {**SHARED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "use_mamba_kernels": False, "mamba_d_state": 4}, TEXT),
    "MambaForCausalLM": ({"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1}, TEXT),
    "RwkvForCausalLM": ({"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}, TEXT),
    "BertModel": (BERT, TEXT),
    "DistilBertModel": (
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, TEXT),
    "AlbertModel": ({**BERT, "embedding_size": 16}, TEXT),
    "ElectraModel": ({**BERT, "embedding_size": 16}, TEXT),
    "RobertaModel": (BERT, TEXT),
    "MPNetModel": (BERT, TEXT),
    "DebertaV2Model": (BERT, TEXT),
    "ConvBertModel": ({**BERT, "embedding_size": 16}, TEXT),
    "RoFormerModel": ({**BERT, "embedding_size": 16}, TEXT),
    "RemBertModel": (
        {**BERT, "input_embedding_size": 16, "output_embedding_size": 16}, TEXT),
    "MegatronBertModel": (BERT, TEXT),
    "MobileBertModel": ({**BERT, "embedding_size": 16, "intra_bottleneck_size": 16}, TEXT),
    "ErnieModel": (BERT, TEXT),
    "NystromformerModel": (
        {**BERT, "segment_means_seq_len": 9, "num_landmarks": 9}, TEXT),
    "BigBirdModel": ({**BERT, "attention_type": "original_full"}, TEXT),
    "LayoutLMModel": (BERT, TEXT),
    "SplinterModel": (BERT, TEXT),
    "EsmModel": ({**BERT, "mask_token_id": 1, "position_embedding_type": "rotary"}, TEXT),
    "ModernBertModel": (WORDS, TEXT),
    "SqueezeBertModel": ({**BERT, "embedding_size": 32}, TEXT),
    "FNetModel": ({**BERT}, TEXT),
    "XLNetModel": (
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, TEXT),
    "FunnelModel": (
        {"vocab_size": 99, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48,
         "block_sizes": [1, 1], "num_decoder_layers": 1}, TEXT),
    "T5Model": (T5, TEXT),
    "UMT5Model": (T5, TEXT),
    "LongT5EncoderModel": ({**T5, "local_radius": 4}, TEXT),
    "BartModel": (BOTH, TEXT),
    "MBartModel": (BOTH, TEXT),
    "PegasusModel": (BOTH, TEXT),
    "M2M100Model": (BOTH, TEXT),
    "BlenderbotModel": (BOTH, TEXT),
    "LEDModel": (
        {**SHORT, "attention_window": 4, "max_encoder_position_embeddings": 40,
         "max_decoder_position_embeddings": 40}, TEXT),
    "ResNetForImageClassification": ({"embedding_size": 8, **STAGES}, IMAGE),
    "RegNetForImageClassification": (
        {"embedding_size": 8, "groups_width": 8, **STAGES}, IMAGE),
    "MobileNetV1ForImageClassification": (
        {"image_size": 32, "depth_multiplier": 0.25}, IMAGE),
    "MobileNetV2ForImageClassification": (
        {"image_size": 32, "depth_multiplier": 0.25}, IMAGE),
    "EfficientNetForImageClassification": (
        {"width_coefficient": 0.5, "depth_coefficient": 0.2, "image_size": 32,
         "hidden_dim": 640}, IMAGE),
    "ConvNextForImageClassification": ({"image_size": 32, **STAGES}, IMAGE),
    "ConvNextV2ForImageClassification": ({"image_size": 32, **STAGES}, IMAGE),
    "PoolFormerForImageClassification": (STAGES, IMAGE),
    "BitForImageClassification": ({"embedding_size": 8, "num_groups": 4, **STAGES}, IMAGE),
    "FocalNetModel": (
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
         "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}, IMAGE),
    "SwiftFormerForImageClassification": (
        {"embed_dims": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "mlp_ratio": 2}, (3, 64, 64)),
    "ViTModel": (PATCHES, IMAGE),
    "DeiTModel": (PATCHES, IMAGE),
    "BeitModel": (PATCHES, IMAGE),
    "Data2VecVisionModel": (PATCHES, IMAGE),
    "Dinov2Model": (PATCHES, IMAGE),
    "IJepaModel": (PATCHES, IMAGE),
    "ViTMSNModel": (PATCHES, IMAGE),
    "VitDetModel": (PATCHES, IMAGE),
    "SiglipVisionModel": (PATCHES, IMAGE),
    "YolosModel": ({**PATCHES, "image_size": [32, 32], "num_detection_tokens": 4}, IMAGE),
    "SwinModel": (SWIN, IMAGE),
    "Swinv2Model": (SWIN, IMAGE),
    "HieraModel": (
        {"embed_dim": 16, "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4],
         "patch_padding": [3, 3], "mlp_ratio": 2.0, "depths": [1, 1], "num_heads": [1, 2],
         "query_stride": [2, 2], "masked_unit_size": [4, 4], "num_query_pool": 1}, IMAGE),
    "SegformerForSemanticSegmentation": (
        {**STAGES, **HEADS, "decoder_hidden_size": 16}, IMAGE),
    "GLPNForDepthEstimation": ({**STAGES, **HEADS, "decoder_hidden_size": 16}, IMAGE),
    "PvtForImageClassification": (
        {**STAGES, "image_size": 32, "num_attention_heads": [1, 2, 2, 4],
         "sequence_reduction_ratios": [4, 2, 1, 1]}, IMAGE),
    "VideoMAEModel": ({**FRAMES, "patch_size": 8}, (4, 3, 16, 16)),
    "VivitModel": ({**FRAMES, "tubelet_size": [2, 8, 8]}, (4, 3, 16, 16)),
    "TimesformerModel": ({**FRAMES, "patch_size": 8}, (4, 3, 16, 16)),
    "Wav2Vec2Model": (AUDIO, SOUND),
    "HubertModel": (AUDIO, SOUND),
    "WavLMModel": (AUDIO, SOUND),
    "UniSpeechModel": (AUDIO, SOUND),
    "SEWModel": ({**AUDIO, "squeeze_factor": 2}, SOUND),
    "Data2VecAudioModel": (AUDIO, SOUND),
    "ASTModel": (
        {**TINY, "num_mel_bins": 16, "max_length": 24, "patch_size": 8, "frequency_stride": 8,
         "time_stride": 8}, (24, 16)),
    "PatchTSTForPrediction": (
        {**SERIES, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 24}, (16, 2)),
    "PatchTSMixerForPrediction": ({**SERIES, "num_layers": 2}, (16, 2)),
    "EncodecModel": (
        {"num_filters": 4, "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8,
         "num_residual_layers": 1, "upsampling_ratios": [4, 2], "num_lstm_layers": 1},
        (1, 64)),
}  # fmt: skip

# The first architecture of each kind, in the order of ZOO.
KINDS = {
    "GPT2LMHeadModel": "decoders, from GPT-2 and Llama to Mixtral and Mamba",
    "BertModel": "encoders, from BERT to ModernBERT and FNet",
    "T5Model": "both, from T5 to LED",
    "ResNetForImageClassification": "images, from ResNet and EfficientNet to Swin and Hiera",
    "Wav2Vec2Model": "sound and series, from Wav2Vec2 to PatchTST",
}
RECORD = documents.RECORDS / "compact_zoo.json"


@torch.no_grad()
def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**ZOO[name][0])).eval()
    for param in model.parameters():
        if param.ndim > 1:
            param.mul_(3)  # initial weights are too small to affect the outputs
    return model


def inputs_of(model: nn.Module, name: str, batch: int) -> Inputs:
    shape = ZOO[name][1]
    if shape is not TEXT:
        return Inputs.of(torch.randn(batch, *shape, dtype=next(model.parameters()).dtype))
    given = {"input_ids": torch.randint(3, 40, (batch, *shape))}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        given["decoder_input_ids"] = torch.randint(3, 40, (batch, *shape))
    return Inputs.of(given)


@torch.no_grad()
def kill(model: nn.Module, seed: int, share: float = 0.25, rate: float = 0.5) -> None:
    """Set random rows and columns of weights, and elements of biases and norms, to zero."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> Tensor:
        hit = torch.rand((), generator=generator) < rate
        return hit & (torch.rand(count, generator=generator) < share)

    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            if param.ndim > 1:
                rows = some(param.shape[0])
                param[rows] = 0
                if param.shape[1] > 1:  # a depthwise weight has one column only
                    param[:, some(param.shape[1])] = 0
                bias = own.get(name.replace("weight", "bias"))
                if bias is not None and bias.shape == rows.shape:
                    bias[rows] = 0
            elif param.ndim == 1:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
                param[some(len(param))] = 0


def settle_norms(model: nn.Module, inputs: Inputs) -> None:
    """Update the statistics of batch norms, so that the signal reaches the outputs."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    outputs(model, inputs)
    model.eval()


def run(model: nn.Module, name: str, seed: int) -> dict[str, Any]:
    """Make units dead, compact the model and return the result; raise if the outputs differ."""
    torch.manual_seed(seed)
    example, fresh = inputs_of(model, name, 2), inputs_of(model, name, 3)
    kill(model, seed)
    settle_norms(model, inputs_of(model, name, 32))
    smaller = pdecay.compact(model, example.kwargs or example.args)
    report = CompactReport.of(smaller)
    expected = outputs(model, fresh)
    error = max(report.difference, difference(expected, outputs(smaller, fresh)))
    dtype = next(model.parameters()).dtype
    rounding = dtype is torch.float32 and agree_in_float64(model, smaller, fresh)
    if error > TOLERANCE[dtype] and not rounding:
        raise ValueError(f"outputs differ by {error:.1e} of the largest element")
    return {
        "parameters": [*report.parameters],
        "removed": report.units,
        "kept": sum(len(one.units) for one in report.kept),
        "difference": error,
        "unknown": sorted({one.rpartition("(")[2].rstrip(")") for one in report.unknown}),
        "constant": difference(expected, outputs(model, inputs_of(model, name, 3))) < 1e-3,
    }


def line_of(found: dict[str, Any]) -> str:
    """Return the result of a run in one line."""
    before, after = found["parameters"]
    return (
        f"{before:8,} -> {after:8,}  {found['removed']:5,} removed, {found['kept']:5,} kept  "
        f"{found['difference']:.0e}  {'constant outputs  ' if found['constant'] else ''}"
        f"{', '.join(found['unknown'])}"
    )


def table(runs: list[dict[str, Any]]) -> str:
    """Return the table of docs/compact.md."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for found in runs:
        if found["name"] in KINDS:
            own = kinds.setdefault(KINDS[found["name"]], [])
        own.append(found)
    rows = []
    for kind, own in kinds.items():
        removed = [100 * (1 - after / before) for before, after in (r["parameters"] for r in own)]
        largest = [
            max(r["difference"] for r in own if r["dtype"] == dtype)
            for dtype in ("float32", "float64")
        ]
        rows.append([
            kind,
            str(len({r["name"] for r in own})),
            f"{statistics.median(removed):.0f} %, {max(removed):.0f} %",
            *(f"{x:.0e}".replace("e-0", "e-") for x in largest),
            f"{sum(not r['removed'] for r in own)} of {len(own)}",
        ])  # fmt: skip
    header = ["kind", "architectures", "parameters removed, median and maximum"]
    header += ["largest difference, float32", "float64", "runs without removal"]
    return documents.markdown(header, rows)


def main(chosen: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = [name for name in ZOO if not chosen or any(one in name for one in chosen)]
    runs, failed = [], 0
    for name in names:
        for seed, wanted in enumerate(TOLERANCE):
            dtype = torch.float32 if name in FLOAT32_ONLY else wanted
            about = {"name": name, "seed": seed, "dtype": str(dtype)[6:]}
            try:
                runs.append({**about, **run(build(name).to(dtype), name, seed)})
                line = line_of(runs[-1])
            except Exception as error:
                failed += 1
                line = f"failed: {error}"
            print(f"{name:36} {about['dtype']}  {line}", flush=True)
    print(f"{len(names)} architectures, {len(runs) + failed} runs, {failed} failed")
    if not chosen and not failed:
        record = {**provenance("transformers"), "runs": runs}
        RECORD.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
        documents.write({"compact_zoo": table(runs)}, {})
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
