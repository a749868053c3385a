"""Runs a job on an existing federation: submits it to the SuperLink, passes on its log and waits until it ends.

A deployment offers the SuperLink's Control API only on its inner network, and this engine works only from there. The
variable ``FEDCROSS_OPERATOR_FILE`` names the file of the operator's token (:mod:`engines.operator_token`).
Every machine reads its data from its own ``FEDCROSS_DATA`` folder. The run's folder must have the same path on this
machine and where the ServerApp runs (a shared mount).
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError

from pydantic import Field

from fedcross.core.errors import ConfigError, FederationError, StorageError
from fedcross.core.events import relay, say
from fedcross.core.settings import Settings
from fedcross.engines import bundle, flower, runs
from fedcross.engines.job import Capabilities
from fedcross.engines.processes import terminated_by_signal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedcross.engines.flower_private import ControlHttpClient
    from fedcross.engines.job import Job

#: Status codes from here on are a SuperLink's own errors, which may pass.
SERVER_ERRORS = 500
#: OpenSSL's words for an answer that is no TLS.
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
CAPABILITIES = Capabilities(own_folders=True)
_LABEL = r"[^.:\[\]/\s]{1,63}"
_ADDRESS = rf"^(\[[0-9A-Fa-f:]+\]|{_LABEL}(\.{_LABEL})*\.?):\d{{1,5}}$"


class Params(Settings):
    """Address and certificate of the SuperLink.

    ``authority`` signed the SuperLink's certificate; ``wait_s`` seconds are waited until it answers.
    """

    name: str = "remote"
    address: str = Field(pattern=_ADDRESS, examples=["superlink.example.org:8000"])
    authority: Path = Field(examples=["authority/public/ca.crt"])
    wait_s: float = Field(default=60, gt=0)


def run(job: Job) -> None:
    """Run `job` on the SuperLink that its settings name.

    Raises
    ------
    FederationError
        If the SuperLink does not answer, or the run does not complete.
    """
    params = job.settings
    submit(params, job.overrides, job.output / "engine", app_folder=job.app_folder)


def submit(params: Params, overrides: str, work: Path, *, app_folder: Path | None = None, watch: bool = True) -> int:
    """Submit a run of fedcross to the SuperLink that `params` name; return Flower's id of the run.

    With `watch`, the run's log is passed on until it has completed, and the run continues after the death of a server
    process. Ctrl-C and SIGTERM stop the run; ``resume`` continues it. If this process is killed, the run goes on.

    `work` gets the log; `app_folder` holds the packages of fedcross (default: where this process imported them).
    Raises FederationError if the SuperLink does not answer, or the run does not complete.
    """
    host, port = host_and_port(params.address)
    authority = params.authority.resolve()
    submitted: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_by_signal())
        wait_for(params.address, authority, params.wait_s)
        state = stack.enter_context(flower.scratch(work))
        fab = bundle.build(bundle.make(state / "app", app_folder), state, flower.environment(state / "flwr"))
        client = stack.enter_context(contextlib.closing(flower.control_client(port, authority, host)))
        log = stack.enter_context(flower.run_log(work / "run.log", relay))
        stack.enter_context(refusals(params.address))
        if not watch:
            return runs.start(client, fab, overrides)
        try:
            runs.complete(client, fab, overrides, log, started=submitted.append)
        except (KeyboardInterrupt, SystemExit):
            if submitted:
                _stop(client, submitted[-1])
            raise
    return submitted[-1]


@contextlib.contextmanager
def refusals(address: str) -> Iterator[None]:
    """Raise what the SuperLink at `address` refuses in this block as FederationError with its message."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code >= SERVER_ERRORS:
            said = _words(error.response.text).rstrip(".")
            raise FederationError(
                f"SuperLink {address}: an error of its own ({error.response.status_code}, {said}). Its log says which. "
                "At the server, fedcross doctor --database FILE says whether its database is locked or damaged."
            ) from error
        raise FederationError(f"SuperLink {address} refuses: {_words(error.response.text)}") from error
    except httpx.TransportError as error:
        raise FederationError(f"SuperLink {address}: the connection failed ({error}).") from error


def _words(answer: str) -> str:
    """Return the words in a SuperLink's refusal: JSON with a "detail", or text."""
    with contextlib.suppress(ValueError):
        found = json.loads(answer)
        if isinstance(found, dict) and isinstance(found.get("detail"), str):
            answer = found["detail"]
    return answer[:300]


def _stop(client: ControlHttpClient, run_id: int) -> None:
    """Stop the run, and say whether that worked: nobody watches it any more."""
    import httpx

    try:
        runs.stop(client, run_id)
    except (httpx.HTTPError, FederationError) as error:
        say(f"Run {run_id} could not be stopped ({error}): fedcross deploy stop {run_id}", "WARNING")
    else:
        say(f"Run {run_id} is stopped; its finished rounds are on disk.", "WARNING")


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port``; a literal IPv6 address has brackets and keeps them.

    Raises
    ------
    ConfigError
        If `address` has another form.
    """
    if not re.fullmatch(_ADDRESS, address):
        raise ConfigError(f"{address!r}: expected HOST:PORT, for example superlink.example.org:8000.")
    host, port = address.rsplit(":", 1)
    if int(port) > 65535:
        raise ConfigError(f"{address!r}: there is no port above 65535.")
    return host, int(port)


def wait_for(address: str, authority: Path, seconds: float) -> None:
    """Wait until the SuperLink at `address` answers over TLS.

    Raises
    ------
    FederationError
        If there is no answer within `seconds`; the message contains the last error. A certificate that is refused, and
        an answer that no SuperLink gives, raise the error at once, because waiting cannot help.
    """
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise StorageError(
            f"{authority}: not a readable certificate ({error}). Name the federation's ca.crt: engine.authority=FILE "
            "for a run, --authority FILE for fedcross deploy."
        ) from error
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"https://{address}/health", context=context, timeout=5).close()
            return
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(error, HTTPError):
                error.close()
            if said := _foreign(error, reason, authority):
                raise FederationError(f"SuperLink {address}: {said}") from error
        if time.monotonic() >= deadline:
            raise FederationError(f"SuperLink {address}: no answer within {seconds:.0f} s ({reason}). Is it running?")
        time.sleep(0.5)


def _foreign(error: Exception, reason: object, authority: Path) -> str:
    """Return what is wrong where something answers that is not the SuperLink; "" if waiting may help."""
    advice = "what answers there is no SuperLink of this federation. Is it the gateway's address, or another program's?"
    if isinstance(reason, ssl.SSLCertVerificationError):
        cure = f"Is {authority} of this federation, the name in the certificate, this machine's clock right?"
        return f"its certificate is refused ({reason.verify_message}). {cure}"
    if isinstance(error, HTTPError) and error.code < SERVER_ERRORS:
        return f"answers {error.code} to /health: {advice}"
    if isinstance(reason, ssl.SSLError) and reason.reason in NO_TLS:
        return f"does not speak TLS ({reason.reason}): {advice}"
    # A connection that ends before an answer is an OSError too: a SuperLink that starts.
    return f"does not speak HTTP: {advice}" if not isinstance(error, OSError) else ""
