"""The network of a run: nodes, certificates, signed instructions, the SuperLink."""
