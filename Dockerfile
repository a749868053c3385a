# One image for every service of docker-compose.yml and for devices.
#
#   docker build -t fedcross .                                                              # torch as PyPI has it
#   docker build -t fedcross --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu . # smaller, for the CPU only
#
# BASE_IMAGE is any Debian with Python 3.11 or newer.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba

FROM ${BASE_IMAGE} AS wheel
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install --quiet --no-cache-dir "hatchling>=1.27" editables
WORKDIR /build
COPY . .
RUN /opt/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels .

FROM ${BASE_IMAGE} AS fedcross
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
# The gateway is HAProxy. A fixed user id keeps the owner of volumes when the image changes.
RUN set -eu; \
    apt-get update -qq; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends haproxy ca-certificates > /dev/null; \
    rm -rf /var/lib/apt/lists/*; \
    useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin fedcross; \
    install -d -m 0700 -o 10001 -g 10001 /keys /state; \
    install -d -m 0755 -o 10001 -g 10001 /data /outputs; \
    python3 -m venv /opt/fedcross
COPY deploy/requirements.txt /tmp/requirements.txt
# torch and its libraries stand in a layer of their own.
RUN set -eu; cd /tmp; \
    awk '/^[a-z]/ { own = /^(torch|torchvision|triton|nvidia-[a-z0-9-]*|cuda-[a-z]*)==/ } \
         { print > (own ? "torch.txt" : "others.txt") }' requirements.txt; \
    if [ -n "$TORCH_INDEX" ]; then \
      /opt/fedcross/bin/pip install --quiet --no-deps --index-url "$TORCH_INDEX" $(grep -oE '^torch(vision)?==[^ ]+' torch.txt); \
    else \
      /opt/fedcross/bin/pip install --quiet --no-deps --require-hashes -r torch.txt; \
    fi
# One package of the list has no wheel and needs setuptools.
RUN /opt/fedcross/bin/pip install --quiet "setuptools>=80" wheel \
 && /opt/fedcross/bin/pip install --quiet --no-deps --no-build-isolation --require-hashes -r /tmp/others.txt
COPY --from=wheel /build/wheels /tmp/wheels
RUN /opt/fedcross/bin/pip install --quiet --no-deps --no-index /tmp/wheels/*.whl \
 && /opt/fedcross/bin/python -c "import torch, torchvision, pyarrow, flwr, fedcross.server.commands.run"
ENV PATH=/opt/fedcross/bin:/usr/sbin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    FLWR_HOME=/state/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FEDCROSS_DATA=/data FEDCROSS_STATE=/state/clients FEDCROSS_CACHE=/state/cache \
    XDG_RUNTIME_DIR=/tmp HOME=/state
USER 10001:10001
WORKDIR /state
CMD ["fedcross", "--help"]
ARG VERSION=1.0.0
ARG REVISION=
LABEL org.opencontainers.image.title="fedcross" \
      org.opencontainers.image.description="Multi-model federated learning on Flower: server, gateway and edge clients" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
