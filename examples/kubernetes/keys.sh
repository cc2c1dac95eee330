#!/bin/sh
# Their namespace, and keys of `pdbus keys` as objects of Kubernetes, each part's own secret in a Secret of its own. The
# lists are read again by running parts, within the minute or so that a kubelet takes; secrets with the next start
# (docs/deploy.md). Nothing is written where a file is missing.
set -eu
keys=${1:?"usage: keys.sh DIRECTORY (of pdbus keys new)"}

object() { # kind, name, files
    kind=$1 name=$2
    shift 2
    echo ---
    kubectl create $kind "$name" --namespace pdbus --dry-run=client --output yaml "$@"
}

for file in allow/brokers allow/controllers allow/nodes allow/clients allow/admins secrets/brokers/*.secret \
    secrets/controllers/*.secret secrets/nodes/prefill*.secret secrets/nodes/decode*.secret secrets/clients/edge*.secret; do
    set -- "$keys"/$file # the first that there is
    if [ ! -e "$1" ]; then
        echo "keys.sh: $1 is not there: a secret is here until pdbus keys give moves it away (docs/deploy.md, Keys)" >&2
        exit 1
    fi
done

cat "$(dirname "$0")/base/namespace.yaml"
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
