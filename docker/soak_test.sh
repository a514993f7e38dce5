#!/usr/bin/env bash
# A federation of three clients, in the containers of docs/deploy.md, trains for 60 rounds while its line stands still or is
# slow, its server fails, and every container is killed in turn; then with large messages. faults/deployment.py says what
# must hold of it afterwards, and writes what it counted; faults/superlink_cost.py first measures the SuperLink. An hour or more.
#
# usage: docker/soak_test.sh           with the variables of test_engine.sh
#        SOAK_OPTIONS="--rounds 60"    of faults/deployment.py
# Needs root where the engine runs (a slow line is made with nsenter and tc), and `make install`.
set -euo pipefail
cd "$(dirname "$0")/.."
export CONTAINERS=${CONTAINERS:-require}
. docker/test_engine.sh
export PYTHONPATH=$PWD
prepare
BEGAN=$SECONDS
compose up -d >"$WORK/up.log" 2>&1 || { cat "$WORK/up.log"; die "compose up"; }
inside executor lacquer admit >"$WORK/admit.log" || { cat "$WORK/admit.log"; die "admit"; }
await 300 "three clients are online" online 3
STARTED=$((SECONDS - BEGAN))
say "three clients are online $STARTED s after the first up -d"
(cd docker && ../.venv/bin/python -m simulations.benchmarks faults.superlink_cost --project "$PROJECT" \
  --stack-seconds $STARTED -- "${COMPOSE[@]}") || die "the SuperLink's cost"
# shellcheck disable=SC2086
(cd docker && ../.venv/bin/python -m simulations.benchmarks faults.deployment --project "$PROJECT" --stack-seconds $STARTED \
  ${SOAK_OPTIONS:-} -- "${COMPOSE[@]}") || die "the soak"
say "passed"
