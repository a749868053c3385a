"""A network small enough to calculate by hand."""

import torch


class PlainNet:
    """``features = scale * x``; ``classify = z + bias`` (a missing bias is 0). Remembers in which mode it ran."""

    def __init__(self):
        self.trained = []

    def features(self, params, buffers, x, train=True):
        self.trained.append(train)
        return params["scale"] * x

    def classify(self, params, buffers, z, train=True):
        return z + params.get("bias", torch.zeros((), dtype=z.dtype))

    def logits(self, params, buffers, x, train=True):
        return self.classify(params, buffers, self.features(params, buffers, x, train), train)
