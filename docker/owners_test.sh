#!/usr/bin/env bash
# docs/owners.md, command by command, in containers: three nodes with 300 users each, every one with an account and a policy of its own; two runs, one
# question and one private evaluation, until two of the three refuse the fourth request. Then every account and every ledger
# verifies. Twenty minutes or more; needs `make install`.
#
# usage: docker/owners_test.sh         with the variables of test_engine.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export CONTAINERS=${CONTAINERS:-require}
. docker/test_engine.sh
up() { compose up -d "$@" >>"$WORK/up.log" 2>&1 || { cat "$WORK/up.log"; die "compose up"; }; }
RUN=(--set clients=900 --set sampling-rate=0.1 --set rounds=2 --set privacy.epsilon=2 --set privacy.delta=1e-3 --set model.name=random:bert
     --set model.layers=0 --set model.max-length=32)
train() { inside executor lacquer deploy /config/organisations.toml --quiet "${RUN[@]}" >"$WORK/run.log" 2>&1; }
at() { inside "client-$1" env XDG_STATE_HOME=/silo "${@:2}"; }
left() { at "$1" lacquer account show /silo/notes.account --json | python3 -c 'import json, sys; print(*[r["epsilon"] for r in json.load(sys.stdin)["runs"]])'; }

prepare
records "$WORK/users" 600
for i in 1 2 3; do export CLIENT_${i}_DATA="$WORK/users/client-$i"; done

# --- every owner makes an account and a policy, on its own node ------------------------------------------------------------
up
inside executor lacquer admit >"$WORK/admit.log" || { cat "$WORK/admit.log"; die "admit"; }
await 600 "three nodes are online" online 3
LIFETIME=(0 7.5 5.5 20)
for i in 1 2 3; do
  at $i lacquer account create /silo/notes.account --data notes --unit client --epsilon "${LIFETIME[i]}" --delta 0.1 --rule sum \
    >"$WORK/account-$i" 2>&1 || { cat "$WORK/account-$i"; die "no account at client-$i"; }
  inside "client-$i" sh -c 'cat > /silo/policy.toml' <<'P'
epsilon-per-run = 2.0
releases = 100
other-clients = 500
tasks = ["classification"]
P
done
export LACQUER_NODE_CONFIG='clients=300 clients-state="/silo/clients" account="/silo/notes.account" account-state="/silo/lacquer" policy="/silo/policy.toml"'
up
await 600 "three nodes are online again" online 3
say "three nodes are online, each with an account and a policy"

# --- two runs, a question, an evaluation -----------------------------------------------------------------------------------
for number in 1 2; do
  train || { tail -20 "$WORK/run.log"; die "run $number"; }
done
for i in 1 2 3; do [ "$(left $i)" = "2.0 2.0" ] || die "client-$i debited $(left $i) for two runs"; done
say "two runs are trained, and every account was debited by both"
inside executor lacquer deploy /config/organisations.toml --quiet "${RUN[@]}" --set privacy.epsilon=3 >"$WORK/run.log" 2>&1 && die "a run above the policy was taken"
[ "$(logged client-3 'allows an epsilon of at most 2 a run')" -gt 0 ] || { compose logs client-3 | tail -20; die "the policy is not why"; }
for i in 1 2 3; do [ "$(left $i)" = "2.0 2.0" ] || die "client-$i debited $(left $i) for a refused run"; done
say "a run above the policies is refused by the nodes, and costs nothing"
inside executor lacquer ask /config/organisations.toml "${RUN[@]}" --epsilon 1 --folder /runs/asked --yes >"$WORK/ask.log" 2>&1 || { tail -20 "$WORK/ask.log"; die "ask"; }
grep -q "This costs epsilon 1 at delta 0.001 for each of 900 clients" "$WORK/ask.log" || { cat "$WORK/ask.log"; die "the price is not told"; }
say "one question is answered over three nodes"
inside client-1 sh -c 'cat > /tmp/evaluation.toml' <<'T'
name = "evaluation"
rounds = 2
sampling-rate = 0.2
output = "/silo/runs"
[privacy]
epsilon = 2.0
delta = 1e-3
account = "/silo/notes.account"
[strategy]
controller = "fixed"
controller-options = { clip-norm = 0.05 }
[model]
name = "random:bert"
rank = 2
max-length = 16
[data]
source = "jsonl:/data/records.jsonl"
client-column = "patient"
partition = "natural"
validation-records = 20
test-records = 20
cache = "/cache"
[evaluation]
data = "private"
held-out = 0.3
every = 1000000
[engine]
kind = "inprocess"
T
at 1 lacquer run /tmp/evaluation.toml --quiet >"$WORK/evaluation.log" 2>&1 || { tail -20 "$WORK/evaluation.log"; die "private evaluation at client-1"; }
[ "$(left 1)" = "2.0 2.0 1.0 2.0" ] || die "client-1 debited $(left 1)"
inside client-1 sh -c 'cat /silo/runs/*/results.json' | python3 -c '
import json, sys
assert 0 < json.load(sys.stdin)["validation_accuracy_within"] <= 0.5' || die "the evaluation has no interval"
say "client-1 has evaluated privately, on its own host and account"

# --- one node asks its own records; an account is moved to another machine and back -----------------------------------------
OWN='data="jsonl:/data/records.jsonl" clients=300 account="/silo/notes.account" account-state="/silo/lacquer" cache="/cache"'
inside client-3 sh -c 'cat > /tmp/federation.toml' <docker/config/organisations.toml
at 3 lacquer ask /tmp/federation.toml "${RUN[@]}" --node-config "$OWN" --epsilon 0.5 --folder /silo/asked --yes >"$WORK/own.log" 2>&1 ||
  { tail -20 "$WORK/own.log"; die "client-3 cannot ask its own records"; }
[ "$(left 3)" = "2.0 2.0 1.0 0.5" ] || die "client-3 debited $(left 3)"
SEAT=$(inside client-3 env XDG_STATE_HOME=/silo/another lacquer account seat | tr -d '\r')
at 3 lacquer account move /silo/notes.account --to "$SEAT" >"$WORK/move" 2>&1 || { cat "$WORK/move"; die "the account does not move"; }
at 3 lacquer ask /tmp/federation.toml "${RUN[@]}" --node-config "$OWN" --epsilon 0.5 --folder /silo/again --yes >"$WORK/own.log" 2>&1 &&
  die "an account that has moved away is debited"
inside client-3 env XDG_STATE_HOME=/silo/another lacquer account move /silo/notes.account --to "$(at 3 lacquer account seat | tr -d '\r')" >"$WORK/move" 2>&1 ||
  { cat "$WORK/move"; die "the account does not move back"; }
at 1 sh -c 'lacquer account close /silo/notes.account /silo/runs/*' >"$WORK/close" 2>&1 || { cat "$WORK/close"; die "the evaluation does not close"; }
[ "$(left 1)" = "2.0 2.0 1.0 2.0" ] || die "client-1 was given back what its ledger does not prove: $(left 1)"
say "client-3 has asked its own records, moved its account and back; client-1 closed a run that leaves nothing"

# --- the fourth request ----------------------------------------------------------------------------------------------------
train && die "the fourth request was taken by accounts that cannot pay it"
for i in 1 2; do [ "$(logged "client-$i" 'epsilon 0.5 is left of')" -gt 0 ] || die "client-$i did not refuse for want of budget"; done
grep -q "nothing was charged" "$WORK/run.log" || { cat "$WORK/run.log"; die "the server does not say that nothing was charged"; }
[ "$(left 1) / $(left 2) / $(left 3)" = "2.0 2.0 1.0 2.0 / 2.0 2.0 1.0 / 2.0 2.0 1.0 0.5 2.0" ] || die "debits: $(left 1) / $(left 2) / $(left 3)"
say "the fourth request is refused by two of three; the server stops, as its rule says, before it charges"

# --- everything verifies ---------------------------------------------------------------------------------------------------
for i in 1 2 3; do
  at $i lacquer account verify /silo/notes.account >"$WORK/verify" 2>&1 || { cat "$WORK/verify"; die "the account of client-$i"; }
  grep -q "within the lifetime; chain whole" "$WORK/verify" || { cat "$WORK/verify"; die "the account of client-$i"; }
done
VERIFIED='
import pathlib, sys
from privacy.ledger.ledger import Ledger
charges = []
for file in sorted(pathlib.Path(sys.argv[1]).rglob("ledger.jsonl")):
    with Ledger.open(file, read_only=True) as ledger:
        assert ledger.not_private is None, file
        charges.append(len(ledger.charges))
assert sorted(charges) == [int(one) for one in sys.argv[2:]], charges'
inside executor python -c "$VERIFIED" /runs 0 0 1 2 2 || die "the server's ledgers"
inside client-1 python -c "$VERIFIED" /silo/runs 3 || die "the ledger of the evaluation"
inside client-1 sh -c 'lacquer statement /silo/runs/* >/dev/null' || die "no statement of the evaluation"
say "every account and every ledger verifies"
say "passed"
