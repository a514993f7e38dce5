# Part of container_test.sh, organisations_test.sh, owners_test.sh and soak_test.sh: what they say and wait for, an engine, a base image, the images.
#
# CONTAINERS=auto (skip, in words, where no engine can be had), require, off
# CONTAINER_CACHE=FOLDER keeps the base image made here for the next time.
# CONTAINER_BUILD_OPTIONS, such as "--network host", for an engine of yours.
# Uses an engine that answers; else, as root on Debian, installs one and runs it beside everything else: own socket, own
# data, no firewall rules, ended at the end by its process id.
MODE=${CONTAINERS:-auto} WORK=$(mktemp -d) PROJECT=lacquer-test-$$ START=$(date +%s)
PIDFILE=$WORK/engine.pid COMPOSED=""
read -ra BUILD_OPTIONS <<<"${CONTAINER_BUILD_OPTIONS:-}"
say() { printf 'container tests: %4d s  %s\n' $(($(date +%s) - START)) "$*"; }
skip() {
  echo "container tests: SKIPPED: $*"
  if [ "$MODE" = require ]; then exit 1; fi
  exit 0
}
die() { say "FAILED: $*"; exit 1; }
compose() ( cd docker && "${COMPOSE[@]}" -p "$PROJECT" --env-file "${SETTINGS:-env.server}" "$@" )
inside() { local service=$1; shift; compose exec -T "$service" "$@"; }
container() { compose ps -q "$1"; }
stranger() { # COMMAND...: as a user of this host who may do nothing
  if [ "$(id -u)" = 0 ]; then setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; else "$@"; fi
}
cleanup() {
  local status=$?
  if [ $status -ne 0 ] && [ -n "$COMPOSED" ]; then compose logs --no-color --tail 40 >"$WORK/logs" 2>&1 || true; tail -160 "$WORK/logs" || true; fi
  if [ -n "${ELSEWHERE:-}" ]; then elsewhere down -v -t 1 >/dev/null 2>&1 || true; fi
  if [ -n "$COMPOSED" ]; then compose down -v -t 1 >/dev/null 2>&1 || true; fi
  if [ -f "$PIDFILE" ]; then
    local engine; engine=$(cat "$PIDFILE"); kill "$engine" 2>/dev/null || true
    for _ in $(seq 300); do kill -0 "$engine" 2>/dev/null || break; sleep 0.1; done
  fi
  rm -rf "$WORK" 2>/dev/null || true
  exit $status
}
trap cleanup EXIT
[ "$MODE" = off ] && skip "CONTAINERS=off"

logged() { compose logs --no-color "$1" 2>&1 | grep -cF -- "$2" || true; }
online() { [ "$(inside executor lacquer clients | grep -c online)" = "$1" ]; }
await() { # SECONDS WHAT COMMAND...: until the command succeeds; of a slow host three times as long
  local limit=$((3 * $1)) what=$2 since=$SECONDS; shift 2
  until "$@"; do
    [ $((SECONDS - since)) -lt "$limit" ] || die "not within $limit s: $what"
    sleep 3
  done
}
records() { # FOLDER NUMBER: so many notes for each of three clients, in FOLDER/client-1 and so on
  mkdir "$1"
  docker run --rm --network none "$LACQUER_IMAGE" python -c "
import pathlib, sys, tarfile
from simulations.tools.sample_records import write_records
write_records(pathlib.Path('/tmp/records'), 3, $2)
tarfile.open(fileobj=sys.stdout.buffer, mode='w|').add('/tmp/records', '.')" | tar -C "$1" -x
  chmod -R a+rX "$1"
}
prepare() { # three clients with a few records of their own, and all keys
  chmod a+x "$WORK"
  records "$WORK/records" 48
  cp -r docker/config "$WORK/config"
  chmod -R a+rX "$WORK/config"
  export LACQUER_CONFIG=$WORK/config
  for i in 1 2 3; do export CLIENT_${i}_DATA="$WORK/records/client-$i"; done
  COMPOSED=1
  compose config -q
  compose run --rm keys >"$WORK/keys.log" 2>&1 || { cat "$WORK/keys.log"; die "keys"; }
}

# --- an engine ---------------------------------------------------------------------------------------------------------
export PATH=/usr/bin:$PATH DOCKER_BUILDKIT=1   # Debian's own client: others lack what its builder needs
if ! docker info >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] || skip "no container engine answers, and this is not root"
  missing=""; for command in dockerd docker-compose mmdebstrap; do command -v $command >/dev/null || missing=1; done
  if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || skip "no container engine, and no apt-get to install one"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      docker.io docker-compose mmdebstrap; } >"$WORK/apt.log" 2>&1 || { tail -3 "$WORK/apt.log"; skip "apt-get install failed"; }
    hash -r   # forget where commands were before
  fi
  export DOCKER_HOST=unix://$WORK/engine.sock
  for driver in overlay2 vfs; do
    setsid dockerd --host "$DOCKER_HOST" --data-root "$WORK/data" --exec-root "$WORK/exec" --pidfile "$PIDFILE" \
      --storage-driver $driver --iptables=false --ip-masq=false --ip-forward=false --bridge=none \
      >"$WORK/engine.log" 2>&1 </dev/null &
    started=$!
    for _ in $(seq 150); do
      docker info >/dev/null 2>&1 && break 2
      kill -0 $started 2>/dev/null || break
      sleep 0.2
    done
    kill $started 2>/dev/null || true; wait $started 2>/dev/null || true
  done
  docker info >/dev/null 2>&1 || { tail -3 "$WORK/engine.log"; skip "the container engine does not start"; }
  BUILD_OPTIONS+=(--network host)
fi
COMPOSE=(docker-compose); if docker compose version >/dev/null 2>&1; then COMPOSE=(docker compose); fi
say "engine $(docker info -f '{{.ServerVersion}} {{.Driver}}')"

# --- a base image ------------------------------------------------------------------------------------------------------
BASE=python:3.11-slim-bookworm
if ! docker image inspect $BASE >/dev/null 2>&1 && ! docker pull -q $BASE >/dev/null 2>&1; then
  BASE=localbase/python:3.11 TAR=${CONTAINER_CACHE:-$WORK}/base.tar
fi
if ! docker image inspect $BASE >/dev/null 2>&1; then
  if [ ! -f "$TAR" ]; then
    mkdir -p "$(dirname "$TAR")"
    mmdebstrap --quiet --variant=minbase --include=python3-minimal,python3-venv,python3-pip,ca-certificates \
      --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook='ln -s /usr/bin/python3 "$1/usr/local/bin/python"' \
      --customize-hook='rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED' \
      bookworm "$TAR.new.tar" /etc/apt/sources.list.d/debian.sources 2>"$WORK/base.log" || { tail -3 "$WORK/base.log"; skip "no base image"; }
    mv "$TAR.new.tar" "$TAR"
  fi
  docker import -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$TAR" $BASE >/dev/null
fi
say "base image $BASE"

# --- the image: torch is the build that this machine's pip would take -----------------------------------------------------
PIP=(.venv/bin/python -m pip); [ -x .venv/bin/python ] || PIP=(python3 -m pip)
mkdir "$WORK/wheels"
"${PIP[@]}" download -q --no-deps -c constraints.txt -d "$WORK/wheels" torch >"$WORK/pip.log" 2>&1 || { tail -3 "$WORK/pip.log"; die "no torch"; }
WHEELS=lacquer-wheels:$(cat "$WORK"/wheels/* | sha256sum | cut -c1-12)
docker image inspect "$WHEELS" >/dev/null 2>&1 || tar -C "$WORK/wheels" -c . | docker import - "$WHEELS" >/dev/null
rm -r "$WORK/wheels"
for bundle in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt; do
  if [ -n "$bundle" ] && [ -f "$bundle" ]; then BUILD_OPTIONS+=(--secret "id=ca_bundle,src=$bundle"); break; fi
done
if index=$("${PIP[@]}" config get global.index-url 2>/dev/null); then
  echo "$index" >"$WORK/index"; BUILD_OPTIONS+=(--secret "id=index_url,src=$WORK/index")
fi
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
export LACQUER_IMAGE=$PROJECT:image LACQUER_SUPERLINK_IMAGE=$PROJECT:superlink LACQUER_GATEWAY_IMAGE=$PROJECT:gateway
docker build -q "${BUILD_OPTIONS[@]}" --build-arg DEBIAN_IMAGE=$BASE --build-arg REVISION="$REVISION" \
  -f docker/gateway.Dockerfile -t "$LACQUER_GATEWAY_IMAGE" . \
  >"$WORK/build.log" 2>&1 || { tail -30 "$WORK/build.log"; die "the gateway's image is not built"; }
docker build -q "${BUILD_OPTIONS[@]}" --build-arg PYTHON_IMAGE=$BASE --build-arg REVISION="$REVISION" \
  -f docker/superlink.Dockerfile -t "$LACQUER_SUPERLINK_IMAGE" . \
  >"$WORK/build.log" 2>&1 || { tail -30 "$WORK/build.log"; die "the SuperLink's image is not built"; }
image() { docker build -q "${BUILD_OPTIONS[@]}" --build-arg PYTHON_IMAGE=$BASE --build-arg WHEELS_IMAGE="$WHEELS" \
  --build-arg REVISION="$REVISION" -f docker/Dockerfile "$@" . >"$WORK/build.log" 2>&1; }
image -t "$LACQUER_IMAGE" || { tail -30 "$WORK/build.log"; die "the image is not built"; }
size() { docker image inspect -f '{{.Size}}' "$1"; }
SIZE=$(size "$LACQUER_IMAGE")
say "images built: $((SIZE / 1000000)) MB, SuperLink $(($(size "$LACQUER_SUPERLINK_IMAGE") / 1000000)) MB, gateway $(($(size "$LACQUER_GATEWAY_IMAGE") / 1000000)) MB"
