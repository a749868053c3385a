"""A small network with batch normalisation, for runs whose models have several widths."""

from __future__ import annotations

from torch import Tensor, nn

from fedcross.tasks.models.width import Hidden


class Normed(nn.Module):
    """A convolution, batch normalisation, a linear layer: 6 and 12 hidden channels."""

    def __init__(self, classes: int, width: float = 1.0) -> None:
        super().__init__()
        of = width if isinstance(width, Hidden) else Hidden()
        maps, units = of(6), of(12)
        self.first, self.norm = nn.Conv2d(1, maps, 3, stride=2, padding=1), nn.BatchNorm2d(maps)
        self.hidden, self.last = nn.Linear(maps * 16, units), nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, classes) of pictures (batch, 1, 8, 8)."""
        x = self.norm(self.first(x)).relu().flatten(1)
        scores: Tensor = self.last(self.hidden(x).relu())
        return scores


#: Overrides: three widths, one slot each, on devices of which each class has two of six clients.
THREE = (
    "model=own",
    "model.path=tests.support.slices:Normed",
    "devices=three_sizes",
    "devices.shares=[0.34,0.33,0.33]",
    "train.lr=0.1",
)
POOL = (*THREE, "method=fedcross", "method.widths=[1.0,0.66,0.4]", "method.alpha=0.9")
