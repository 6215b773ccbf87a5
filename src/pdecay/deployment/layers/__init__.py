"""Layers that store and multiply only the non-zeros of their weight.

    modules    SparseLinear and SparseConv2d
    base       their base class: storage, caching, dense fallback
    conv_plan  work plan of a convolution
    row_plan   work plan of a linear layer on few rows
    shapes     geometry and compressed sparse rows
    kernel     calls of the C kernel

A plan prepares the work of the C kernel for one input size, see ``_native/sparse_conv.c``.
"""
