"""The runs of `mpsd-faultinject`: the matrix of faults, and the campaigns about one property each."""
