"""Operators of core ATen that hidet 0.6.1 lacks, supports only in part, or defines otherwise than PyTorch.

The functions take their arguments in the order of the ATen schema and return hidet tensors. They build graph nodes, so
call them under ``execution_mode("symbolic")``; hidet would otherwise compute expressions of constants at once. Every
operator class here has a complete compute definition, from which sharding rules are derived as for any other operator.

Use the functions of ``elementwise`` and ``reductions`` with the module's name, since many have names of Python's
built-in functions.
"""

from hidet_dist.operators.attention import scaled_dot_product_attention
from hidet_dist.operators.convolution import conv_transpose, convolution, integer_convolution
from hidet_dist.operators.dtypes import promoted_dtype, to_dtype
from hidet_dist.operators.experts import expert_product, grouped_product
from hidet_dist.operators.indexing import (
    bincount,
    embedding,
    embedding_bag,
    gather,
    histc,
    index,
    index_add,
    index_copy,
    index_put,
    index_select,
    masked_scatter,
    one_hot,
    scatter,
    scatter_add,
    scatter_reduce,
    select_scatter,
    slice_scatter,
)
from hidet_dist.operators.normalization import (
    batch_norm,
    batch_norm_of_batch,
    group_norm,
    instance_norm,
    layer_norm,
    native_layer_norm,
    rms_norm,
)
from hidet_dist.operators.pooling import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool
from hidet_dist.operators.products import addmm, einsum, integer_matmul, linear, matmul
from hidet_dist.operators.reductions import (
    cummax,
    cummin,
    cumprod,
    cumsum,
    log_softmax,
    logsumexp,
    softmax,
    std,
    var,
    var_mean,
)
from hidet_dist.operators.resampling import interpolate
from hidet_dist.operators.row_attention import attention_over_rows
from hidet_dist.operators.sampling import grid_sample
from hidet_dist.operators.shaping import (
    channel_shuffle,
    constant_pad_nd,
    diagonal,
    flip,
    im2col,
    pad,
    pixel_shuffle,
    pixel_unshuffle,
    repeat,
    repeat_interleave,
    roll,
    tril,
    triu,
    unfold,
)
from hidet_dist.operators.sorting import argsort, sort, topk

__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "addmm",
    "argsort",
    "attention_over_rows",
    "avg_pool",
    "batch_norm",
    "batch_norm_of_batch",
    "bincount",
    "channel_shuffle",
    "constant_pad_nd",
    "conv_transpose",
    "convolution",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "diagonal",
    "einsum",
    "embedding",
    "embedding_bag",
    "expert_product",
    "flip",
    "gather",
    "grid_sample",
    "group_norm",
    "grouped_product",
    "histc",
    "im2col",
    "index",
    "index_add",
    "index_copy",
    "index_put",
    "index_select",
    "instance_norm",
    "integer_convolution",
    "integer_matmul",
    "interpolate",
    "layer_norm",
    "linear",
    "log_softmax",
    "logsumexp",
    "masked_scatter",
    "matmul",
    "max_pool",
    "native_layer_norm",
    "one_hot",
    "pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "promoted_dtype",
    "repeat",
    "repeat_interleave",
    "rms_norm",
    "roll",
    "scaled_dot_product_attention",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "select_scatter",
    "slice_scatter",
    "softmax",
    "sort",
    "std",
    "to_dtype",
    "topk",
    "tril",
    "triu",
    "unfold",
    "var",
    "var_mean",
]
