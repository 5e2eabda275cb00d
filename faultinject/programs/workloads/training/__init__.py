"""Trainings in PyTorch, in the ways in which programs allocate, compile and communicate."""
