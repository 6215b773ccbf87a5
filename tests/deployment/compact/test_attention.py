"""The attention layer with removable heads, compared with torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import compact
from pdecay.deployment.compact.attention import MultiheadAttention

from .checks import Model, compacted

BATCH, LENGTH, OTHER, WIDTH, HEADS = 4, 5, 7, 12, 3


def pair(**options) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    torchs = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    if torchs.in_proj_bias is not None:
        nn.init.normal_(torchs.in_proj_bias)
    return torchs, MultiheadAttention(torchs)


def inputs(batch_first: bool, itself: bool):
    query = torch.randn(BATCH, LENGTH, WIDTH)
    key = query if itself else torch.randn(BATCH, OTHER, WIDTH)
    if not batch_first:
        query = query.transpose(0, 1)
        key = query if itself else key.transpose(0, 1)
    return query, key, key


@pytest.mark.parametrize(
    ("batch_first", "bias", "itself"), list(itertools.product([True, False], repeat=3))
)
def test_same_results_as_torch(batch_first, bias, itself):
    torchs, ours = pair(batch_first=batch_first, bias=bias)
    given = inputs(batch_first, itself)
    keys = LENGTH if itself else OTHER
    paddings = (None, torch.rand(BATCH, keys) < 0.3, torch.randn(BATCH, keys))
    masks = (
        None,
        torch.rand(LENGTH, keys) < 0.2,
        torch.randn(LENGTH, keys),
        torch.randn(BATCH * HEADS, LENGTH, keys),
    )
    for padding, mask, weights, mean in itertools.product(paddings, masks, [0, 1], [0, 1]):
        if padding is not None and mask is not None and padding.dtype != mask.dtype:
            continue  # deprecated in torch
        options = {
            "key_padding_mask": padding,
            "attn_mask": mask,
            "need_weights": bool(weights),
            "average_attn_weights": bool(mean),
        }
        for expected, got in zip(torchs(*given, **options), ours(*given, **options), strict=True):
            if expected is None:
                assert got is None
            else:
                torch.testing.assert_close(got, expected, equal_nan=True)


def test_unbatched_input():
    torchs, ours = pair()
    x = torch.randn(LENGTH, WIDTH)
    for expected, got in zip(torchs(x, x, x), ours(x, x, x), strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout_only_in_training_mode():
    _, ours = pair(dropout=0.5)
    x = torch.randn(LENGTH, BATCH, WIDTH)
    for weights in (True, False):
        assert torch.equal(*(ours(x, x, x, need_weights=weights)[0] for _ in range(2)))
        ours.train()
        assert not torch.equal(*(ours(x, x, x, need_weights=weights)[0] for _ in range(2)))
        ours.eval()


def test_is_causal_without_attn_mask_raises():
    _, ours = pair()
    x = torch.randn(LENGTH, BATCH, WIDTH)
    with pytest.raises(ValueError, match="give attn_mask as well"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("training", [True, False])
def test_works_inside_torch_transformer_layers(kind, training):
    torch.manual_seed(0)
    layer = kind(WIDTH, HEADS, 8, batch_first=True, dropout=0.0)
    layer.self_attn.out_proj.weight.data[:, :4] = 0
    x = torch.randn(BATCH, LENGTH, WIDTH)
    given = (x,) if kind is nn.TransformerEncoderLayer else (x, torch.randn(BATCH, 3, WIDTH))
    layer.train(training)
    smaller = compact(layer, given)
    assert isinstance(smaller.self_attn, MultiheadAttention)
    assert smaller.self_attn.num_heads == 2
    assert smaller.self_attn.training == training
    torch.testing.assert_close(smaller(*given), layer(*given))
    assert set(smaller.state_dict()) == set(layer.state_dict())


@pytest.mark.parametrize(
    "options", [{"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 6}]
)
def test_unsupported_options_are_not_replaced(options):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)

        def forward(self, x, y):
            return self.attention(x, y, y, need_weights=False)[0]

    torch.manual_seed(0)
    model = Attending()
    model.attention.out_proj.weight.data[:, :4] = 0
    width = options.get("kdim", WIDTH)
    smaller = compact(model, (torch.randn(5, 2, WIDTH), torch.randn(7, 2, width)))
    assert type(smaller.attention) is nn.MultiheadAttention


def test_returned_weights_keep_all_heads():
    """The returned weights are a mean over all heads, including dead ones."""

    class Showing(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x):
            return self.attention(x, x, x)

    model = Showing()
    model.attention.out_proj.weight.data[:, :4] = 0
    smaller = compact(model, torch.randn(5, 2, WIDTH))
    assert smaller.attention.num_heads == HEADS


def test_calls_that_need_the_removed_heads_raise():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x, need_weights=False, mask=None):
            return self.attention(x, x, x, need_weights=need_weights, attn_mask=mask)

    model = Attention().eval()
    model.attention.out_proj.weight.data[:, 4:12] = 0
    x = torch.randn(1, 5, 16)
    smaller = compact(model, x)
    assert smaller.attention.num_heads == 2
    with pytest.raises(ValueError, match="2 of 4 heads were removed"):
        smaller(x, need_weights=True)
    with pytest.raises(ValueError, match=r"4 matrices.*1 rows of 2 heads"):
        smaller(x, mask=torch.zeros(4, 5, 5))


def test_layer_with_two_names_stays_one_layer():
    def forward(self, x):
        for layer in (self.first, self.second):
            x = x + layer(x, x, x, need_weights=False)[0]
        return x

    torchs, _ = pair(batch_first=True)
    torchs.out_proj.weight.data[:, :4] = 0
    smaller = compacted(Model(forward, first=torchs, second=torchs), torch.randn(2, LENGTH, WIDTH))
    assert smaller.first is smaller.second
    assert smaller.first.num_heads == HEADS - 1


@pytest.mark.parametrize("hook", ["forward", "forward_pre"])
def test_layer_with_hooks_is_kept(hook):
    calls = []
    torchs, _ = pair(batch_first=True)
    torchs.out_proj.weight.data[:, :4] = 0
    getattr(torchs, f"register_{hook}_hook")(lambda *args: calls.append(args))
    model = Model(lambda self, x: self.attention(x, x, x)[0], attention=torchs)
    x = torch.randn(2, LENGTH, WIDTH)
    smaller = compacted(model, x)
    calls.clear()
    smaller(x)
    assert calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("in_example", [True, False])
def test_encoder_that_nests_padded_sequences(in_example):
    torch.manual_seed(0)
    heads = 4  # torch nests only for an even number
    layer = nn.TransformerEncoderLayer(WIDTH, heads, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    for one in model.layers:
        one.self_attn.out_proj.weight.data[:, :3] = 0
    x, padding = torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 3:] = padding[2, 1:] = True
    masked = {"src_key_padding_mask": padding}
    smaller = compact(model, ((x,), masked if in_example else {}))
    assert smaller.layers[0].self_attn.num_heads == heads - 1
    with torch.inference_mode():
        expected = model(x, **masked)
        assert (expected[padding] == 0).all()  # torch's fast path, which nests the sequences
        torch.testing.assert_close(smaller(x, **masked), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_attribute", [True, False])
def test_rounding_errors_do_not_hide_other_heads(dtype, in_attribute):
    """Without a dead head, code may split the rest into as many heads of fewer dimensions."""
    torch.manual_seed(0)
    heads, width = 4, 64

    def forward(self, x):
        heads = self.heads if in_attribute else 4
        parts = (one.unflatten(-1, (heads, -1)) for one in self.qkv(x).chunk(3, -1))
        q, k, v = (one.transpose(1, 2) for one in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    model = Model(forward, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))
    model.heads = heads
    dead = torch.arange(width // heads)
    for part in range(3):
        model.qkv.weight.data[dead + part * width] = 0
        model.qkv.bias.data[dead + part * width] = 0
    model.out.weight.data[:, dead] = 0
    model.eval().to(dtype)
    smaller = compact(model, torch.randn(2, 9, width, dtype=dtype))
    assert smaller.heads == (3 if in_attribute else 4)
    assert smaller.out.in_features == (48 if in_attribute else 64)
    x = torch.randn(2, 5, width, dtype=torch.float64)
    torch.testing.assert_close(smaller.double()(x), model.double()(x))
