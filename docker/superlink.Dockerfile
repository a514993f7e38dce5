# The SuperLink: Flower and what Lacquer adds to it, without torch, models and the code that reads records.
#
# PYTHON_IMAGE      any image with python 3.11 or later and its venv module
# REVISION, SOURCE  of this repository, for the image's labels: its commit, and where you publish it
# Secrets (all optional): ca_bundle, for a network with a certificate authority of its own; index_url, for a mirror.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS needs
WORKDIR /src
COPY pyproject.toml requirements.lock docker/requirements.py docker/locked.py ./
RUN python requirements.py pyproject.toml "" superlink > needs.txt && python locked.py requirements.lock < needs.txt > /superlink.txt \
 && python locked.py requirements.lock uv > /uv.txt

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY --from=needs /superlink.txt /uv.txt ./
COPY requirements.lock ./
# hadolint ignore=DL3013,DL3042
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=index_url \
    set -eu; \
    if [ -s /run/secrets/ca_bundle ]; then export SSL_CERT_FILE=/run/secrets/ca_bundle PIP_CERT=/run/secrets/ca_bundle; fi; \
    if [ -s /run/secrets/index_url ]; then \
      UV_DEFAULT_INDEX=$(cat /run/secrets/index_url); PIP_INDEX_URL=$UV_DEFAULT_INDEX; \
      export UV_DEFAULT_INDEX PIP_INDEX_URL; \
    fi; \
    python -m venv /opt/venv; \
    /opt/venv/bin/pip install -q --no-deps --require-hashes -r uv.txt; \
    /opt/venv/bin/uv pip install -q --python /opt/venv/bin/python --require-hashes --no-build -c requirements.lock -r superlink.txt; \
    /opt/venv/bin/uv pip uninstall -q --python /opt/venv/bin/python pip setuptools uv

FROM ${PYTHON_IMAGE}
# Folders that named volumes are mounted on get their owner from here.
RUN useradd --uid 10001 --create-home lacquer \
 && install -d -o lacquer -g lacquer -m 0700 /state \
 && install -d -m 0755 /keys
COPY --from=build /opt/venv /opt/venv
COPY server/__init__.py /opt/lacquer/server/
COPY server/network/__init__.py server/network/operator_key.py server/network/superlink.py server/network/superlink_state.py /opt/lacquer/server/network/
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/lacquer \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp FLWR_HOME=/tmp/flwr \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
USER 10001:10001
WORKDIR /state
CMD ["python", "-m", "server.network.superlink", "--help"]
ARG PYTHON_IMAGE
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="lacquer-superlink" \
      org.opencontainers.image.description="Flower's SuperLink for federations of Lacquer" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
