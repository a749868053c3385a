"""FedCross's LSTM for next-character prediction (Shakespeare), after McMahan et al. and LEAF."""

from __future__ import annotations

from collections import OrderedDict

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._recurrent import LastStepLSTM
from fedcross.tasks.models._split import Split, tokens
from fedcross.tasks.models.dropout import Dropout
from fedcross.tasks.models.width import Hidden


class Params(Settings):
    """Settings of the LSTM.

    Attributes
    ----------
    dropout : float
        Probability before the classifier: 0 in the lab's code, .5 in that of FedMR and FedMut.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return embedding 8, two LSTM layers of 256, the last step, classes.

    Weights for 80 characters: embedding 80*8 = 640; LSTM 4*256*(8+256)+2*1,024 = 272,384 and 4*256*512+2*1,024 =
    526,336; classifier 256*80+80 = 20,560; together 819,920.
    """
    inputs, state = width(8), width(256)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=nn.Embedding(tokens(task, "lstm"), inputs), lstm=LastStepLSTM(inputs, state, 2)
    )
    if params.dropout:
        parts["dropout"] = Dropout(params.dropout)
    return Split(nn.Sequential(parts), nn.Linear(state, task.classes))
