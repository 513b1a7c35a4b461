# The README's two commands on NVIDIA's PyTorch image, whose torch and Transformer Engine they use:
#
#   docker build -t megatron_pg .
#   docker run --rm --gpus all --ipc host megatron_pg                      # bash examples/quickstart.sh
#   docker run --rm --gpus all --ipc host megatron_pg bash ci/test.sh
#
# Another base with Python 3.12 and torch 2.6 or later: --build-arg BASE=...
ARG BASE=nvcr.io/nvidia/pytorch:25.09-py3
FROM ${BASE}
WORKDIR /workspace/megatron_pg
COPY . .
# The image's own constraints (PIP_CONSTRAINT) keep its torch; the versions of the tests' other packages are setup.py's.
RUN python -m pip install --no-cache-dir -e '.[megatron,tools,docs,test]' -r examples/requirements.txt
# The scripts run with this Python, and make no virtual environment of their own.
ENV VENV_PYTHON=python
CMD ["bash", "examples/quickstart.sh"]
