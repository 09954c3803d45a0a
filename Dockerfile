# A server of a swarm: docker build -t swarmllm . && docker run --init --gpus all -p 31337:31337 -v swarmllm:/cache swarmllm \
#     --model DIR_OR_HUB_ID --num_blocks 8 --initial_peers ADDRESS
#
# COMPUTE=cuda (default) takes PyTorch's usual build, which brings its own CUDA libraries: the host needs only the driver.
# COMPUTE=cpu takes the CPU build from TORCH_INDEX, the address that PyTorch's "Get started" page names for pip and CPU:
#     docker build --build-arg COMPUTE=cpu --build-arg TORCH_INDEX=ADDRESS -t swarmllm:cpu .
#
# DIGEST says which build of the base image is meant, whatever its tag points to later: "@sha256:" and the rest of what
# this prints, which `make base-image` runs and writes here. Empty, the tag is trusted.
#     docker buildx imagetools inspect python:3.11-slim --format '{{.Manifest.Digest}}'
ARG PYTHON=3.11
ARG DIGEST=

FROM python:${PYTHON}-slim${DIGEST} AS build
ARG COMPUTE=cuda
ARG TORCH_INDEX=
WORKDIR /swarmllm
# For the kernels for CPUs; stays behind in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt ./
COPY hashes ./hashes
RUN pip install --no-cache-dir --require-hashes --no-deps -r hashes/build.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --no-build-isolation -r hashes/base.txt
# Not by hash, each of its builds being another file; its address is what is trusted.
RUN case "$COMPUTE" in \
        cuda) pip install --no-cache-dir -c constraints.txt torch ;; \
        cpu) pip install --no-cache-dir -c constraints.txt --index-url "${TORCH_INDEX:?COMPUTE=cpu needs TORCH_INDEX}" torch ;; \
        *) echo "COMPUTE is cuda or cpu, not $COMPUTE" >&2; exit 2 ;; \
    esac
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --no-build-isolation -c constraints.txt .

FROM python:${PYTHON}-slim${DIGEST}
COPY --from=build /opt/venv /opt/venv
RUN useradd --create-home --uid 1000 swarmllm && install -d -o swarmllm -g swarmllm /cache
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache \
    SWARMLLM_CACHE=/cache
USER 1000:1000
VOLUME /cache
EXPOSE 31337
# The identity lies in the volume, so that the server keeps its peer id when the container is replaced.
ENTRYPOINT ["swarmllm", "server", "--port", "31337", "--identity_path", "/cache/identity.key"]
CMD ["--help"]
