# syntax=docker/dockerfile:1
# Baton for NVIDIA GPUs: docker build --tag baton:0.2.0 .
ARG PYTHON=python:3.11.14-slim-bookworm

# MPICH, whose mpiexec starts NVIDIA's collective tests over nodes (docs/adr/099). Its libraries find each other.
FROM ${PYTHON} AS mpich
COPY locks/image-mpich.txt /locks/
RUN pip install --no-cache-dir --no-deps --require-hashes --prefix /opt/mpich --requirement /locks/image-mpich.txt

# NVIDIA's collective tests, for `baton doctor`. They keep the NCCL, CUDA and MPI libraries that they were built with beside them.
FROM nvidia/cuda:13.0.0-devel-ubuntu22.04 AS nccl-tests
ARG NCCL_TESTS=v2.16.9
ARG GENCODE="-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_100,code=compute_100"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git libnccl-dev patchelf \
 && rm -rf /var/lib/apt/lists/* \
 && git clone --depth 1 --branch "$NCCL_TESTS" https://github.com/NVIDIA/nccl-tests.git /src
WORKDIR /src
COPY --from=mpich /opt/mpich /opt/mpich
RUN make --jobs="$(nproc)" NVCC_GENCODE="$GENCODE" MPI=1 MPI_HOME=/opt/mpich \
 && mkdir -p /opt/nccl-tests/bin /opt/nccl-tests/lib \
 && cp build/*_perf /opt/mpich/bin/mpiexec.hydra /opt/mpich/bin/hydra_pmi_proxy /opt/nccl-tests/bin/ \
 && cp -a /opt/mpich/lib/libmpi.so* /opt/mpich/lib/mpich /opt/nccl-tests/lib/ \
 && ldd build/all_reduce_perf | awk '$1 ~ /^lib(nccl|cudart)/ {print $3}' | xargs -I{} cp -L {} /opt/nccl-tests/lib/ \
 && patchelf --set-rpath "\$ORIGIN/../lib" /opt/nccl-tests/bin/*_perf

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Compilers for the scheduler (docs/adr/109) and the native kernels (docs/adr/097).
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && python -m venv /opt/build \
 && python -m venv /opt/baton
WORKDIR /src
# Each release with its hashes (docs/supply-chain.md). The locks are complete: nothing is resolved here.
COPY locks locks
RUN /opt/baton/bin/pip install --no-deps --require-hashes --requirement locks/torch.txt --requirement locks/cuda.txt \
    --requirement locks/triton.txt --requirement locks/image.txt --requirement locks/image-gpu.txt \
 && /opt/build/bin/pip install --no-deps --require-hashes --requirement locks/build.txt
COPY . .
RUN BATON_COMPILE=1 /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/baton/bin/pip install --no-deps --no-index /wheels/*.whl \
 && /opt/baton/bin/pip check

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Baton" org.opencontainers.image.licenses="Apache-2.0"
# A C compiler for Triton, which builds its launchers when they are first used; the verbs libraries for RDMA.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends curl gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --user-group --create-home baton
COPY --from=nccl-tests /opt/nccl-tests /opt/nccl-tests
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:/opt/nccl-tests/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/baton
EXPOSE 8000
ENTRYPOINT []
CMD ["baton", "serve", "--host", "0.0.0.0"]
