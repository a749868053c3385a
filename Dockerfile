# One image for server and devices, and the gateway in front of the server.
#
#   docker build -t fedcross .                                                     # for the CPU
#   docker build -t fedcross:gpu --build-arg ACCELERATOR=gpu .
#   docker build -t fedcross-gateway --target gateway .
#
# BASE_IMAGE is any Debian with Python 3.11 or newer; the default is named by its digest, so that the same bytes come each
# time. docker-compose.yml has the same line. Layers that take long stand before those that change with the code.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba

FROM ${BASE_IMAGE} AS gateway
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends haproxy ca-certificates \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/gateway.cfg deploy/page.cfg deploy/deadline.lua deploy/gateway.sh /etc/fedcross/
USER 10001:10001
EXPOSE 8443 8444
# Health check: the gateway must refuse, over TLS, a path that no client may call.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["python3", "-c", "import ssl,urllib.request as r,urllib.error as e\nc=ssl.create_default_context(cafile='/keys/server/ca.crt')\ntry: r.urlopen('https://localhost:8443/', context=c, timeout=4)\nexcept e.HTTPError as x: raise SystemExit(x.code != 403)"]
CMD ["sh", "/etc/fedcross/gateway.sh", "/keys/server", "haproxy", "-W", "-db", "-f", "/etc/fedcross/gateway.cfg", "-f", "/etc/fedcross/page.cfg"]
ARG VERSION=0.2.0
ARG REVISION=
LABEL org.opencontainers.image.title="fedcross-gateway" \
      org.opencontainers.image.description="HAProxy in front of a federation's SuperLink" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# The pins and hashes of the lock file, only for packages that run in this image. This is a separate stage, so that packages
# are installed again only when the list has changed. Runtime installation is off, so Flower needs no uv. What torch needs
# only with a GPU is left out of the CPU's image (deploy/cpu_torch.py). Of the extra `data` only pyarrow comes, which reads
# tables: flwr-datasets is for simulations, and cannot be imported without matplotlib.
FROM ${BASE_IMAGE} AS list
ARG ACCELERATOR=cpu
WORKDIR /list
COPY requirements.lock pyproject.toml deploy/requirements.py ./
RUN set -eu; \
    gpu=""; \
    if [ "$ACCELERATOR" = cpu ]; then gpu="--without-gpu-except cuda-toolkit nvidia-cuda-runtime"; fi; \
    python3 requirements.py requirements.lock pyproject.toml --only setuptools hatchling > build.txt; \
    python3 requirements.py requirements.lock pyproject.toml --extra privacy --extra page --extra data --without ray matplotlib uv flwr-datasets $gpu > run.txt

# pip stays in /opt/tools, which is not in the final image.
FROM ${BASE_IMAGE} AS build
ARG ACCELERATOR=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
RUN if [ "$ACCELERATOR" = cpu ] && ! command -v gcc > /dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev binutils && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=list /list/build.txt /list/run.txt ./
RUN set -eu; \
    python3 -m venv --without-pip /opt/fedcross; \
    python3 -m venv /opt/tools; \
    /opt/tools/bin/pip install --quiet --require-hashes --no-deps -r build.txt; \
    install="/opt/tools/bin/pip --python /opt/fedcross/bin/python install --quiet --require-hashes --no-deps"; \
    $install -r build.txt; \
    $install --no-build-isolation -r run.txt
COPY deploy/cpu_torch.py ./
RUN set -eu; cd /opt/fedcross/lib/python3*/site-packages; \
    if [ "$ACCELERATOR" = cpu ]; then \
      python3 /build/cpu_torch.py "$PWD"; \
      strip --strip-unneeded torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so llvmlite/binding/libllvmlite.so; \
    fi; \
    rm -rf torch/include torch/test torch/share torch/bin/protoc* nvidia/cu13/include; \
    (cd pyarrow; rm -rf include tests lib*_flight.* _flight.* libarrow_s3.* _s3fs.* libarrow_python.so libarrow_python.so.*.*); \
    for package in numpy scipy sklearn sympy networkx; do find $package -type d -name tests -prune -exec rm -rf {} +; done; \
    /opt/tools/bin/pip --python /opt/fedcross/bin/python uninstall --quiet --yes hatchling trove-classifiers tomlkit pluggy

FROM build AS wheel
COPY . .
RUN set -eu; \
    /opt/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /build/wheels .; \
    /opt/tools/bin/pip --python /opt/fedcross/bin/python install --quiet --no-deps --no-index --prefix /build/app /build/wheels/*.whl

FROM ${BASE_IMAGE} AS fedcross
# A fixed user id, so that volumes keep their owner when the image changes. A device's bundle has a user of its own: it
# must pass through /keys to the folder that is mounted there.
RUN set -eu; \
    useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin fedcross; \
    install -d -m 0711 -o 10001 -g 10001 /keys; \
    keys="/keys/authority /keys/server /keys/superexec /keys/public /keys/page /keys/operator /keys/client-1 /keys/client-2 /keys/client-3"; \
    install -d -m 0700 -o 10001 -g 10001 $keys /state; \
    install -d -m 0755 -o 10001 -g 10001 /data /data/server /data/client-1 /data/client-2 /data/client-3 /outputs
# Nothing can be installed in a container.
RUN find / -xdev \( -path '*/ensurepip' -o -path '*-packages/pip' -o -path '*-packages/pip-*' -o -path '*/bin/pip*' \) -prune -exec rm -rf {} +
COPY --from=build /opt/fedcross /opt/fedcross
COPY --from=wheel /build/app /opt/fedcross
RUN PYTHONDONTWRITEBYTECODE=1 /opt/fedcross/bin/python -c "import torch, torchvision, opacus, pyarrow.csv, pyarrow.parquet, flwr, fedcross.server.commands.run; torch.nn.Conv2d(1, 2, 3)(torch.ones(1, 1, 5, 5)).sum().backward()"
ENV PATH=/opt/fedcross/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    FLWR_HOME=/state/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FEDCROSS_DATA=/data FEDCROSS_STATE=/state/clients FEDCROSS_CACHE=/state/cache \
    XDG_RUNTIME_DIR=/run/fedcross HOME=/state
USER 10001:10001
WORKDIR /state
CMD ["fedcross", "--help"]
ARG VERSION=0.2.0
ARG REVISION=
LABEL org.opencontainers.image.title="fedcross" \
      org.opencontainers.image.description="Multi-model federated learning on Flower: server and edge clients" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
