"""The tasks of a SuperNode: one task is one message to its ClientApp (Flower's Runtime API on this machine)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message

from fedcross.engines import flower_private as private

if TYPE_CHECKING:
    from fedcross.engines.flower_private import RuntimeHttpClient

#: Flower's name of this kind of task, and how Flower says that one ended.
CLIENT_APP, COMPLETED, FAILED = "flwr-clientapp", "completed", "failed"


class AwayError(Exception):
    """The SuperNode does not answer."""


class GoneError(Exception):
    """The SuperNode has given up the task: its run was stopped, say."""


@dataclass
class Task:
    """One message with what belongs to it.

    Attributes
    ----------
    message, context : Message, Context
        The arguments of the ClientApp.
    bundle : bytes
        The app bundle, a ZIP file.
    bundle_hash : str
        Its SHA-256.
    client : RuntimeHttpClient
        Connection with the task's token.
    """

    message: Message
    context: Context
    bundle: bytes
    bundle_hash: str
    client: RuntimeHttpClient

    def alive(self) -> None:
        """Tell the SuperNode that the task is in work; raise GoneError if it is not wanted any more."""
        import httpx

        try:
            self.client.SendTaskHeartbeat(private.runtime_pb2.SendTaskHeartbeatRequest())
        except httpx.HTTPError as error:
            raise GoneError(str(error)) from error

    def reply(self, reply: Message, context: Context, fault: str = "") -> None:
        """Send the reply and end the task; raise GoneError if the SuperNode does not take it."""
        import httpx

        try:
            private.push_message(self.client, reply, context)
        except (httpx.HTTPError, ValueError) as error:
            raise GoneError(str(error)) from error
        private.push_task_output(self.client, context, FAILED if fault else COMPLETED, fault)

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


class Tasks:
    """Hands out the tasks of the SuperNode at `address` (``host:port`` on this machine)."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = self._connect([])

    def take(self) -> Task | None:
        """Return the next task with its message, None if there is none; raise AwayError or GoneError."""
        import httpx

        request = private.runtime_pb2.AcquireTaskRequest(supported_task_types=[CLIENT_APP])
        try:
            found = self._client.AcquireTask(request)
        except httpx.HTTPError as error:
            raise AwayError(str(error)) from error
        if not found.token:
            return None
        client = self._connect([private.RuntimeTokenHttpInterceptor(found.token)])
        try:
            message, context, _, fab = private.pull_task_input(client)
        except Exception as error:  # its objects have not come in time, or its run is over
            with suppress(httpx.HTTPError):
                private.push_task_output(client, None, FAILED, f"the message could not be read: {error}")
            client.close()
            raise GoneError(f"a message could not be read: {error}") from error
        return Task(message, context, fab.content, fab.hash_str, client)

    def _connect(self, interceptors: list[Any]) -> RuntimeHttpClient:
        return private.RuntimeHttpClient.from_server_address(
            server_address=self._address, insecure=True, root_certificates=None, interceptors=interceptors
        )
