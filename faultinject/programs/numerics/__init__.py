"""The clients of the campaign `numerics`: products of matrices by cuBLAS, compared with exact references."""
