"""Guard zones that a proxied client laid in its own address space: its ledger, its share, its hits."""
