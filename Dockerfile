# Images of the toolkit. From a clean checkout:
#   docker build --target cpu  -t neox:cpu .
#   docker build --target cuda -t neox:cuda .
# The environment is /opt/neox/.venv, and first on PATH. tools/launch_container.py mounts a checkout over the image's own.

FROM python:3.11-slim-bookworm AS base
RUN apt-get update && apt-get install -y --no-install-recommends git make openssh-client pdsh && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 neox && mkdir /opt/neox && chown neox:neox /opt/neox
WORKDIR /opt/neox
COPY --chown=neox:neox . .
ENV PATH=/opt/neox/.venv/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS cpu
USER neox
RUN make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
CMD ["bash"]

# torch's wheels bring CUDA; the driver comes from the host (nvidia-container-toolkit). gcc is for Triton's kernels,
# libibverbs for NCCL over InfiniBand.
FROM base AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libibverbs1 librdmacm1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER neox
RUN make install
CMD ["bash"]
