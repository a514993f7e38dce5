"""Everything that a proof leans on. Imports nothing of the other rooms, so it can be read and audited alone; start at README.md."""
