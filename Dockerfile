# One image for server and devices, and the gateway in front of the server.
#
#   docker build -t fedcross .                                                     # for the CPU
#   docker build -t fedcross:gpu --build-arg ACCELERATOR=gpu .
#   docker build -t fedcross-gateway --target gateway .
#
# BASE_IMAGE is any Debian with Python 3.11 or newer: python:3.11-slim, or your own image.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS gateway
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends haproxy ca-certificates \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/gateway.cfg /etc/fedcross/gateway.cfg
USER 10001:10001
EXPOSE 8443
# Health check: the gateway must refuse, over TLS, a path that no client may call.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["python3", "-c", "import ssl,urllib.request as r,urllib.error as e\nc=ssl.create_default_context(cafile='/keys/server/ca.crt')\ntry: r.urlopen('https://localhost:8443/', context=c, timeout=4)\nexcept e.HTTPError as x: raise SystemExit(x.code != 403)"]
CMD ["haproxy", "-W", "-db", "-f", "/etc/fedcross/gateway.cfg"]

# The pins and hashes of the lock file, only for packages that run in this image. This is a separate stage, so that packages
# are installed again only when the list has changed. Runtime installation is off, so Flower needs no uv. torch on a CPU
# links to some of CUDA's libraries (see docs/deploy.md); those that it loads only with a GPU are left out.
FROM ${BASE_IMAGE} AS list
ARG ACCELERATOR=cpu
WORKDIR /list
COPY requirements.lock pyproject.toml deploy/requirements.py ./
RUN set -eu; \
    cpu=""; \
    if [ "$ACCELERATOR" = cpu ]; then cpu="triton nvidia-cusolver nvidia-cuda-cccl nvidia-nvtx cuda-bindings cuda-pathfinder"; fi; \
    python3 requirements.py requirements.lock pyproject.toml --only setuptools hatchling > build.txt; \
    python3 requirements.py requirements.lock pyproject.toml --extra privacy --without ray matplotlib uv $cpu > run.txt

FROM ${BASE_IMAGE} AS build
ARG ACCELERATOR=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY --from=list /list/build.txt /list/run.txt ./
RUN set -eu; \
    python3 -m venv /opt/fedcross; \
    python3 -m venv /opt/tools; \
    /opt/tools/bin/pip install --quiet --require-hashes --no-deps -r build.txt; \
    /opt/fedcross/bin/pip install --quiet --require-hashes --no-deps -r build.txt; \
    /opt/fedcross/bin/pip install --quiet --require-hashes --no-deps --no-build-isolation -r run.txt
RUN set -eu; cd /opt/fedcross/lib/python3*/site-packages; \
    if [ "$ACCELERATOR" = cpu ]; then \
      ldd torch/lib/libtorch_python.so torchvision/*.so | awk '$2 == "=>" && $3 ~ /nvidia/ {print $3}' | xargs -n1 realpath | sort -u > /build/linked; \
      find "$PWD/nvidia" -type f \( -name '*.so*' -o -name '*.a' -o -name '*.bc' -o -name '*.h' -o -name '*.hpp' -o -name '*.cuh' \) \
        | grep -vxFf /build/linked | xargs -d '\n' rm -f; \
      rm -f torch/lib/libtorch_cuda_linalg.so; \
    fi; \
    rm -rf torch/include torch/test torch/share; \
    /opt/fedcross/bin/pip uninstall --quiet --yes hatchling trove-classifiers tomlkit pluggy

FROM build AS wheel
COPY . .
RUN /opt/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /build/wheels .

FROM ${BASE_IMAGE} AS fedcross
# A fixed user id, so that volumes keep their owner when the image changes.
RUN set -eu; \
    useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin fedcross; \
    keys="/keys /keys/authority /keys/server /keys/superexec /keys/public /keys/client-1 /keys/client-2 /keys/client-3"; \
    install -d -m 0700 -o 10001 -g 10001 $keys /state; \
    install -d -m 0755 -o 10001 -g 10001 /data /data/server /data/client-1 /data/client-2 /data/client-3 /outputs
COPY --from=build /opt/fedcross /opt/fedcross
COPY --from=wheel /build/wheels /tmp/wheels
RUN /opt/fedcross/bin/pip install --quiet --no-cache-dir --no-deps --no-index --root-user-action=ignore /tmp/wheels/*.whl \
 && rm -r /tmp/wheels \
 && PYTHONDONTWRITEBYTECODE=1 /opt/fedcross/bin/python -c "import torch, torchvision, flwr, fedcross.server.commands.run"
ENV PATH=/opt/fedcross/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    FLWR_HOME=/state/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FEDCROSS_DATA=/data FEDCROSS_STATE=/state/clients FEDCROSS_CACHE=/state/cache \
    XDG_RUNTIME_DIR=/run/fedcross HOME=/state
USER 10001:10001
WORKDIR /state
CMD ["fedcross", "--help"]
