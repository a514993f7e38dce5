"""Commands for a federation of real nodes: certificates, identities, deployment."""
