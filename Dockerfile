# The two commands of the README, on CPUs:
#   docker build -t logitless . && docker run --rm logitless            # make demo
#   docker run --rm logitless make test
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /logitless
COPY . .
# torch without CUDA: of one version, pip prefers the one with a local part, such as 2.13.0+cpu.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make .venv/.ready
CMD ["make", "demo"]
