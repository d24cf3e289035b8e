# Products on CPU workers. In the checkout:
#     docker build -f docker/cpu.Dockerfile -t multimm-cpu .
#     docker run --rm multimm-cpu multimm demo
FROM python:3.12-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
# The wheel stays: messages that say what to install name it.
COPY --from=build /wheels /opt/multimm
RUN pip install --no-cache-dir "$(echo /opt/multimm/*.whl)[demo,bench]"
RUN useradd --create-home multimm
USER multimm
WORKDIR /home/multimm
CMD ["multimm", "doctor"]
