"""Flower's Runtime API, as a SuperNode serves it to the processes that do its work; no other file here uses it.

One task: ``AcquireTask`` (signed with the secret that the SuperNode has too) gives a token; with the token,
``PullTaskInput`` gives context, run and app bundle, ``PullMessages`` and ``PullObject`` the message; ``PushMessages``
and ``PushObject`` take the reply, ``PushTaskOutput`` context and outcome. A task without a sign of life for a minute
counts as dead. These are the calls of ``flwr.supernode.runtime.run_clientapp``, in its order; that function itself
ends its process.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient

from . import whole

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run

#: The versions of Flower whose ``run_clientapp`` this file was compared with.
CHECKED = ("1.41", "1.42")
#: First pause before an object is asked for again. A task shows before its message's objects have arrived, over a slow
#: line minutes before; if they never come, the SuperNode ends the task (:mod:`leftovers`).
PAUSE_S = 0.05
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
UNAUTHORIZED, FORBIDDEN = 401, 403
#: Exit code of a worker whose task the SuperNode has taken away.
CLAIM_LOST = 3


class RefusedError(Exception):
    """The SuperNode refuses the secret or the token."""


class AwayError(Exception):
    """The SuperNode cannot be reached, or is not ready."""


@dataclass(frozen=True)
class Task:
    """A task that the SuperNode has handed out.

    Attributes
    ----------
    number : int
        Flower's id.
    run : int
        Flower's id of the run.
    bundle : str
        SHA-256 of the app bundle.
    token : str
        Opens the task; nobody else may see it.
    """

    number: int
    run: int
    bundle: str
    token: str


@dataclass
class Given:
    """What belongs to a task."""

    message: Message
    context: Context
    run: Run
    fab: Fab


def known() -> bool:
    """Return whether this file was compared with the installed version of Flower."""
    return ".".join(version("flwr").split(".")[:2]) in CHECKED


class Door:
    """Hands out a SuperNode's tasks.

    Parameters
    ----------
    address : str
        ``host:port`` on this machine.
    secret : bytes
        The SuperNode's SuperExec secret.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE])
        self._client = _client(address, signed)

    def acquire(self) -> Task | None:
        """Return the next task, or None if there is none.

        Raises
        ------
        RefusedError
            If the secret is not the SuperNode's.
        AwayError
            If the SuperNode is not there.
        """
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        with _named_errors():
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not found.HasField("task") or not found.token:
            return None
        return Task(int(found.task.task_id), int(found.task.run_id), found.task.fab_hash, found.token)


class Visit:
    """One task, from its input to its outcome; used in the worker."""

    def __init__(self, address: str, token: str) -> None:
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker

        # If the token is refused, this sends SIGINT to the own process: the run was stopped, or the task given up.
        self._client = _client(address, RuntimeTokenHttpInterceptor(token), make_simple_http_retry_invoker())

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def pull(self) -> tuple[Given, str]:
        """Return what belongs to the task, and its message without content as text (for :func:`report_death`)."""
        from flwr.common.serde import context_from_proto, fab_from_proto, run_from_proto
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullTaskInputRequest
        from flwr.supercore.task_identity import TaskIdentity

        found = self._client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id
        TaskIdentity.node_id = found.context.node_id
        context = context_from_proto(found.context)
        pulled = self._client.PullMessages(PullAppMessagesRequest())
        if not pulled.messages_list:
            raise RuntimeError("The SuperNode has a task without a message.")
        message = self._message(pulled.message_object_trees[0], context)
        given = Given(message, context, run_from_proto(found.run), fab_from_proto(found.fab))
        return given, _text(pulled.messages_list[0])

    def _message(self, tree: Any, context: Context) -> Message:
        from flwr.app import Message
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.inflatable import inflatable_protobuf_utils as calls
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        node, run = Node(node_id=context.node_id), context.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            calls.make_pull_object_fn_protobuf(self._client.PullObject, node, run),
            calls.make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, node, run),
            return_type=Message,
            initial_backoff=PAUSE_S,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # a message does not contain its own id
        return message

    def load(self, given: Given) -> ClientApp:
        """Unpack the app bundle and return its ClientApp; the bundle's folder comes first on ``sys.path`` from now on.

        Raises
        ------
        LoadClientAppError
            If the bundle has none.
        """
        from flwr.cli.install import install_from_fab
        from flwr.clientapp.utils import get_load_client_app_fn

        whole.attach()
        install_from_fab(given.fab.content, skip_prompt=True)
        load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        return load(given.run.fab_id, given.run.fab_version, given.fab.hash_str)

    def push(self, reply: Message) -> None:
        """Hand over the reply."""
        _push(self._client, reply)

    def finish(self, context: Context | None, fault: str = "") -> None:
        """End the task: completed, or failed with `fault`."""
        _finish(self._client, context, fault)


def error_reply(message: Message, error: Exception) -> Message:
    """Return Flower's reply to `message` for an exception in the app, or in loading it."""
    from flwr.app import Error, Message
    from flwr.clientapp.client_app import LoadClientAppError
    from flwr.common.constant import ErrorCode

    if isinstance(error, LoadClientAppError):
        why = "An exception was raised when attempting to load `ClientApp`"
        return Message(Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, why), reply_to=message)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=message)


def still_alive(address: str, token: str) -> None:
    """Give a sign of life for a task. A refusal shows in the worker's next call, so nothing is raised."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    with _with_token(address, token) as client, _quiet():
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def report_death(address: str, token: str, text: str, reason: str) -> bool:
    """Reply with an error to the message of a task whose worker died; return whether the SuperNode took the reply.

    Parameters
    ----------
    address, token : str
        The SuperNode, and the task's token.
    text : str
        From :meth:`Visit.pull`; empty if the worker did not get so far.
    reason : str
        What the server reads.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.message_pb2 import Message as Sent
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullTaskInputRequest

    with _with_token(address, token) as client:
        sent = Sent.FromString(base64.b64decode(text)) if text else None
        if sent is None:
            with _quiet():
                client.PullTaskInput(PullTaskInputRequest())  # refused if the worker had it already
            with _quiet():
                sent = next(iter(client.PullMessages(PullAppMessagesRequest()).messages_list), None)
        if sent is None:
            return False
        data = sent.metadata
        with _quiet():
            node = Node(node_id=data.dst_node_id)
            request = ConfirmMessageReceivedRequest(node=node, run_id=data.run_id, message_object_id=data.message_id)
            client.ConfirmMessageReceived(request)  # the SuperNode forgets the message's objects
        taken = False
        with _quiet():
            reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message_from_proto(sent))
            _push(client, reply)
            taken = True
            _finish(client, None, reason)
    return taken


def _push(client: RuntimeHttpClient, reply: Message) -> None:
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest
    from flwr.supercore.inflatable import inflatable_object
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    data = reply.metadata
    data.__dict__["_message_id"] = reply.object_id
    bare = message_to_proto(remove_content_from_message(reply))
    with inflatable_object.no_object_id_recompute():
        tree = inflatable_object.get_object_tree(reply)
        answer = client.PushMessages(PushAppMessagesRequest(messages_list=[bare], message_object_trees=[tree]))
        push = make_push_object_fn_protobuf(
            client.PushObject, Node(node_id=data.src_node_id), run_id=data.run_id, session_id=answer.session_id
        )
        everything = inflatable_object.get_all_nested_objects(reply)
        push_objects(everything, push, object_ids_to_push=set(answer.objects_to_push))


def _finish(client: RuntimeHttpClient, context: Context | None, fault: str) -> None:
    from flwr.common.constant import SubStatus
    from flwr.common.serde import context_to_proto
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest

    client.PushTaskOutput(
        PushTaskOutputRequest(
            context=None if context is None else context_to_proto(context),
            sub_status=SubStatus.FAILED if fault else SubStatus.COMPLETED,
            details=fault,
        )
    )


def _client(address: str, key: Any, retry: Any = None) -> RuntimeHttpClient:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    name = RuntimeVersionHttpInterceptor(component_name="fedcross executor")
    return RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, interceptors=[name, key], retry_invoker=retry
    )


@contextmanager
def _with_token(address: str, token: str) -> Iterator[RuntimeHttpClient]:
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

    client = _client(address, RuntimeTokenHttpInterceptor(token))
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turn what httpx raises into this file's errors."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code in {UNAUTHORIZED, FORBIDDEN}:
            raise RefusedError(error.response.text[:200]) from error
        raise AwayError(f"status {error.response.status_code}: {error.response.text[:200]}") from error
    except httpx.TransportError as error:
        raise AwayError(str(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave the block when the SuperNode refuses or is gone: there is nobody left to tell."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, ValueError):
        return


def _text(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode("ascii")
