"""What each operation of a network does to the channels of its inputs.

A rule gets the tracer, the operation's arguments and its result, and returns the label of the result. An operation
without a rule is refused as soon as one of its inputs has channels, so nothing is ever sliced by guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedcross.tasks.models.slicing.labels import Label, UnsliceableError, reshaped
from fedcross.tasks.models.slicing.plan import Axis

if TYPE_CHECKING:
    from fedcross.tasks.models.slicing.trace import Tracer


class Call(NamedTuple):
    """An operation of torch's: its arguments by place and by name, and what it returned."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    result: Any

    def given(self, place: int, name: str, usual: Any = None) -> Any:
        """Return an argument that may come by place or by name."""
        return self.args[place] if len(self.args) > place else self.named.get(name, usual)


#: Operations that treat every element alone.
ALONE = frozenset(
    {
        "relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "celu", "gelu", "silu", "mish",
        "hardswish", "hardtanh", "hardtanh_", "hardsigmoid", "sigmoid", "sigmoid_", "tanh", "tanh_", "softplus",
        "softsign", "logsigmoid", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
        "contiguous", "clone", "detach", "to", "float", "double", "type_as", "neg", "abs", "sqrt", "rsqrt", "square",
        "pow", "exp", "clamp", "clamp_min", "requires_grad_", "alias", "__neg__", "__pow__", "zeros_like", "ones_like",
        "full_like",
    }
)  # fmt: skip
#: Operations that combine the elements of two tensors one by one.
PAIRS = frozenset(
    {
        "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub",
        "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__rtruediv__", "__itruediv__",
        "true_divide", "maximum", "minimum",
    }
)  # fmt: skip
#: Operations on the pixels of each channel.
SPATIAL = frozenset(
    {
        "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
        "adaptive_max_pool3d", "interpolate", "upsample", "lp_pool2d", "max_pool2d_with_indices", "boolean_dispatch",
    }
)  # fmt: skip
#: Operations that take one value of all along some axes.
REDUCTIONS = frozenset(
    {
        "mean", "sum", "amax", "amin", "std", "var",
    }
)  # fmt: skip


def alone(t: Tracer, call: Call) -> Label:
    """Keep the label of the first tensor."""
    return t.label(call.given(0, "input"))


def pairs(t: Tracer, call: Call) -> Label:
    """Join the channels of both, aligned from the right; a weight of the model gets those of the other."""
    operands = [x for x in (call.given(0, "input"), call.given(1, "other")) if isinstance(x, Tensor)]
    found: list[Axis] = []
    for place in range(1, call.result.dim() + 1):
        axes = [
            t.label(x)[-place] for x in operands if x.dim() >= place and x.shape[-place] == call.result.shape[-place]
        ]
        loose = [
            x for x in operands if t.is_weight(x) and x.dim() >= place and x.shape[-place] == call.result.shape[-place]
        ]
        known = next((axis for axis in axes if axis is not None), None)
        for weight in loose if known is not None else ():
            t.name_axis(weight, weight.dim() - place, known)
        axes = [
            t.label(x)[-place] for x in operands if x.dim() >= place and x.shape[-place] == call.result.shape[-place]
        ]
        axis = axes[0] if axes else None
        for other in axes[1:]:
            axis = t.groups.join(axis, other)
        found.append(axis)
    return tuple(reversed(found))


def spatial(t: Tracer, call: Call) -> Label:
    """Keep the channels; refuse if pixels are channels of something else."""
    image = call.given(0, "input")
    out = call.result[0] if isinstance(call.result, tuple) else call.result
    label = t.label(image)
    if any(axis and old != new for axis, old, new in zip(label, image.shape, out.shape)):
        raise UnsliceableError("it pools over channels")
    return label


def reduction(t: Tracer, call: Call) -> Label:
    """Drop the axes that are summed up."""
    label = t.label(call.given(0, "input"))
    dims = call.given(1, "dim")
    if dims is None or isinstance(dims, torch.dtype):
        gone = set(range(len(label)))
    else:
        gone = {d % len(label) for d in ([dims] if isinstance(dims, int) else dims)}
    if any(label[d] for d in gone):
        raise UnsliceableError("it takes a value over all channels, which depends on how many there are")
    if call.given(2, "keepdim", False):
        return label
    return tuple(axis for d, axis in enumerate(label) if d not in gone)


def reshape(t: Tracer, call: Call) -> Label:
    """Follow channels through flatten, view and reshape."""
    old = call.given(0, "input")
    return reshaped(t.label(old), tuple(old.shape), tuple(call.result.shape))


def transpose(t: Tracer, call: Call) -> Label:
    """Exchange two axes."""
    label = list(t.label(call.args[0]))
    a, b = call.given(1, "dim0"), call.given(2, "dim1")
    label[a], label[b] = label[b], label[a]
    return tuple(label)


def permute(t: Tracer, call: Call) -> Label:
    """Put the axes into another order."""
    dims = call.args[1:] or (call.named["dims"],)
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    label = t.label(call.args[0])
    return tuple(label[d] for d in order)


def cat(t: Tracer, call: Call) -> Label:
    """Put axes one after another; the others belong together."""
    tensors, dim = call.given(0, "tensors"), call.given(1, "dim", 0) % call.result.dim()
    labels = [t.label(x) for x in tensors]
    found: list[Axis] = []
    for d in range(call.result.dim()):
        axes = [label[d] for label in labels]
        if d == dim and any(axes):
            found.append(tuple(s for x, axis in zip(tensors, axes) for s in axis or t.always(x.shape[d])))
            continue
        axis = axes[0]
        for other in axes[1:]:
            axis = t.groups.join(axis, other) if d != dim else None
        found.append(axis)
    return tuple(found)


def getitem(t: Tracer, call: Call) -> Label:
    """Follow channels through ``x[:, -1]`` and the like."""
    chosen = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(not isinstance(one, int | slice | type(None) | type(...)) for one in chosen):
        raise UnsliceableError("it picks elements by an index tensor")
    label, found, axis = t.label(call.args[0]), list[Axis](), 0
    named_axes = sum(one is not None and one is not ... for one in chosen)
    for one in chosen:
        if one is None:
            found.append(None)
        elif one is ...:
            skipped = len(label) - named_axes
            found += label[axis : axis + skipped]
            axis += skipped
        else:
            if label[axis] and one != slice(None):
                raise UnsliceableError("it picks some of the channels by their number")
            found += [] if isinstance(one, int) else [label[axis]]
            axis += 1
    return (*found, *label[axis:])


def squeeze(t: Tracer, call: Call) -> Label:
    """Drop or add axes of length 1."""
    return reshaped(t.label(call.args[0]), tuple(call.args[0].shape), tuple(call.result.shape))


def pad(t: Tracer, call: Call) -> Label:
    """Keep the channels; zeros beside pixels are fine, zeros beside channels are not."""
    label = t.label(call.args[0])
    if any(axis and old != new for axis, old, new in zip(label, call.args[0].shape, call.result.shape)):
        raise UnsliceableError("it adds zero channels; make it a layer as tasks.models.resnet20.PadChannels is")
    return label


def linear(t: Tracer, call: Call) -> Label:
    """Make a group of the outputs; the inputs are the channels that arrive."""
    x, weight = call.given(0, "input"), call.given(1, "weight")
    label = t.label(x)
    t.name_axis(weight, 1, label[-1])
    out = t.outputs(weight, 0, call.given(2, "bias"))
    t.produced()
    return (*label[:-1], out)


def convolution(t: Tracer, call: Call) -> Label:
    """Make a group of the filters; a depthwise convolution keeps the channels that arrive."""
    x, weight = call.given(0, "input"), call.given(1, "weight")
    bias, groups = call.given(2, "bias"), call.given(6, "groups", 1)
    return _convolved(t, x, weight, bias, groups, (0, 1), call.result.shape)


def transposed_convolution(t: Tracer, call: Call) -> Label:
    """Do what :func:`convolution` does, for weights (inputs, outputs, ...)."""
    x, weight = call.given(0, "input"), call.given(1, "weight")
    bias, groups = call.given(2, "bias"), call.given(6, "groups", 1)
    return _convolved(t, x, weight, bias, groups, (1, 0), call.result.shape)


def _convolved(
    t: Tracer, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, places: tuple[int, int], made: torch.Size
) -> Label:
    label = t.label(x)
    where = x.dim() - weight.dim() + 1  # an example without the axis of the batch
    if any(label[where + 1 :]):
        raise UnsliceableError("its pixels are channels of something else")
    if groups == 1:
        t.name_axis(weight, places[1], label[where])
        out = t.outputs(weight, places[0], bias)
        t.produced()
    elif groups == x.shape[where] == made[where] and label[where]:
        out = label[where]
        t.name_axis(weight, 0, out)
        if bias is not None:
            t.name_axis(bias, 0, out)
    elif label[where]:
        raise UnsliceableError(f"{groups} groups of channels; one group, or one for each channel, can be cut")
    else:
        out = None
    return (*label[:where], out, *label[where + 1 :])


def normalised(t: Tracer, call: Call) -> Label:
    """Give batch and instance normalisation the channels that arrive."""
    x = call.given(0, "input")
    label = t.label(x)
    for place, name in ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias")):
        if isinstance(tensor := call.given(place, name), Tensor):
            t.name_axis(tensor, 0, label[1])
    t.batch_normalised()
    return label


def group_norm(t: Tracer, call: Call) -> Label:
    """Cut whole groups of a group norm, so that each keeps its statistics."""
    x, count = call.given(0, "input"), call.given(1, "num_groups")
    label = t.label(x)
    for segment in label[1] or ():
        if len(label[1] or ()) > 1 or segment.group < 0 or segment.inner != 1:
            raise UnsliceableError("a group norm over joined channels")
        t.groups.unit(segment.group, x.shape[1] // count)
    for place, name in ((2, "weight"), (3, "bias")):
        if isinstance(tensor := call.given(place, name), Tensor):
            t.name_axis(tensor, 0, label[1])
    return label


def layer_norm(t: Tracer, call: Call) -> Label:
    """Cut the channels of a layer norm, which then normalises over fewer."""
    x, shape = call.given(0, "input"), call.given(1, "normalized_shape")
    label = t.label(x)
    last = label[-len(shape) :]
    t.exact = t.exact and not any(last)
    for place, name in ((2, "weight"), (3, "bias")):
        if isinstance(tensor := call.given(place, name), Tensor):
            for d, axis in enumerate(last):
                t.name_axis(tensor, d, axis)
    return label


def embedding(t: Tracer, call: Call) -> Label:
    """Make a group of the width of the word vectors; the vocabulary stays whole."""
    weight = call.given(1, "weight")
    t.name_axis(weight, 0, None)
    return (*t.label(call.given(0, "input")), t.outputs(weight, 1, None))


def prelu(t: Tracer, call: Call) -> Label:
    """Give the slopes the channels that arrive, unless one slope holds for all."""
    label, weight = t.label(call.args[0]), call.given(1, "weight")
    if weight.numel() > 1:
        t.name_axis(weight, 0, label[1])
    return label


def recurrent(t: Tracer, call: Call) -> list[Label]:
    """Make a group of the states of all layers and directions; a gate's rows are cut like the state.

    torch has one size for all of them, so that none can stay whole while another is cut.
    """
    if isinstance(call.args[1], Tensor) and call.args[1].dim() == 1 and not isinstance(call.args[2], list | tuple):
        raise UnsliceableError("packed sequences")
    x, weights, biased, layers, both = call.args[0], call.args[2], call.args[3], call.args[4], call.args[7]
    each, ways = 4 if biased else 2, 2 if both else 1
    if len(weights) != each * ways * layers:
        raise UnsliceableError("a projection of its state")
    arriving, out, first = t.label(x)[-1], None, None
    for layer in range(layers):
        states: list[Axis] = []
        for way in range(ways):
            at = (layer * ways + way) * each
            hidden = weights[at + 1].shape[1]
            state = t.known(weights[at + 1])[1] or t.groups.new(hidden)
            first = t.groups.join(first or state, state)
            gates = state * (weights[at].shape[0] // hidden)
            t.name_axis(weights[at], 0, gates)
            t.name_axis(weights[at], 1, arriving)
            t.name_axis(weights[at + 1], 0, gates)
            t.name_axis(weights[at + 1], 1, state)
            for bias in weights[at + 2 : at + each]:
                t.name_axis(bias, 0, gates)
            states.append(state)
        arriving = out = tuple(s for state in states for s in state or ())
    rest = (None,) * (x.dim() - 1)
    final = (*rest, out if ways == 1 else None)
    return [(*rest, out), final, final]


RULES: dict[str, Any] = {
    **dict.fromkeys(ALONE, alone),
    **dict.fromkeys(PAIRS, pairs),
    **dict.fromkeys(SPATIAL, spatial),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("flatten", "view", "reshape", "unflatten", "view_as", "reshape_as"), reshape),
    **dict.fromkeys(("squeeze", "unsqueeze"), squeeze),
    **dict.fromkeys(("transpose", "swapaxes"), transpose),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    **dict.fromkeys(("batch_norm", "instance_norm"), normalised),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    "permute": permute,
    "__getitem__": getitem,
    "pad": pad,
    "linear": linear,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "embedding": embedding,
    "prelu": prelu,
}
