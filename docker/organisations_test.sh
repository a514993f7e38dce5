#!/usr/bin/env bash
# Nodes with many clients in the containers of docs/deploy.md: three nodes of 3,000 users each train config/organisations.toml,
# two rounds with noise, then to the end without; then the adapter is, bit by bit, that of the simulation of the same users
# with the cohorts that the nodes have drawn by their own secrets. Ten minutes or more; needs `make install`.
#
# usage: docker/organisations_test.sh  with the variables of test_engine.sh
#        ROUNDS=6                      without noise; else those of the configuration
#        NOISY_ROUNDS=0                leaves the rounds with noise out; else two
set -euo pipefail
cd "$(dirname "$0")/.."
export CONTAINERS=${CONTAINERS:-require}
. docker/test_engine.sh
export PYTHONPATH=$PWD
up() { compose up -d >>"$WORK/up.log" 2>&1 || { cat "$WORK/up.log"; die "compose up"; }; }
train() { inside executor lacquer deploy /config/organisations.toml --quiet "$@" >"$WORK/run.log" 2>&1 || { tail -20 "$WORK/run.log"; die "no run: $*"; }; }
prepare
records "$WORK/users" 6000
for i in 1 2 3; do export CLIENT_${i}_DATA="$WORK/users/client-$i"; done
export LACQUER_NODE_CONFIG='clients=3000 clients-state="/silo/clients"'
up
inside executor lacquer admit >"$WORK/admit.log" || { cat "$WORK/admit.log"; die "admit"; }
await 600 "three nodes are online" online 3
say "three nodes are online"
if [ "${NOISY_ROUNDS:-2}" != 0 ]; then
  train --set rounds=${NOISY_ROUNDS:-2}
  inside executor sh -c 'cat /runs/*/privacy.json' | .venv/bin/python -c '
import json, sys
said = json.load(sys.stdin)
assert said["private"] and said["population"] == 9000, said' || die "the statement of the private run"
  inside executor sh -c 'rm -r /runs/*'
  for i in 1 2 3; do inside "client-$i" sh -c 'rm -r /silo/clients/*'; done
  say "9,000 users of three nodes have trained with noise"
fi
train --set privacy.noise=insecure-zero --set privacy.non-private=true ${ROUNDS:+--set rounds="$ROUNDS"}
mkdir -p "$WORK/one/run"
inside executor sh -c 'tar -C /runs/* -c .' | tar -C "$WORK/one/run" -x
for i in 1 2 3; do
  mkdir -p "$WORK/one/own-client-$i/state"
  inside "client-$i" tar -C /silo/clients -c . | tar -C "$WORK/one/own-client-$i/state" -x
done
say "they have trained without noise"
.venv/bin/python -m tests.docker.same_as_simulation "$WORK/one" "$WORK/users" || die "the federation is not the simulation"
say "passed"
