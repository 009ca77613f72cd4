#!/usr/bin/env bash
# Makes a certificate authority and the two Secrets that TLS needs (components/etcd-tls, components/agents-tls), and
# prints the Secrets:
#
#     certificates.sh NAMESPACE [DAYS] | kubectl apply --namespace NAMESPACE --filename -
#
# The authority's key is not kept. Before DAYS (365) have passed, run this again, and replace all certificates.
set -euo pipefail
umask 077
namespace=${1:?usage: certificates.sh NAMESPACE [DAYS]}
days=${2:-365}
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

names=DNS:localhost,IP:127.0.0.1
for member in etcd-0 etcd-1 etcd-2; do
  for suffix in "" ".$namespace" ".$namespace.svc" ".$namespace.svc.cluster.local"; do
    names+=,DNS:$member.etcd$suffix
  done
done

key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
openssl req -x509 "${key[@]}" -keyout ca.key -out ca.crt -subj "/CN=elasticrt etcd in $namespace" -days "$days" 2>/dev/null

make() { # NAME SUBJECT EXTENDED_KEY_USAGE [NAMES]
  openssl req "${key[@]}" -keyout "$1.key" -out "$1.csr" -subj "/CN=$2" 2>/dev/null
  printf 'extendedKeyUsage=%s\n' "$3" >"$1.ext"
  if [[ -n ${4:-} ]]; then printf 'subjectAltName=%s\n' "$4" >>"$1.ext"; fi
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days "$days" -extfile "$1.ext" -out "$1.crt" 2>/dev/null
}
# The members of etcd are clients of each other.
make server etcd serverAuth,clientAuth "$names"
make client elasticrt clientAuth

for name in server client; do
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: etcd-%s-tls\ntype: kubernetes.io/tls\ndata:\n' "$name"
  printf '  ca.crt: %s\n' "$(base64 -w0 ca.crt)"
  printf '  tls.crt: %s\n' "$(base64 -w0 "$name.crt")"
  printf '  tls.key: %s\n' "$(base64 -w0 "$name.key")"
done
