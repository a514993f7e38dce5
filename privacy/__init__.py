"""Everything that a proof leans on. Imports no other room, so it can be read and audited alone; start at README.md."""
