"""Reports: their form, their files and tables, and the revision of the code that made them."""
