# A server of a swarm: docker build -t swarmllm . && docker run --init --gpus all -p 31337:31337 -v swarmllm:/cache swarmllm \
#     --model DIR_OR_HUB_ID --num_blocks 8 --initial_peers MADDR
#
# COMPUTE=cuda (default) takes PyTorch's usual build, which brings its own CUDA libraries: the host needs only the driver.
# COMPUTE=cpu takes the CPU build from TORCH_INDEX, the address that PyTorch's "Get started" page names for pip and CPU:
#     docker build --build-arg COMPUTE=cpu --build-arg TORCH_INDEX=ADDRESS -t swarmllm:cpu .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG COMPUTE=cuda
ARG TORCH_INDEX=
WORKDIR /swarmllm
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt ./
RUN case "$COMPUTE" in \
        cuda) pip install --no-cache-dir -c constraints.txt torch ;; \
        cpu) pip install --no-cache-dir -c constraints.txt --index-url "${TORCH_INDEX:?COMPUTE=cpu needs TORCH_INDEX}" torch ;; \
        *) echo "COMPUTE is cuda or cpu, not $COMPUTE" >&2; exit 2 ;; \
    esac
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

FROM python:${PYTHON}-slim
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
