"""Operations of torch for which the host waits on a GPU, told from their name and arguments.

A GPU's kernel asks for a number of its own here (how many elements a mask has, how large the largest is, whether a
matrix was singular), so the host stops until the GPU has come so far; a graph cannot hold that. Facts: torch's CUDA
sources, where ``item``, ``nonzero`` or a copy to the host stand in a kernel, and its documentation of deterministic
algorithms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Whatever their arguments are.
ALWAYS = frozenset(
    {
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "isin"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        *("bincount", "histc", "multinomial", "mode", "_ctc_loss", "ctc_loss", "embedding_renorm_", "to_sparse"),
        # What looks at LAPACK's code of success: inv, solve, cholesky, eigh, lu_factor, ldl_factor, lstsq.
        *("_linalg_check_errors", "_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals"),
        *("linalg_eigvals", "linalg_lstsq", "linalg_matrix_exp"),
    }
)
#: With a mask among their indices.
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
#: What has no algorithm on a GPU that repeats itself: ``train.deterministic`` can only say so.
UNREPEATABLE = frozenset(
    {
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
        *("adaptive_max_pool3d_backward", "avg_pool3d_backward", "fractional_max_pool2d_backward"),
        *("fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "put_", "histc"),
        *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
        *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
        *("upsample_trilinear3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
        *("_ctc_loss_backward", "scatter_reduce", "scatter_reduce_"),
    }
)


@cache
def name_of(func: Any) -> str:
    """Return the name of an operation without namespace and overload."""
    return str(func).removeprefix("aten.").split(".")[0]


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a GPU's host waits for this operation on tensors of the GPU."""
    name = name_of(func)
    if name in ALWAYS:
        return True
    if name == "repeat_interleave":  # by a tensor of counts; the length of the result is their sum
        return (kwargs or {}).get("output_size") is None
    if name in {"masked_fill", "masked_fill_"}:  # by a tensor of the GPU, whose number the host asks for
        return isinstance(args[2], Tensor) and args[2].device.type != "cpu"
    if name == "normal":  # looks for a negative standard deviation
        return any(isinstance(one, Tensor) for one in args[1:2])
    if name not in INDEXING:
        return False
    masked = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if masked and name.endswith(("put", "put_", "impl_")):  # one number from the host becomes a masked_fill
        value = args[2]
        return not (value.numel() == 1 and value.device.type == "cpu")
    return masked


def unrepeatable(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this operation on tensors of a GPU has no algorithm that repeats itself."""
    name = name_of(func)
    if name in {"cumsum", "cumsum_"}:
        return bool(args[0].is_floating_point())
    if name == "bincount":
        return len(args) > 1 and args[1] is not None
    return name in UNREPEATABLE or (name == "median" and str(func) == "aten.median.dim")
