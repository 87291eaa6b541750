# Topspin's image, for all roles.
#
#   docker build -t topspin:0.1.0 --target cpu \
#     --build-arg PIP_EXTRA_INDEX_URL=INDEX_OF_CPU_BUILDS_OF_TORCH .
#   docker build -t topspin:0.1.0-cuda --target cuda .
#
# torch's build is that of pip's index: for CPUs give an index that has the builds for CPUs
# (torch's installation page names it); the plain one is for NVIDIA GPUs. buildah and podman take
# the same arguments. Deployments pin PYTHON_IMAGE by its digest.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/topspin
RUN apt-get update && apt-get install -y --no-install-recommends tini \
    && cp /usr/bin/tini-static /opt/topspin/bin/tini
# Before the sources, which change more often.
COPY deploy/images/constraints.txt /src/constraints.txt
RUN /opt/topspin/bin/pip install -r /src/constraints.txt
COPY . /src
RUN /opt/topspin/bin/pip install --no-deps /src && /opt/topspin/bin/pip uninstall -y setuptools pip
# For the processor of this build; containers on others compile them anew, into their cache.
RUN NUMBA_CACHE_DIR=/opt/topspin/kernels /opt/topspin/bin/python -m deploy.images.compile_kernels

FROM ${PYTHON_IMAGE} AS cpu
LABEL org.opencontainers.image.title="Topspin" \
      org.opencontainers.image.description="Serves Mixture-of-Experts language models" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/topspin /opt/topspin
# All that is written is below /topspin; the root may be read-only. A tmpfs takes the mode of the
# folder under it, whatever its own options say, and belongs to root.
RUN install -d -o 10001 -g 10001 /topspin/models /topspin/spill \
    && install -d -o 10001 -g 10001 -m 1777 /topspin/cache /topspin/run
ENV PATH=/opt/topspin/bin:$PATH \
    TOPSPIN_PREPARED_KERNELS=/opt/topspin/kernels \
    TOPSPIN_CACHE=/topspin/models \
    HF_HOME=/topspin/models/huggingface \
    NUMBA_CACHE_DIR=/topspin/cache/numba \
    TRITON_CACHE_DIR=/topspin/cache/triton \
    HOME=/topspin/cache
WORKDIR /topspin/cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Process 1 is tini: signals that a node leaves to the kernel would not reach it as process 1.
ENTRYPOINT ["tini", "--", "topspin"]

FROM cpu AS cuda
# Triton compiles a launcher in C for each kernel when it is first used: the one compiler here.
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
