# The images of the services and of the gateway: `docker build --target prefill`, `decode` or `gateway`.
ARG BASE=python:3.11-slim-bookworm

# What all run on: a user without rights, whose home is the one place, with /tmp, where anything is written: weights, and what
# libraries compile.
FROM ${BASE} AS base
RUN useradd --no-create-home --home-dir /var/cache/baton --uid 10001 baton \
 && install -d -o baton -g baton /var/cache/baton
RUN python3 -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/baton \
    HF_HOME=/var/cache/baton/huggingface

# What libraries are needed is read from pyproject.toml alone, so that a change of the code leaves their layers as they are.
FROM base AS requirements
WORKDIR /opt/src
COPY pyproject.toml ./
COPY scripts/requirement.py scripts/
RUN touch README.md LICENSE

# The code, laid out as in a virtual environment: the images put it over theirs.
FROM requirements AS code
COPY . .
RUN pip install --no-deps --prefix /opt/code .

FROM requirements AS gateway-libraries
RUN pip install '.[gateway]' && pip uninstall --yes baton-serve

FROM base AS gateway
COPY --from=gateway-libraries /opt/baton /opt/baton
COPY --from=code /opt/code /opt/baton
# Inside a container loopback reaches nobody; who may connect is decided by what is published.
ENV BATON_LISTEN=0.0.0.0:8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=1m \
  CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:${BATON_LISTEN##*:}/health', timeout=5)"
USER baton
WORKDIR /var/cache/baton
CMD ["python", "-m", "gateway"]

# A further index with the build of PyTorch that is wanted (for CPUs, or a version of CUDA). Empty: what pip's own index has.
FROM requirements AS torch
ARG TORCH_INDEX_URL=""
RUN pip install ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} "$(python scripts/requirement.py torch)"

FROM torch AS engine-libraries
RUN pip install '.[engine]' && pip uninstall --yes baton-serve

# Both services, alike but for what is started: their images share every layer.
FROM engine-libraries AS engine
# Debian packages that an image for GPUs needs: Triton calls a C compiler when a kernel is first used.
ARG COMPILER_PACKAGES=""
RUN if [ -n "${COMPILER_PACKAGES}" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends ${COMPILER_PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=code /opt/code /opt/baton
VOLUME /var/cache/baton
ENV BATON_LISTEN=0.0.0.0:50051 BATON_METRICS_LISTEN=0.0.0.0:9100
EXPOSE 50051 9100
USER baton
WORKDIR /var/cache/baton

FROM engine AS prefill
HEALTHCHECK --interval=10s --timeout=10s --start-period=5m \
  CMD baton health --address "127.0.0.1:${BATON_LISTEN##*:}" --service baton.v1.Prefill
CMD ["python", "-m", "prefill_service"]

FROM engine AS decode
HEALTHCHECK --interval=10s --timeout=10s --start-period=5m \
  CMD baton health --address "127.0.0.1:${BATON_LISTEN##*:}" --service baton.v1.Inference
CMD ["python", "-m", "decode_service"]
