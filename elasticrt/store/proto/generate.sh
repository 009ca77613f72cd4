#!/bin/sh
# Generates the Python module beside ert_etcd.proto. Run by hand, only after a change of that file:
#     sh elasticrt/store/proto/generate.sh
# grpcio-tools 1.51.3 on purpose: its output carries no check of the protobuf runtime's version and works with protobuf
# 3.20.3 up to 7.x. A newer generator writes code that older runtimes refuse.
set -eu
cd "$(dirname "$0")"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet "setuptools<80" "grpcio-tools==1.51.3"
"$venv/bin/python" -m grpc_tools.protoc -I. --python_out=. ert_etcd.proto
