"""The vault: GPU memory that outlives its programs, held as descriptors that nothing here ever opens."""
