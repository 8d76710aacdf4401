# One image for both services: `python -m prefill_service` or `python -m decode_service`.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# An index with the PyTorch build wanted (CPU, or a CUDA version). Empty: what pip's own index offers.
ARG TORCH_INDEX_URL=""

RUN useradd --create-home --uid 10001 baton \
 && install -d -o baton -g baton /var/cache/baton
RUN python3 -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# The libraries make layers of their own, which a change of the code leaves alone.
WORKDIR /opt/src
COPY pyproject.toml ./
COPY scripts/requirement.py scripts/
RUN pip install ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} "$(python scripts/requirement.py torch)"
RUN touch README.md LICENSE && pip install '.[engine]'
COPY . .
RUN pip install --no-deps --force-reinstall .

# Weights that the services fetch: mount a volume to keep them.
ENV XDG_CACHE_HOME=/var/cache/baton HF_HOME=/var/cache/baton/huggingface
VOLUME /var/cache/baton

# Inside a container loopback reaches nobody; who may connect is decided by what is published.
ENV BATON_LISTEN=0.0.0.0:50051 BATON_METRICS_LISTEN=0.0.0.0:9100
EXPOSE 50051 9100
HEALTHCHECK --interval=10s --timeout=10s --start-period=5m CMD baton health "127.0.0.1:${BATON_LISTEN##*:}"

USER baton
WORKDIR /home/baton
CMD ["baton", "--help"]
