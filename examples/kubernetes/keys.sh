#!/bin/sh
# Keys of `pdbus keys` as objects of Kubernetes, each part's own secret in a Secret of its own. The lists are read again
# by running parts, within the minute or so that a kubelet takes; secrets with the next start (docs/deploy.md).
set -eu
keys=${1:?"usage: keys.sh DIRECTORY (of pdbus keys new)"}

object() { # kind, name, files
    kind=$1 name=$2
    shift 2
    kubectl create $kind "$name" --namespace pdbus --dry-run=client --output yaml "$@"
    echo ---
}

for role in brokers controllers nodes clients admins; do
    object configmap "pdbus-allow-$role" --from-file="$keys/allow/$role"
done
object "secret generic" pdbus-key-broker --from-file="$keys/secrets/brokers"
object "secret generic" pdbus-key-controller --from-file="$keys/secrets/controllers"
for role in prefill decode; do # a pod takes that of its instance
    set --
    for secret in "$keys/secrets/nodes/$role"*.secret; do
        set -- "$@" --from-file="$secret"
    done
    object "secret generic" "pdbus-key-$role" "$@"
done
newest=$(ls -t "$keys"/secrets/clients/edge*.secret | head -n 1)
object "secret generic" pdbus-key-edge --from-file="$newest"
