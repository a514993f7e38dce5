# The gateway: Debian's nginx with gateway.conf.
#
# DEBIAN_IMAGE      any Debian 12 or later, or one made from its packages
# REVISION, SOURCE  of this repository, for the image's labels: its commit, and where you publish it
ARG DEBIAN_IMAGE=debian:bookworm-slim
FROM ${DEBIAN_IMAGE}
# Security updates of Debian come with a new build; a version pinned here would keep them out.
# hadolint ignore=DL3008
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && groupadd --gid 10001 lacquer && useradd --uid 10001 --gid 10001 --no-create-home lacquer \
 && install -d -o lacquer -g lacquer -m 0700 /admitted
COPY docker/gateway.conf /etc/lacquer/gateway.conf
COPY docker/gateway.sh /usr/local/bin/gateway
USER 10001:10001
CMD ["gateway"]
ARG DEBIAN_IMAGE
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="lacquer-gateway" \
      org.opencontainers.image.description="The Fleet API of a SuperLink, and nothing else of it" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${DEBIAN_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
