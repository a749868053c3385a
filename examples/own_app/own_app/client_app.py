"""A plain Flower client: it knows nothing of fedcross."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from own_app.task import network, own_part

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model for one epoch on this client's part."""
    part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    x, y = own_part(part, parts)
    model = network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for start in range(0, len(y), 16):
        optimiser.zero_grad()
        cross_entropy(model(x[start : start + 16]), y[start : start + 16]).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(content), reply_to=message)
