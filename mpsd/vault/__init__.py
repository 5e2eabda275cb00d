"""The vault: GPU memory that outlives its programs, held as descriptors that mpsd never opens."""
