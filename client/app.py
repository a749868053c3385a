"""The ClientApp: a message in, a message out. Imports no torch until it has to train."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tasks.errors import ProtocolError

app = ClientApp()


@app.query()
def who(message: Message, context: Context) -> Message:
    """Tell the server which partition this node holds."""
    partition = context.node_config.get("partition-id")
    if partition is None:
        raise ProtocolError(
            "This SuperNode has no partition-id. Start it with --node-config 'partition-id=0 num-partitions=10'."
        )
    return Message(RecordDict({"config": ConfigRecord({"partition-id": int(partition)})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on this node's data."""
    from client.work import workshop

    asked = message.content.config_records["config"]
    own = context.node_config.get("partition-id")
    if own is not None and int(own) != asked["client"]:
        raise ProtocolError(f"A request for client {asked['client']!r} reached the node of client {own}.")
    return workshop(str(context.run_config["overrides"])).train(message)
