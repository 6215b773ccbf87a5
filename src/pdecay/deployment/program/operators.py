"""The operators that the program of a file may call.

Some operators of ATen trust their arguments: with wrong sizes or indices they read and write
foreign memory. A program may therefore call only the operators that are listed here. All of them
raise an error for wrong arguments, except a few that models need, whose arguments are checked by
the functions of this module first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# Besides these, all operators that compute element by element are allowed (torch's tag
# "pointwise"), and the in-place form of each operator, whose name ends in an underscore.
_TEXT = """
adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
cartesian_prod cat channel_shuffle chunk column_stack combinations concat concatenate conj
constant_pad_nd contiguous copy detach diag diag_embed diagflat diagonal diagonal_scatter dsplit
dstack expand expand_as flatten flip fliplr flipud hsplit hstack imag lift_fresh lift_fresh_copy mH
mT matrix_H meshgrid moveaxis movedim narrow numpy_T pad pad_sequence permute pixel_shuffle
pixel_unshuffle ravel real reflection_pad1d reflection_pad2d reflection_pad3d repeat
repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as
resolve_conj resolve_neg roll rot90 row_stack select select_scatter slice slice_scatter split
split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile to transpose tril triu type_as
unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as
view_as_complex view_as_real vsplit vstack

_neg_view _conj _to_copy _unsafe_view

arange bartlett_window bernoulli blackman_window empty empty_like empty_permuted eye fill full
full_like hamming_window hann_window kaiser_window linspace logspace multinomial new_empty new_full
new_ones new_zeros normal ones ones_like rand rand_like randint randint_like randn randn_like
randperm scalar_tensor tril_indices triu_indices zero zeros zeros_like

all allclose amax amin aminmax any argmax argmin argsort bincount count_nonzero cov cummax cummin
cumprod cumsum diff dist equal frobenius_norm histc kthvalue logcumsumexp logsumexp max mean median
min mode msort nanmean nanmedian nanquantile nansum norm norm_except_dim nuclear_norm prod quantile
renorm sort std std_mean sum sum_to_size topk trace trapezoid unique_consecutive unique_dim var
var_mean

argwhere bucketize embedding gather index index_add index_copy index_fill index_put index_reduce
index_select isin masked_fill masked_scatter masked_select nonzero nonzero_numpy nonzero_static
one_hot put scatter scatter_add scatter_reduce searchsorted take take_along_dim where

_unsafe_index

addbmm addmm addmv addr baddbmm bilinear bmm cdist chain_matmul cosine_similarity cross det dot
einsum ger inner inverse kron linalg_cholesky linalg_cholesky_ex linalg_cross linalg_det
linalg_diagonal linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_matmul linalg_matrix_exp
linalg_matrix_norm linalg_matrix_power linalg_multi_dot linalg_norm linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_ex linalg_svd linalg_svdvals linalg_vecdot
linalg_vector_norm linear logdet matmul matrix_exp matrix_power mm mv outer pairwise_distance pdist
pinverse tensordot vdot

_cdist_forward _euclidean_dist _trilinear

fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn
fft_ifftshift fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn
istft stft

adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d affine_grid_generator alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm
col2im conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution dropout
embedding_bag feature_alpha_dropout feature_dropout glu grid_sampler grid_sampler_2d grid_sampler_3d
group_norm gru gru_cell hardswish im2col instance_norm layer_norm log_sigmoid log_softmax lstm
lstm_cell max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices native_dropout native_layer_norm prelu rms_norm rnn_relu
rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention softmax special_log_softmax
special_softmax upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d

_adaptive_avg_pool2d _adaptive_avg_pool3d _log_softmax _safe_softmax _softmax _upsample_bicubic2d_aa
_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d _weight_norm

absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh chalf complex divide fix floor_divide
greater greater_equal isclose isreal less less_equal multiply negative not_equal polar relu6
special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1
special_gammaln special_i0 special_log1p special_logit special_logsumexp special_ndtr special_psi
special_round special_sinc special_xlogy subtract true_divide

dim is_complex is_contiguous is_floating_point is_nonzero is_same_size item numel size stride
sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride sym_constrain_range
sym_constrain_range_for_size result_type

_assert_async _assert_scalar _assert_tensor_metadata _is_all_true _is_any_true _local_scalar_dense
_shape_as_tensor
"""
_NAMES = frozenset(_TEXT.split())
# Types in the schemas of operators.
_CONSTANTS = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}


def is_allowed(operator: OpOverload) -> bool:
    """Return whether programs may call an operator of ATen."""
    name: str = operator.overloadpacket.__name__
    overload = operator._overloadname
    # The overloads "data" of recurrent layers take packed sequences, which torch.export rejects.
    # Upsampling trusts scales that are given beside the output's size; "vec" takes one of both.
    is_unsafe = overload == "data" or ("upsample" in name and overload != "vec")
    # The in-place form sets strides before it raises an error for wrong ones.
    is_unsafe |= name == "as_strided_"
    # Operators outside the dispatcher are TorchScript's, which torch.export never records. Some
    # take a dtype as an integer and use it as an index without a check.
    is_unsafe |= not torch._C._dispatch_has_kernel(operator.name())
    if is_unsafe or any(one.is_out or _is_container(one) for one in operator._schema.arguments):
        return False
    if torch.Tag.pointwise in operator.tags and not name.startswith("_"):
        return True
    return name in _NAMES or (name.removesuffix("_") in _NAMES and not name.endswith("__"))


def _is_container(argument: Any) -> bool:
    """Return whether an argument is a list or dict of any type, which only TorchScript uses."""
    return str(argument.type) == "List[t]" or str(argument.type).startswith("Dict[")


def check_constants(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless constant arguments have the types of the operator's schema.

    Torch takes any integer as a dtype, layout or memory format, and None as a tensor, and does not
    check them.
    """
    schema = operator._schema.arguments
    given = dict(zip((one.name for one in schema), args, strict=False)) | dict(kwargs)
    for one in schema:
        kind = _CONSTANTS.get(str(one.real_type).removeprefix("Optional[").removesuffix("]"))
        value = given.get(one.name)
        is_wrong = kind is not None and value is not None and not isinstance(value, kind)
        # Operators do not expect the opaque and sparse layouts of other libraries.
        is_wrong |= isinstance(value, torch.layout) and value is not torch.strided
        # Absent arguments without a default value are an error of torch.
        is_missing = one.name in given and value is None and str(one.type) == "Tensor"
        has_missing = str(one.type) == "List[Tensor]" and isinstance(value, list) and None in value
        if is_wrong or is_missing or has_missing:
            raise ValueError(f"the program is damaged: {one.name} of {operator} is {value!r}")


def checked(operator: OpOverload) -> Callable[..., Any]:
    """Return an allowed operator, or the function that checks its arguments before it runs."""
    return _CHECKED.get(operator, operator)


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute attention. The kernel for CPUs reads as many rows of `value` as `key` has."""
    _check("attention", key.shape[-2:-1] == value.shape[-2:-1])
    _check("attention", query.shape[-1:] == key.shape[-1:])
    output: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, *args, **kwargs
    )
    return output


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Compute a normalized weight. The kernel reads one element of `g` per row or column.

    It divides by the number of rows, and the processor traps if there are none.
    """
    if dim in (0, v.dim() - 1):
        _check("weight norm", v.numel() > 0 and v.dim() > 0)
        _check("weight norm", g.numel() == v.shape[dim] and g.dtype == v.dtype)
    output: Tensor = torch.ops.aten._weight_norm.default(v, g, dim)
    return output


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Sum the embeddings of bags. The kernel checks the indices, but not all offsets."""
    _check_offsets(indices, offsets)
    # torch chooses the overload: with `padding_idx` or without.
    outputs: tuple[Tensor, ...] = torch.ops.aten.embedding_bag(
        weight, indices, offsets, *args, **kwargs
    )
    return outputs


def repeat_interleave(repeats: Tensor, **kwargs: Any) -> Any:
    """Repeat indices. The kernel does not notice that the sum of the repeats overflows."""
    _check_repeats(repeats)
    output: Tensor = torch.ops.aten.repeat_interleave.Tensor(repeats, **kwargs)
    return output


def repeat_elements(x: Tensor, repeats: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Repeat the elements of a tensor; see :func:`repeat_interleave`."""
    _check_repeats(repeats)
    output: Tensor = torch.ops.aten.repeat_interleave.self_Tensor(x, repeats, *args, **kwargs)
    return output


def fold(columns: Tensor, size: Sequence[int], *args: Sequence[int]) -> Any:
    """Add up the blocks of an image. The kernel computes their number in 32 bits."""
    _check("blocks", columns.shape[-1:] == (_count_blocks(size, *args),))
    output: Tensor = torch.ops.aten.col2im.default(columns, size, *args)
    return output


def unfold(image: Tensor, *args: Sequence[int]) -> Any:
    """Return the blocks of an image. The kernel does not notice that their number overflows."""
    blocks = _count_blocks(image.shape[-2:], *args)
    _check("blocks", image.numel() * blocks * math.prod(args[0]) < 2**59)
    output: Tensor = torch.ops.aten.im2col.default(image, *args)
    return output


def divide(operator: OpOverload) -> Callable[..., Any]:
    """Return a division that checks integers: the processor traps at INT_MIN / -1."""

    def run(x: Tensor, y: Tensor | complex, *, rounding_mode: str | None) -> Any:
        _check_quotient(x, y)
        return operator(x, y, rounding_mode=rounding_mode)

    return run


def lstm(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *args: Any) -> Any:
    """Run an LSTM. The kernel of oneDNN does not check the sizes of states and weights."""
    has_biases, layers, _, _, bidirectional, batch_first = args
    _check("LSTM", x.dim() == 3)
    batch = x.shape[0 if batch_first else 1] if x.dim() == 3 else 0
    _check_lstm(x.shape[-1], batch, hx, params, has_biases, layers, 1 + bidirectional)
    outputs: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.lstm.input(x, hx, params, *args)
    return outputs


_CHECKED: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    torch.ops.aten._weight_norm.default: weight_norm,
    torch.ops.aten.embedding_bag.default: embedding_bag,
    torch.ops.aten.embedding_bag.padding_idx: embedding_bag,
    torch.ops.aten.repeat_interleave.Tensor: repeat_interleave,
    torch.ops.aten.repeat_interleave.self_Tensor: repeat_elements,
    torch.ops.aten.lstm.input: lstm,
    torch.ops.aten.col2im.default: fold,
    torch.ops.aten.im2col.default: unfold,
    **{
        operator: divide(operator)
        for name in ("div", "div_", "divide", "divide_")
        for packet in [getattr(torch.ops.aten, name)]
        for operator in (packet.Tensor_mode, packet.Scalar_mode)
    },
}


def _check(what: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"the program is damaged: the sizes of its {what} do not fit together")


def _count_blocks(
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> int:
    """Return the number of blocks in an image of two axes; raise if there are none."""
    options = list(zip(size, kernel, dilation, padding, stride, strict=False))
    _check("blocks", len(options) == 2 and all(min(k, d, s) > 0 for _, k, d, _, s in options))
    _check("blocks", all(max(one) < 2**31 and one[3] >= 0 for one in options))
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in options]
    _check("blocks", min(counts) > 0)
    return math.prod(counts)


def _check_offsets(indices: Tensor, offsets: Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    if not offsets.numel():
        _check("embedding bags", not indices.numel())
        return
    ends = torch.cat([offsets, offsets.new_tensor([indices.numel()])])
    _check("embedding bags", bool(offsets.min() >= 0) and bool((ends.diff() >= 0).all()))


def _check_repeats(repeats: Tensor) -> None:
    if not torch.compiler.is_compiling():
        _check("repeats", float(repeats.double().sum()) < 2**62)


def _check_quotient(x: Tensor, y: Tensor | complex) -> None:
    dtype = torch.result_type(x, y)
    if torch.compiler.is_compiling() or dtype not in (torch.int32, torch.int64):
        return
    if bool((torch.as_tensor(y) == -1).any()) and bool((x == torch.iinfo(dtype).min).any()):
        raise ValueError(f"the program is damaged: a quotient is too large for {dtype}")


def _check_lstm(
    inputs: int,
    batch: int,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    directions: int,
) -> None:
    """Raise unless states and weights have the sizes of an LSTM.

    Args:
        inputs: the number of features of the input.
        batch: the number of rows.
        hx: the hidden and the cell states of all cells.
        params: the weights of all cells: input, hidden, two biases, projection.
        has_biases: whether there are biases.
        layers, directions: the number of layers, and of cells in a layer.
    """
    hidden, state = hx
    cells = layers * directions
    _check("LSTM", hidden.dim() == 3 and state.dim() == 3 and cells > 0)
    width, size = hidden.shape[2], state.shape[2]
    each = (4 if has_biases else 2) + (width != size)
    _check("LSTM", len(params) == cells * each)
    _check("LSTM", hidden.shape == (cells, batch, width) and state.shape == (cells, batch, size))
    _check("LSTM", all(one.dtype == hidden.dtype == state.dtype for one in params))
    for cell in range(cells):
        first, second, *rest = params[cell * each : (cell + 1) * each]
        _check("LSTM", second.shape == (4 * size, width))
        features = inputs if cell < directions else width * directions
        _check("LSTM", first.shape == (4 * size, features))
        biases = rest[:2] if has_biases else []
        _check("LSTM", all(bias.shape == (4 * size,) for bias in biases))
        _check("LSTM", width == size or rest[-1].shape == (width, size))
