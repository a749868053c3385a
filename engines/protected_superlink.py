"""Flower's SuperLink behind :mod:`engines.middleware`: ``python -P -m fedcross.engines.protected_superlink OPTIONS``.

The options are those of ``flower-superlink``. Without an operator's token, or with a Flower whose application cannot be
built or checked, the program ends with exit code 1 before it listens.
"""

from __future__ import annotations

import sys

from fedcross.core.errors import FedcrossError
from fedcross.engines import flower_private, operator_token
from fedcross.engines.middleware import Guard

#: Seconds that calls in progress have when the SuperLink is told to end.
GRACE_S = 3


def command() -> list[str]:
    """Return how to start this program; Flower's options follow."""
    return [sys.executable, "-P", "-m", "fedcross.engines.protected_superlink"]


def main() -> None:
    """Serve until SIGTERM."""
    import uvicorn

    try:
        token = operator_token.read()
        if not token:
            sys.exit(f"{operator_token.VARIABLE}: not set. The SuperLink needs the file of the operator's token.")
        config = flower_private._parse_superlink_lifespan_config()
        guarded = Guard(flower_private.create_app(config, flower_private.SuperLinkLifespan), token)
    except FedcrossError as error:
        sys.exit(str(error))
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        version = flower_private.installed()
        sys.exit(f"The SuperLink of Flower {version} cannot be protected ({error}). Install flwr>=1.42,<1.44.")
    uvicorn.run(
        guarded,
        host=config.host,
        port=config.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )


if __name__ == "__main__":
    main()
