"""Rules as their papers print them, which carry no guarantee: by import path only, and only in runs marked so."""
