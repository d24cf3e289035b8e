# Products on GPUs, and scheduler, workers and clients of cluster/kubernetes: one image, so that all
# have the same versions. In the checkout:
#     docker build -f docker/gpu.Dockerfile -t multimm-gpu .
#     docker run --rm --gpus all --shm-size 1g multimm-gpu multimm demo
# CUDA's libraries come as Python packages; the driver comes from the host, through NVIDIA's runtime.
# For drivers of CUDA 12: --build-arg CUDA=cuda12
FROM python:3.12-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
ARG CUDA=cuda13
# The wheel stays: messages that say what to install name it.
COPY --from=build /wheels /opt/multimm
RUN pip install --no-cache-dir "$(echo /opt/multimm/*.whl)[demo,bench,${CUDA}]"
COPY cluster /opt/multimm
# As root: certificates that Kubernetes mounts may be read by root alone.
WORKDIR /root
CMD ["multimm", "doctor"]
