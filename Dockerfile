# docker build -t checkmate . && docker run --rm -v "$PWD:/work" checkmate plan model.graph.json --budget 50%
# The CPU build of PyTorch; for a GPU give --build-arg INDEX=https://download.pytorch.org/whl/cu130
FROM python:3.12-slim
ARG INDEX=https://download.pytorch.org/whl/cpu
# Kernels of the solver are compiled for any x86-64 or ARM processor, into a folder that every user of the image can write.
ENV NUMBA_CACHE_DIR=/opt/kernels NUMBA_CPU_NAME=generic PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /opt/checkmate
RUN pip install torch==2.13.0 --index-url "$INDEX"
RUN pip install -c /opt/checkmate/constraints.txt "/opt/checkmate[torch,cli]"
RUN checkmate plan /opt/checkmate/benchmarks/graphs/unet.graph.json --budget 50% --time-limit 10 --out /tmp/unet.plan.json \
    && rm /tmp/unet.plan.json && chmod -R a+rwX /opt/kernels
WORKDIR /work
ENTRYPOINT ["checkmate"]
