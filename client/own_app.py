"""For a ClientApp that is not ours: the answer to the server's question which partition it holds."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross.core.errors import ConfigError

PARTITION = "partition-id"


def tell_partition(app: ClientApp) -> ClientApp:
    """Let the clients of `app` tell the server their partition, and return `app`.

    Clients are drawn and ordered by partition. Without this they are numbered by node id, which Flower draws at random,
    so that two runs with one seed differ.

    Parameters
    ----------
    app : ClientApp
        An app of Flower's Message API without a query handler of its own.

    Raises
    ------
    ConfigError
        In the client, if its node was started without ``partition-id``.
    """

    @app.query()
    def who(message: Message, context: Context) -> Message:
        partition = context.node_config.get(PARTITION)
        if partition is None:
            raise ConfigError("This node has no partition-id. Start it with --node-config 'partition-id=0'.")
        return Message(RecordDict({"config": ConfigRecord({PARTITION: int(partition)})}), reply_to=message)

    return app
